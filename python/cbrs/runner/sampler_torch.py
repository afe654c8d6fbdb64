"""The meaning of sampling in plain PyTorch: what the native kernels are tested against; any device.

Every operation works on each row by itself, so a row's token depends on that row's logits and
parameters only, bit for bit, whatever its neighbours are. Logits are float32, probabilities
float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbrs.sampled import EVERYTHING_EXCLUDED, LOGPROB_FLOOR, UNUSABLE_LOGITS

if TYPE_CHECKING:
    from cbrs.runner.sampler_rows import Bans, SamplerRows
    from cbrs.sampled import LogprobMatrix

GREEDY_TEMPERATURE = 1e-4
"""At or below this temperature a row is greedy: only logits closer than 1e-3 could tell."""

LEAST_EXPONENT = -700.0
"""A weight whose logarithm is below this counts as 0; no sum would show it."""

_ROWS_AT_ONCE = 32
"""Rows held in float64 at a time; bounds memory, changes no result."""

_FIRST_SORT = 1024
"""top_p sorts this many candidates first, and all of a row only if their mass does not reach it."""


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """What sampling needs besides the logits: `R` samples, parameters by row.

    `logits_index` int32 `[R]` (the row of the logits), `rows` int32 `[R]` (the row of the
    parameters), `uniform` float64 `[R]` in [0, 1); the parameters are those of a `Batch`, by row.
    `state` is None if no row has penalties or bias; `bans` is by sample.
    """

    logits_index: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]
    uniform: npt.NDArray[np.float64]
    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    presence_penalty: npt.NDArray[np.float32]
    frequency_penalty: npt.NDArray[np.float32]
    repetition_penalty: npt.NDArray[np.float32]
    state: SamplerRows | None = None
    bans: Bans | None = None


class TorchSampling:
    """Samples and counts with torch, a few rows at a time."""

    def __init__(self, vocab_size: int) -> None:
        """Know ids below `vocab_size` only."""
        self._vocab_size = vocab_size

    def sample(
        self, logits: Tensor, inputs: SampleInputs
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Return int32 tokens `[R]` and their errors `[R]` (0 = none); with an error, token 0.

        `logits` is float32 `[num_logits, padded_vocab]` and left as it is.
        """
        num_samples = len(inputs.rows)
        tokens = torch.zeros(num_samples, dtype=torch.int64, device=logits.device)
        errors = torch.zeros_like(tokens)
        for first in range(0, num_samples, _ROWS_AT_ONCE):
            part = slice(first, min(first + _ROWS_AT_ONCE, num_samples))
            tokens[part], errors[part] = self._sample_part(logits, inputs, part)
        ids: npt.NDArray[np.int32] = tokens.to(torch.int32).cpu().numpy()
        codes: npt.NDArray[np.uint8] = errors.to(torch.uint8).cpu().numpy()
        return ids, codes

    def logprobs(
        self,
        logits: Tensor,
        logits_index: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
        num_logprobs: npt.NDArray[np.int32],
    ) -> LogprobMatrix:
        """Return the log-probabilities of `token_ids` and of the most likely ids (`SampledTokens`).

        `logits_index` and `token_ids` are int32 `[N]`; of `num_logprobs` int32 `[N]` only the
        largest counts here. Row by row: log-softmax over the ids below `vocab_size`; the rank is
        one more than the number of ids with a greater logit; among equals the lower id is more
        likely. If there are fewer ids than columns, the last one is repeated. An unusable row says
        `LOGPROB_FLOOR` of every id.
        """
        columns = max(int(num_logprobs.max(initial=0)), 0)
        shape = (len(token_ids), 1 + columns)
        ids, values = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        ranks = np.zeros(len(token_ids), np.int32)
        order = torch.arange(columns).clamp(max=self._vocab_size - 1).to(logits.device)
        for first in range(0, len(token_ids), _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            scores = self._select(logits, logits_index[part])
            token = _move(token_ids[part], torch.int64, logits.device).unsqueeze(1)
            best = scores.sort(dim=-1, descending=True, stable=True).indices
            chosen = torch.cat([token, best.index_select(1, order)], dim=1)
            likely = scores.log_softmax(dim=-1).gather(1, chosen).nan_to_num(nan=LOGPROB_FLOOR)
            ids[part] = chosen.cpu().numpy()
            values[part] = likely.clamp(min=LOGPROB_FLOOR).cpu().numpy()
            ranks[part] = 1 + (scores > scores.gather(1, token)).sum(dim=-1).cpu().numpy()
        return ids, values, ranks

    def _sample_part(
        self, logits: Tensor, inputs: SampleInputs, part: slice
    ) -> tuple[Tensor, Tensor]:
        rows, device = inputs.rows[part], logits.device
        scores = self._select(logits, inputs.logits_index[part])
        largest, tokens = scores.max(dim=-1)  # the lowest id among equals; NaN if there is one
        unusable = ~torch.isfinite(largest)
        if inputs.state is not None or inputs.bans is not None:
            change_logits(scores, inputs, part)
            largest, tokens = scores.max(dim=-1)
        excluded = ~unusable & torch.isneginf(largest)
        errors = UNUSABLE_LOGITS * unusable + EVERYTHING_EXCLUDED * excluded
        temperature = _move(inputs.temperature[rows], torch.float64, device)
        drawn = torch.nonzero((temperature > GREEDY_TEMPERATURE) & (errors == 0)).squeeze(1)
        if len(drawn) > 0:
            top_k = _move(inputs.top_k[rows], torch.int64, device)
            top_p = _move(inputs.top_p[rows], torch.float64, device)
            min_p = _move(inputs.min_p[rows], torch.float64, device)
            uniform = _move(inputs.uniform[part], torch.float64, device)
            distance = scores[drawn].double() - largest[drawn].double().unsqueeze(1)
            exponent = distance / temperature[drawn].unsqueeze(1)
            weights = torch.exp(exponent).masked_fill_(exponent < LEAST_EXPONENT, 0.0)
            restrict(weights, top_k[drawn], top_p[drawn], min_p[drawn])
            tokens[drawn] = pick(weights, uniform[drawn])
        return tokens.masked_fill(errors > 0, 0), errors

    def _select(self, logits: Tensor, index: npt.NDArray[np.int32]) -> Tensor:
        """Return a float32 copy of the rows `index`, without the padding of the vocabulary."""
        rows = _move(index, torch.int64, logits.device)
        return logits[:, : self._vocab_size].index_select(0, rows).float()


def change_logits(scores: Tensor, inputs: SampleInputs, part: slice) -> None:
    """Apply bias, penalties and bans to `scores` in place, the samples `part` of `inputs`.

    `scores` is float32 `[num_rows, vocab]`. In this order: bias; repetition penalty (of prompt and
    output); frequency, then presence penalty (of the output alone). What overflows becomes the
    largest finite number, what was minus infinity stays it. Banned ids become minus infinity.
    """
    rows, device = inputs.rows[part], scores.device
    if inputs.state is not None:
        impossible = torch.isinf(scores)
        owner, _, index = inputs.state.bias.take(rows)
        ids, values = (column[index] for column in inputs.state.bias.columns)
        place = (_move(owner, torch.int64, device), _move(ids, torch.int64, device))
        scores.index_put_(place, _move(values, torch.float32, device), accumulate=True)
        _penalise(scores, inputs, rows)
        limit = torch.finfo(scores.dtype).max
        scores.copy_(torch.where(impossible, scores, scores.clamp(-limit, limit)))
    if inputs.bans is not None:
        start = inputs.bans.start[part.start : part.stop + 1]
        banned = inputs.bans.ids[start[0] : start[-1]]
        owner = np.repeat(np.arange(len(rows)), np.diff(start))
        place = (_move(owner, torch.int64, device), _move(banned, torch.int64, device))
        scores[place] = -torch.inf


def _penalise(scores: Tensor, inputs: SampleInputs, rows: npt.NDArray[np.int32]) -> None:
    assert inputs.state is not None
    device = scores.device
    owner, number, index = inputs.state.history.take(rows)
    ids = inputs.state.history.columns[0][index]
    is_output = number >= inputs.state.num_prompt[rows][owner]
    place = (_move(owner, torch.int64, device), _move(ids, torch.int64, device))
    counts = torch.zeros_like(scores)
    counts.index_put_(place, _move(is_output, torch.float32, device), accumulate=True)
    seen = torch.zeros_like(scores, dtype=torch.bool)
    seen[place] = True

    def column(values: npt.NDArray[np.float32]) -> Tensor:
        return _move(values[rows], torch.float32, device).unsqueeze(1)

    repetition = column(inputs.repetition_penalty)
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores.copy_(torch.where(seen, repeated, scores))
    scores.sub_(column(inputs.frequency_penalty) * counts)
    scores.sub_(column(inputs.presence_penalty) * (counts > 0))


def _move(values: npt.NDArray[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)


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
