"""Runs a loaded model on the scheduler's batches.

What the device receives is the batch's flat arrays, as tensors that share their memory; the work
per step in Python does not depend on the number of sequences.
"""

import os
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbrs._core import CpuKernels
from cbrs.loading import LoadedModel
from cbrs.models.null import NullModel, NullRunner
from cbrs.runner.attention import (
    AttentionBackend,
    AttentionMetadata,
    CpuAttention,
    make_backend,
)
from cbrs.runner.cpu_runner import CpuRunner
from cbrs.runner.kv_cache import KVCache
from cbrs.runner.sampler import Sampler
from cbrs.runner.sampler_cpu import CpuSampling
from cbrs.sampled import SampledTokens


class Runner(Protocol):
    """Computes the logits of a batch."""

    def forward(self, batch: Any) -> Tensor:
        """Return float32 logits `[num_logits, vocab_size]`, one row per entry of `logits_index`."""


class TokenSampler(Protocol):
    """Picks one token per sample, and says how likely it was where that is asked for."""

    def sample(self, logits: Tensor, batch: Any) -> SampledTokens:
        """Return the tokens of the batch; called once for each batch whose forward succeeded."""


class ModelRunner:
    """A model that torch runs, its KV cache and its attention back end."""

    def __init__(self, loaded: LoadedModel, kv_cache: KVCache, attention: AttentionBackend) -> None:
        """Run `loaded` with keys and values in `kv_cache`, which `attention` reads and writes."""
        self.kv_cache = kv_cache
        self._module = loaded.module
        self._device = loaded.device
        self._attention = attention

    @torch.inference_mode()
    def forward(self, batch: Any) -> Tensor:
        """Return float32 logits `[num_logits, vocab_size]`; keys and values go to their slots."""
        self._attention.begin_step(AttentionMetadata.from_batch(batch))
        logits: Tensor = self._module(
            self._tensor(batch.token_ids),
            self._tensor(batch.positions),
            self._tensor(batch.logits_index),
            self._attention,
        )
        return logits

    def _tensor(self, array: npt.NDArray[np.int32]) -> Tensor:
        # torch warns about a read-only array, and the scheduler may lend such views.
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(self._device)


def make_runner(
    loaded: LoadedModel,
    *,
    num_blocks: int,
    block_size: int,
    kv_dtype: torch.dtype | None = None,
    num_threads: int | None = None,
) -> tuple[Runner, TokenSampler]:
    """Return runner and sampler of a model, with a KV cache of `num_blocks` blocks.

    `kv_dtype` None is the weights'. `num_threads` is for the native kernels; None is one per core
    that this process may use.
    """
    if isinstance(loaded.module, NullModel):
        null = NullRunner(loaded.module)
        return null, null
    config = loaded.config
    kv_cache = KVCache(
        config.num_layers,
        num_blocks,
        block_size,
        config.num_kv_heads,
        config.head_dim,
        kv_dtype or loaded.dtype,
        loaded.device,
    )
    threads = num_threads or len(os.sched_getaffinity(0))
    if loaded.kernels is not None:
        kernels = loaded.kernels
        if kernels.num_threads != threads:
            kernels = CpuKernels(threads)
        native = CpuRunner.make(loaded, kv_cache, kernels)
        if native is not None:
            return native, Sampler(loaded.vocab_size, CpuSampling(loaded.vocab_size, kernels))
    attention = make_backend(config, kv_cache, loaded.device, threads)
    sampling = None
    if isinstance(attention, CpuAttention):
        # One set of threads for both: a step attends and samples one after the other.
        sampling = CpuSampling(loaded.vocab_size, attention.kernels)
    return ModelRunner(loaded, kv_cache, attention), Sampler(loaded.vocab_size, sampling)
