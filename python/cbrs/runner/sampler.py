"""From logits to tokens: greedy, temperature, top_k, top_p, min_p.

Every operation works on each row by itself, so a row's token depends on that row's logits and
parameters only, bit for bit, whatever its neighbours are. The order is temperature, top_k, top_p
(of what top_k left), min_p; then one uniform number picks from the cumulated probabilities in the
order of the ids.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbrs.runner.philox import uniforms

GREEDY_TEMPERATURE = 1e-4
"""At or below this temperature a row is greedy: only logits closer than 1e-3 could tell."""

_ROWS_AT_ONCE = 32
"""Rows of float64 probabilities held at a time; bounds memory, changes no result."""

_FIRST_SORT = 1024
"""top_p sorts this many candidates first, and all of a row only if their mass does not reach it."""


@dataclass(frozen=True)
class _Row:
    """Parameters of the sampled rows, each `[num_rows]`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    def select(self, index: Tensor) -> "_Row":
        return _Row(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.uniform[index],
        )


class Sampler:
    """Picks one token per sample of a batch."""

    def __init__(self, vocab_size: int) -> None:
        """Sample ids below `vocab_size` only: what the tokenizer knows, without padding."""
        self.vocab_size = vocab_size

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, batch: Any
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8] | None]:
        """Return int32 tokens `[num_samples]` and, if any row is unusable, its uint8 mark.

        `logits` is float32 `[num_logits, padded_vocab]`. A row whose largest logit is not a finite
        number, or that holds a NaN, is marked 1 and gets token 0.
        """
        usable = self._rows(logits, batch.sample_index)
        largest, tokens = usable.max(dim=-1)  # the lowest id among equals; NaN if there is one
        rows = batch.sample_rows
        temperature = batch.temperature[rows]
        drawn = np.flatnonzero(temperature > GREEDY_TEMPERATURE)
        bad = ~torch.isfinite(largest)
        any_bad = bool(bad.any())
        if len(drawn) > 0:
            index = torch.from_numpy(drawn).to(logits.device)
            if any_bad:
                index = index[~bad[index]]
            self._draw(usable, tokens, largest, index, _parameters(batch, logits.device))
        if any_bad:
            tokens.masked_fill_(bad, 0)
        ids: npt.NDArray[np.int32] = tokens.to(torch.int32).cpu().numpy()
        marks = bad.to(torch.uint8).cpu().numpy() if any_bad else None
        return ids, marks

    def _rows(self, logits: Tensor, sample_index: npt.NDArray[np.int32]) -> Tensor:
        usable = logits[:, : self.vocab_size]
        if len(sample_index) == len(logits) and np.array_equal(
            sample_index, np.arange(len(logits))
        ):
            return usable
        index = torch.from_numpy(sample_index.astype(np.int64)).to(logits.device)
        return usable.index_select(0, index)

    def _draw(
        self, logits: Tensor, tokens: Tensor, largest: Tensor, index: Tensor, rows: _Row
    ) -> None:
        """Replace `tokens[index]` by random ones, a few rows at a time."""
        for part in torch.split(index, _ROWS_AT_ONCE):
            chosen = rows.select(part)
            distance = logits[part].double() - largest[part].double().unsqueeze(1)
            weights = torch.exp(distance / chosen.temperature.unsqueeze(1))
            restrict(weights, chosen.top_k, chosen.top_p, chosen.min_p)
            tokens[part] = pick(weights, chosen.uniform)


def _parameters(batch: Any, device: torch.device) -> _Row:
    rows = batch.sample_rows
    choice_of_row = np.zeros(len(batch.temperature), dtype=np.int32)
    choice_of_row[batch.row_ids] = batch.choice_ids
    uniform = uniforms(batch.seeds[rows], batch.sample_positions, choice_of_row[rows])

    def move(values: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)

    return _Row(
        move(batch.temperature[rows], torch.float64),
        move(batch.top_k[rows], torch.int64),
        move(batch.top_p[rows], torch.float64),
        move(batch.min_p[rows], torch.float64),
        move(uniform, torch.float64),
    )


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the first id per row whose cumulated weight exceeds `uniform` times the total.

    `weights` is float64 `[num_rows, vocab]`, not negative and with a positive sum; `uniform` is
    float64 `[num_rows]` in [0, 1). An id of weight 0 is never returned.
    """
    cumulated = weights.cumsum(dim=-1)
    total = cumulated[:, -1]
    # Rounding may lift the product to the total itself, above which there is no id.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform * total, below)
    return torch.searchsorted(cumulated, target.unsqueeze(1), right=True).squeeze(1)


def restrict(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Set to 0, in place, the weights that the parameters exclude.

    `weights` is float64 `[num_rows, vocab]` with a largest value of 1 per row; the parameters are
    `[num_rows]`. top_k <= 0, top_p >= 1 and min_p <= 0 exclude nothing. Among equal weights the
    lower ids stay.
    """
    vocab = weights.shape[1]
    limited = torch.nonzero((top_k > 0) & (top_k < vocab)).squeeze(1)
    if len(limited) > 0:
        counts = top_k[limited]
        part = weights[limited]
        weights[limited] = _keep(part, _largest(part, int(counts.max())), counts)
    nucleus = torch.nonzero(top_p < 1.0).squeeze(1)
    if len(nucleus) > 0:
        weights[nucleus] = _nucleus(weights[nucleus], top_p[nucleus])
    if bool((min_p > 0.0).any()):
        # The largest weight is 1, so min_p is the limit itself.
        weights.masked_fill_(weights < min_p.clamp(max=1.0).unsqueeze(1), 0.0)


def _nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    """Keep the fewest largest weights of each row whose sum reaches top_p of the row's total."""
    target = top_p * weights.cumsum(dim=-1)[:, -1]
    best = _largest(weights, min(_FIRST_SORT, weights.shape[1]))
    reached = best.cumsum(dim=-1)
    if bool((reached[:, -1] < target).any()) and best.shape[1] < weights.shape[1]:
        best = _largest(weights, weights.shape[1])
        reached = best.cumsum(dim=-1)
    before = torch.searchsorted(reached, target.unsqueeze(1), right=False).squeeze(1)
    counts = (before + 1).clamp(max=best.shape[1])
    return _keep(weights, best, counts)


def _largest(weights: Tensor, count: int) -> Tensor:
    """Return the `count` largest values of each row, largest first."""
    if weights.device.type != "cpu":
        return weights.topk(count, dim=-1).values
    # numpy partitions and sorts with vector instructions, more than ten times as fast as torch.
    values = weights.numpy()
    first = values.shape[1] - count
    if first > 0:
        values = np.partition(values, first, axis=-1)[:, first:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def _keep(weights: Tensor, best: Tensor, counts: Tensor) -> Tensor:
    """Keep the `counts` largest weights of each row; `best` is sorted, largest first."""
    smallest = best.gather(1, (counts - 1).unsqueeze(1))
    kept = weights >= smallest
    if bool((kept.sum(dim=-1) > counts).any()):
        # Equal weights at the limit: the lower ids fill the room that the larger ones leave.
        above = weights > smallest
        room = counts.unsqueeze(1) - above.sum(dim=-1, keepdim=True)
        kept = above | ((weights == smallest).cumsum(dim=-1).le(room) & kept)
    return weights.masked_fill(~kept, 0.0)
