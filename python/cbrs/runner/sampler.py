"""From logits to tokens, for a whole batch at once.

The order is that of vLLM: log-probabilities are of the untouched logits; then bad words, logit
bias, repetition, frequency and presence penalty, min_tokens (banned ids are excluded whatever else
was done to them); then temperature, top_k, top_p (of what top_k left), min_p; then one uniform
number picks from the cumulated probabilities in the order of the ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbrs.runner.philox import uniforms
from cbrs.runner.sampler_rows import SamplerRows
from cbrs.runner.sampler_torch import GREEDY_TEMPERATURE, SampleInputs, TorchSampling
from cbrs.sampled import SampledTokens

if TYPE_CHECKING:
    from cbrs.sampled import LogprobMatrix


class SamplingBackend(Protocol):
    """The arithmetic of sampling, without memory of earlier steps; see `TorchSampling`."""

    def sample(
        self, logits: Tensor, inputs: SampleInputs
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Return int32 tokens `[R]` and their errors `[R]` (0 = none)."""

    def logprobs(
        self,
        logits: Tensor,
        logits_index: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
        num_logprobs: npt.NDArray[np.int32],
    ) -> LogprobMatrix:
        """Return log-probabilities of `token_ids` and of the most likely ids."""


class Sampler:
    """Picks one token per sample of a batch, and remembers what later samples need."""

    def __init__(self, vocab_size: int, backend: SamplingBackend | None = None) -> None:
        """Sample ids below `vocab_size` only: what the tokenizer knows, without padding.

        Without a `backend` plain PyTorch does the work, which is slow.
        """
        self._backend = backend or TorchSampling(vocab_size)
        self._rows: SamplerRows | None = None

    @torch.inference_mode()
    def sample(self, logits: Tensor, batch: Any) -> SampledTokens:
        """Return the tokens of `batch` and the log-probabilities that it asks for.

        `logits` is float32 `[num_logits, padded_vocab]`. A row whose largest logit is not a finite
        number, or that holds a NaN, is marked with `UNUSABLE_LOGITS`, one whose parameters exclude
        every token with `EVERYTHING_EXCLUDED`; both get token 0.
        """
        self._update_rows(batch)
        inputs = self._inputs(batch)
        token_ids, errors = self._backend.sample(logits, inputs)
        if self._rows is not None:
            self._rows.append(inputs.rows, token_ids)
        return SampledTokens(
            token_ids,
            errors if errors.any() else None,
            self._logprobs(logits, batch, token_ids),
            self._prompt_logprobs(logits, batch),
        )

    def _update_rows(self, batch: Any) -> None:
        if self._rows is None and batch.new_row_tables is not None:
            self._rows = SamplerRows(len(batch.temperature))
        if self._rows is not None:
            self._rows.update(batch)

    def _inputs(self, batch: Any) -> SampleInputs:
        rows, positions = batch.sample_rows, batch.sample_positions
        state = self._rows if batch.has_sampling_extras else None
        bans = None
        if state is not None:
            bans = state.bans(rows, positions, batch.min_tokens[rows])
        if (batch.temperature[rows] > GREEDY_TEMPERATURE).any():
            uniform = uniforms(batch.seeds[rows], positions, batch.sample_choices)
        else:
            uniform = np.zeros(len(rows))
        return SampleInputs(
            logits_index=batch.sample_index,
            rows=rows,
            uniform=uniform,
            temperature=batch.temperature,
            top_k=batch.top_k,
            top_p=batch.top_p,
            min_p=batch.min_p,
            presence_penalty=batch.presence_penalty,
            frequency_penalty=batch.frequency_penalty,
            repetition_penalty=batch.repetition_penalty,
            state=state,
            bans=bans,
        )

    def _logprobs(
        self, logits: Tensor, batch: Any, token_ids: npt.NDArray[np.int32]
    ) -> LogprobMatrix | None:
        if not batch.has_sampling_extras:
            return None
        counts = batch.num_logprobs[batch.sample_rows]
        if counts.max(initial=-1) < 0:
            return None
        return self._backend.logprobs(logits, batch.sample_index, token_ids, counts)

    def _prompt_logprobs(self, logits: Tensor, batch: Any) -> LogprobMatrix | None:
        index = batch.prompt_logits_index
        if len(index) == 0:
            return None
        return self._backend.logprobs(
            logits, index, batch.prompt_target_ids, batch.num_prompt_logprobs
        )
