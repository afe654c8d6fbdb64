"""Sampling by the native kernels, on memory shared with torch: what `TorchSampling` means, fast.

Both draw the same tokens, but for a uniform number that falls between two sums of weights which are
equal but for rounding (about 1e-12 of the sum); log-probabilities agree to float32's precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from cbrs._core import CpuKernels
    from cbrs.runner.sampler_torch import SampleInputs
    from cbrs.sampled import LogprobMatrix


class CpuSampling:
    """Hands a batch to the kernels as it is; nothing is copied or gathered here."""

    def __init__(self, vocab_size: int, kernels: CpuKernels) -> None:
        """Know ids below `vocab_size` only; work on the threads of `kernels`."""
        self._vocab_size = vocab_size
        self._kernels = kernels

    def sample(
        self, logits: Tensor, inputs: SampleInputs
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """See `TorchSampling.sample`."""
        penalties = bias = bans = None
        if inputs.state is not None:
            history = inputs.state.history
            penalties = (
                inputs.presence_penalty,
                inputs.frequency_penalty,
                inputs.repetition_penalty,
                history.columns[0],
                history.start,
                history.length,
                inputs.state.num_prompt,
            )
            rows = inputs.state.bias
            bias = (rows.columns[0], rows.columns[1], rows.start, rows.length)
        if inputs.bans is not None:
            bans = (inputs.bans.start, inputs.bans.ids)
        return self._kernels.sample(
            _array(logits),
            self._vocab_size,
            inputs.logits_index,
            inputs.rows,
            inputs.uniform,
            (inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p),
            penalties,
            bias,
            bans,
        )

    def logprobs(
        self,
        logits: Tensor,
        logits_index: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
        num_logprobs: npt.NDArray[np.int32],
    ) -> LogprobMatrix:
        """See `TorchSampling.logprobs`; columns that a row did not ask for are left 0."""
        return self._kernels.logprobs(
            _array(logits), self._vocab_size, logits_index, token_ids, num_logprobs
        )


def _array(logits: Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = logits.to(torch.float32).contiguous().numpy()
    return array
