"""From the flat arrays of log-probabilities to the dicts that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbrs._core import Logprobs, Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely one token was at its place, before penalties, bias and temperature."""

    logprob: float
    """Natural logarithm of its probability; -9999.0 stands for minus infinity."""
    rank: int
    """1 = the most likely token of the vocabulary."""
    decoded_token: str | None
    """The text of the token alone; None without a tokenizer."""


class TokenTexts(dict[int, str | None]):
    """The text of each token alone, looked up once per id; at most one entry per token."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer every text is None."""
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        """Looks `token_id` up and keeps its text."""
        tokenizer = self._tokenizer
        text = None if tokenizer is None else tokenizer.decode([token_id], False)
        self[token_id] = text
        return text


def to_dicts(logprobs: Logprobs, texts: TokenTexts) -> list[dict[int, Logprob]]:
    """Returns one dict per token: itself first, then the most likely ids, most likely first.

    A token that is among the most likely ones has one entry.
    """
    starts = logprobs.start.tolist()
    ids, values = logprobs.token_ids.tolist(), logprobs.values.tolist()
    rows: list[dict[int, Logprob]] = []
    for row, rank in enumerate(logprobs.ranks.tolist()):
        first, end = starts[row], starts[row + 1]
        entries = {ids[first]: Logprob(values[first], rank, texts[ids[first]])}
        for place in range(first + 1, end):
            token_id = ids[place]
            if token_id not in entries:
                entries[token_id] = Logprob(values[place], place - first, texts[token_id])
        rows.append(entries)
    return rows
