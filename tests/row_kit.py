"""The device's state of sampling rows, made from what rows ask for."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from batches import Sampling
from torch import Tensor

from cbrs.kernels.reference import RowState


def row_state(rows: Sequence[Sampling], room: int = 3) -> RowState:
    """Return the state of `rows`; lists have `room` for ids to come, and gaps between them."""
    seen = [_seen(row) for row in rows]
    words = [row.bad_words for row in rows]
    every_word = [word for own in words for word in own]
    num_words = [len(own) for own in words]
    bias = [list(row.bias.items()) for row in rows]
    output = [row.output for row in rows]
    int64, int32 = torch.int64, torch.int32
    return RowState(
        presence_penalty=_column(rows, lambda row: row.presence_penalty),
        frequency_penalty=_column(rows, lambda row: row.frequency_penalty),
        repetition_penalty=_column(rows, lambda row: row.repetition_penalty),
        bias_start=_starts(bias, 1),
        bias_length=_lengths(bias),
        bias_ids=_flat([[token for token, _ in own] for own in bias], 1),
        bias_values=_flat([[value for _, value in own] for own in bias], 1, torch.float32),
        seen_start=_starts(seen, room),
        seen_length=_lengths(seen),
        seen_capacity=torch.tensor(
            [
                len(own) + room if row.has_history else 0
                for own, row in zip(seen, rows, strict=True)
            ],
            dtype=int32,
        ),
        seen_ids=_flat([[token for token, _ in own] for own in seen], room),
        seen_counts=_flat([[count for _, count in own] for own in seen], room),
        banned_start=_starts([row.banned for row in rows], 1),
        banned_length=_lengths([row.banned for row in rows]),
        banned_ids=_flat([row.banned for row in rows], 1),
        min_tokens=_column(rows, lambda row: row.min_tokens, int32),
        words_start=torch.tensor([sum(num_words[:row]) for row in range(len(rows))], dtype=int64),
        words_length=torch.tensor(num_words, dtype=int32),
        word_start=_starts(every_word or [[0]], 1),
        word_length=_lengths(every_word or [[0]]),
        word_ids=_flat(every_word or [[0]], 1),
        output_start=_starts(output, room),
        output_capacity=torch.tensor(
            [len(row.output) + room if row.bad_words else 0 for row in rows], dtype=int32
        ),
        output_ids=_flat(output, room),
    )


def _seen(row: Sampling) -> list[tuple[int, int]]:
    if not row.has_history:
        return []
    generated = Counter(row.output)
    return [(token, generated[token]) for token in dict.fromkeys(row.prompt + row.output)]


def _column(
    rows: Sequence[Sampling],
    value: Callable[[Sampling], Any],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    return torch.tensor([value(row) for row in rows], dtype=dtype)


def _starts(lists: Sequence[Sequence[Any]], room: int) -> Tensor:
    sizes = torch.tensor([0, *(len(own) + room for own in lists)])
    return sizes.cumsum(0)[:-1]


def _lengths(lists: Sequence[Sequence[Any]]) -> Tensor:
    return torch.tensor([len(own) for own in lists], dtype=torch.int32)


def _flat(lists: Sequence[Sequence[Any]], room: int, dtype: torch.dtype = torch.int32) -> Tensor:
    # A gap holds an id that every check would see if it were taken for one of the list.
    return torch.tensor([value for own in lists for value in [*own, *[2] * room]], dtype=dtype)
