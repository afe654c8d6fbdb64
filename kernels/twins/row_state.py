"""What changes a row's logits before a token is drawn, and what a drawn token leaves behind.

Rows keep lists of varying length in flat tensors that all rows share: those of `row` are at
`start[row]` to `start[row] + length[row]`. Whoever gives a row out fills them; the device keeps
the history itself, so that a step can be planned before the tokens of the last one are known.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowState(NamedTuple):
    """Parameters and lists by row; all on one device. `max_num_seqs` rows.

    Penalties are float32. The flat tensors may not be empty: one unused element will do.

    `bias_*`: int32 ids, no id twice in a row, and float32 values. `seen_*`: int32 ids that prompt
    or output hold, no id twice in a row, and int32 numbers of times that each was *generated*; only
    rows with penalties need them, and `seen_capacity` is the room of a row. `banned_*`: int32 ids
    that are excluded while fewer than `min_tokens` tokens were generated. `words_start` and
    `words_length`: which words are bad in a row; of word `i` the int32 ids are
    `word_ids[word_start[i]:word_start[i] + word_length[i]]`, at least one. `output_*`: int32 ids
    generated so far, for rows with bad words; `output_capacity` 0 for rows without. Starts are
    int64, lengths and capacities int32, all `[max_num_seqs]` (`word_*` `[num_words]`).
    """

    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor
    bias_start: Tensor
    bias_length: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    seen_start: Tensor
    seen_length: Tensor
    seen_capacity: Tensor
    seen_ids: Tensor
    seen_counts: Tensor
    banned_start: Tensor
    banned_length: Tensor
    banned_ids: Tensor
    min_tokens: Tensor
    words_start: Tensor
    words_length: Tensor
    word_start: Tensor
    word_length: Tensor
    word_ids: Tensor
    output_start: Tensor
    output_capacity: Tensor
    output_ids: Tensor


def change_logits(
    scores: Tensor,
    unusable: Tensor,
    logits: Tensor,
    logits_index: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: RowState,
) -> None:
    """Fill `scores` with the logits of the samples after bias, penalties and bans.

    `scores` is float32 `[num_samples, vocab_size]`; `logits` is `[num_logits, padded_vocab]`, any
    floating dtype, and left as it is. int32 `[num_samples]` are `logits_index` (row of the
    logits), `rows` (row of the state; -1 for padding, of which nothing is filled) and `positions`
    (tokens generated so far). `unusable` is int32 `[num_samples]` and becomes 1 where the untouched
    logits hold a NaN or their largest is not finite, else 0.

    In this order: bias; repetition penalty (of prompt and output); frequency, then presence
    penalty (of the output alone). What overflows becomes the largest finite number, what was minus
    infinity stays it. Banned ids become minus infinity whatever else was done to them: those of
    `banned_ids` for the first `min_tokens` tokens, and the last id of a bad word if the output
    ends in the ids before it. Ids outside the vocabulary are ignored.
    """
    vocab_size = scores.shape[1]
    for sample, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        own = scores[sample]
        own.copy_(logits[logits_index[sample], :vocab_size])
        unusable[sample] = int(not own.max().isfinite())
        impossible = own.isinf()
        limit = torch.finfo(torch.float32).max
        for change in (_add_bias, _penalise):
            before = own.clone()
            change(own, state, row)
            own.copy_(torch.where(impossible, before, own.clamp(-limit, limit)))
        banned = _known(
            _values(state.banned_ids, state.banned_start, state.banned_length, row), own
        )
        num_outputs = int(positions[sample])
        if num_outputs < int(state.min_tokens[row]):
            own[banned] = -torch.inf
        own[_known(_completed(state, row, num_outputs), own)] = -torch.inf


def record_tokens(token_ids: Tensor, rows: Tensor, positions: Tensor, state: RowState) -> None:
    """Add the tokens just drawn to the histories of their rows, which are distinct.

    `token_ids`, `rows` (-1 for padding) and `positions` (tokens generated before this one) are
    int32 `[num_samples]`. `seen_*` grows by at most one id; a row without room for it, and one
    whose output list is full, is left as it is.
    """
    for token, row, position in zip(
        token_ids.tolist(), rows.tolist(), positions.tolist(), strict=True
    ):
        if row < 0:
            continue
        if position < int(state.output_capacity[row]):
            state.output_ids[state.output_start[row] + position] = token
        start, length = int(state.seen_start[row]), int(state.seen_length[row])
        found = (state.seen_ids[start : start + length] == token).nonzero()
        if len(found) > 0:
            state.seen_counts[start + found[0, 0]] += 1
        elif length < int(state.seen_capacity[row]):
            state.seen_ids[start + length] = token
            state.seen_counts[start + length] = 1
            state.seen_length[row] = length + 1


def _values(flat: Tensor, start: Tensor, length: Tensor, row: int) -> Tensor:
    return flat[int(start[row]) : int(start[row]) + int(length[row])]


def _known(ids: Tensor, scores: Tensor) -> Tensor:
    return ids[(ids >= 0) & (ids < len(scores))].long()


def _add_bias(scores: Tensor, state: RowState, row: int) -> None:
    ids = _values(state.bias_ids, state.bias_start, state.bias_length, row)
    values = _values(state.bias_values, state.bias_start, state.bias_length, row)
    scores[_known(ids, scores)] += values[(ids >= 0) & (ids < len(scores))]


def _penalise(scores: Tensor, state: RowState, row: int) -> None:
    ids = _values(state.seen_ids, state.seen_start, state.seen_length, row)
    counts = _values(state.seen_counts, state.seen_start, state.seen_length, row)
    counts = counts[(ids >= 0) & (ids < len(scores))]
    ids = _known(ids, scores)
    old, repetition = scores[ids], state.repetition_penalty[row]
    new = torch.where(old > 0, old / repetition, old * repetition)
    new = new - state.frequency_penalty[row] * counts
    scores[ids] = new - state.presence_penalty[row] * (counts > 0)


def _completed(state: RowState, row: int, num_outputs: int) -> Tensor:
    """Return the ids that would complete a bad word."""
    start = int(state.output_start[row])
    output = state.output_ids[start : start + num_outputs].tolist()
    first, count = int(state.words_start[row]), int(state.words_length[row])
    found = []
    for word in range(first, first + count):
        *lead, last = _values(state.word_ids, state.word_start, state.word_length, word).tolist()
        if len(lead) <= num_outputs and lead == output[num_outputs - len(lead) :]:
            found.append(last)
    return torch.tensor(found, dtype=torch.int32, device=state.word_ids.device)
