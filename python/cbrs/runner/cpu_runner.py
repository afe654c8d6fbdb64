"""Runs a model's steps on the CPU with one native call a batch.

The call takes the scheduler's arrays as they are; torch computes nothing, so its threads and those
of the kernels never work side by side.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbrs.runner.attention import cache_view

if TYPE_CHECKING:
    from cbrs._core import CpuDecoder, CpuKernels
    from cbrs.loading import LoadedModel
    from cbrs.models.config import ModelConfig
    from cbrs.runner.kv_cache import KVCache

_MAX_KEPT_ROWS = 1024
"""Rows of logits that are kept from step to step; more are for prompt logprobs, and rare."""

_OWN_REFERENCES = 2
"""References to the buffer while nobody else holds it: the attribute, and a call's argument."""


class CpuRunner:
    """A model's native decoder and its KV cache."""

    def __init__(self, decoder: CpuDecoder, kv_cache: KVCache, config: ModelConfig) -> None:
        """Run `decoder`, a model of this shape, whose caches are those of `kv_cache`."""
        self.decoder = decoder
        self.kv_cache = kv_cache
        self.config = config
        self._vocab_size = config.vocab_size
        self._buffer: npt.NDArray[np.float32] = np.empty((0, config.vocab_size), np.float32)

    @classmethod
    def make(cls, loaded: LoadedModel, kv_cache: KVCache, kernels: CpuKernels) -> CpuRunner | None:
        """Return a runner of `loaded` on the threads of `kernels`; None if it is not packed."""
        module: Any = loaded.module
        decoder = module.native_decoder(
            kernels,
            [cache_view(tensor) for tensor in kv_cache.keys],
            [cache_view(tensor) for tensor in kv_cache.values],
        )
        return None if decoder is None else cls(decoder, kv_cache, loaded.config)

    def forward(self, batch: Any) -> Tensor:
        """Return float32 logits `[num_logits, vocab_size]`; keys and values go to their slots.

        The memory is used again once nobody holds the result.
        """
        logits = self._logits(len(batch.logits_index))
        self.decoder.forward(
            logits,
            batch.token_ids,
            batch.positions,
            batch.logits_index,
            batch.slot_mapping,
            batch.block_tables,
            batch.row_ids,
            batch.query_start,
            batch.seq_lens,
        )
        return torch.from_numpy(logits)

    def _logits(self, num_rows: int) -> npt.NDArray[np.float32]:
        if num_rows > _MAX_KEPT_ROWS:
            return np.empty((num_rows, self._vocab_size), np.float32)
        # New memory for every step would cost as much as a small model's attention: the system
        # clears each page when it is first written.
        if len(self._buffer) < num_rows or sys.getrefcount(self._buffer) > _OWN_REFERENCES:
            self._buffer = np.empty((num_rows, self._vocab_size), np.float32)
        return self._buffer[:num_rows]
