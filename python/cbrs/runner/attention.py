"""Attention over the paged KV cache: one interface, a back end for the CPU and one for any device.

A step calls `begin_step` once with the batch's arrays and then `forward` once per layer; there is
no work per sequence in Python on the CPU path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from cbrs._core import CpuKernels
from cbrs.kernels import reference

_T = TypeVar("_T")

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cbrs.runner.kv_cache import KVCache


class AttentionShape(Protocol):
    """The part of a model configuration that attention needs (`ModelConfig` has it)."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads; divides `num_heads`."""

    @property
    def head_dim(self) -> int:
        """Elements of one head."""

    @property
    def attention_scale(self) -> float:
        """Factor of the products of queries and keys."""

    @property
    def sliding_windows(self) -> Sequence[int | None]:
        """The window of each layer, None for the whole context; one entry a layer."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What attention needs to know of one batch: the scheduler's arrays, valid for its step.

    `slot_mapping` int64 `[num_tokens]`, `query_start` int32 `[num_seqs + 1]`, `seq_lens` and
    `row_ids` int32 `[num_seqs]`, `block_tables` int32 `[max_num_seqs, max_blocks]` by row. The
    first `num_decodes` sequences have exactly one query token.
    """

    slot_mapping: NDArray[np.int64]
    query_start: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    row_ids: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    num_decodes: int
    max_query_len: int
    max_seq_len: int

    @classmethod
    def from_batch(cls, batch: Any) -> AttentionMetadata:
        """Take the arrays of a `Batch` as they are; nothing is copied."""
        return cls(
            slot_mapping=batch.slot_mapping,
            query_start=batch.query_start,
            seq_lens=batch.seq_lens,
            row_ids=batch.row_ids,
            block_tables=batch.block_tables,
            num_decodes=batch.num_decodes,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )


class AttentionBackend(Protocol):
    """Writes the new keys and values of a layer, then attends over its cache."""

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Set the batch that the following `forward` calls belong to."""

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return `[num_tokens, num_heads, head_dim]` in the dtype and on the device of `query`.

        `query` is `[num_tokens, num_heads, head_dim]`; `key` and `value` are
        `[num_tokens, num_kv_heads, head_dim]` and go to the slots of the batch first. Rows of
        padding tokens (behind the last query of the batch) are zero.
        """


class CpuAttention:
    """The native kernels, on memory shared with torch.

    The caches stay float32, bfloat16 or int8; queries, keys and values of another dtype are
    converted to float32, and the result back. One instance serves one engine thread at a time.
    """

    def __init__(
        self,
        shape: AttentionShape,
        kv_cache: KVCache,
        num_threads: int,
    ) -> None:
        """Start the kernels' threads and keep numpy views of every layer's cache."""
        self._kernels = CpuKernels(num_threads)
        # The views do not keep the tensors' storage alive by themselves.
        self._kv_cache = kv_cache
        self._keys = [cache_view(tensor) for tensor in kv_cache.keys]
        self._values = [cache_view(tensor) for tensor in kv_cache.values]
        self._scale = shape.attention_scale
        self._windows = shape.sliding_windows
        self._metadata: AttentionMetadata | None = None

    @property
    def kernels(self) -> CpuKernels:
        """The native kernels, for others that work on the same thread."""
        return self._kernels

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Set the batch that the following `forward` calls belong to."""
        self._metadata = metadata

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionBackend.forward`; a bad index or shape is a `ValueError`."""
        metadata = _current(self._metadata)
        key_cache, value_cache = self._keys[layer], self._values[layer]
        self._kernels.write_kv(
            _float32(key), _float32(value), key_cache, value_cache, metadata.slot_mapping
        )
        out = torch.empty(query.shape, dtype=torch.float32)
        self._kernels.paged_attention(
            out.numpy(),
            _float32(query),
            key_cache,
            value_cache,
            metadata.block_tables,
            metadata.row_ids,
            metadata.query_start,
            metadata.seq_lens,
            self._scale,
            self._windows[layer],
        )
        return out.to(query.dtype)


class TorchAttention:
    """The plain PyTorch twin in `cbrs.kernels.reference`; any device, not fast."""

    def __init__(self, shape: AttentionShape, kv_cache: KVCache) -> None:
        """Attend over `kv_cache` on the device where it lies."""
        self._kv_cache = kv_cache
        self._scale = shape.attention_scale
        self._windows = shape.sliding_windows
        self._slot_mapping: Tensor | None = None
        self._index: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Copy the batch's index arrays to the device of the cache, once for all layers."""
        device = self._kv_cache.device
        self._slot_mapping = _to_device(metadata.slot_mapping, device)
        self._index = (
            _to_device(metadata.block_tables, device),
            _to_device(metadata.row_ids, device),
            _to_device(metadata.query_start, device),
            _to_device(metadata.seq_lens, device),
        )

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionBackend.forward`."""
        key_cache, value_cache = self._kv_cache.keys[layer], self._kv_cache.values[layer]
        slot_mapping, index = _current(self._slot_mapping), _current(self._index)
        reference.write_kv(key, value, key_cache, value_cache, slot_mapping)
        out = torch.empty_like(query)
        reference.paged_attention(
            out, query, key_cache, value_cache, *index, self._scale, self._windows[layer]
        )
        return out


def make_backend(
    shape: AttentionShape,
    kv_cache: KVCache,
    device: torch.device | str,
    num_threads: int,
) -> AttentionBackend:
    """Return the back end for `device`: native kernels on the CPU, the PyTorch twin elsewhere."""
    if torch.device(device).type == "cpu":
        return CpuAttention(shape, kv_cache, num_threads)
    return TorchAttention(shape, kv_cache)


def _current(value: _T | None) -> _T:
    if value is None:
        raise RuntimeError("begin_step must be called before forward")
    return value


def _float32(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().to(torch.float32).contiguous().numpy()
    return array


def cache_view(tensor: Tensor) -> NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.int8]:
    """Return a cache's memory as the native kernels take it; bfloat16 as its bits."""
    if tensor.dtype == torch.bfloat16:
        bits: NDArray[np.uint16] = tensor.view(torch.uint16).numpy()
        return bits
    if tensor.dtype == torch.float32:
        numbers: NDArray[np.float32] = tensor.numpy()
        return numbers
    if tensor.dtype == torch.int8:
        whole: NDArray[np.int8] = tensor.numpy()
        return whole
    raise ValueError(
        f"the CPU kernels need a float32, bfloat16 or int8 KV cache, got {tensor.dtype}"
    )


def _to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    # torch warns about a read-only array, and the scheduler may lend such views.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)
