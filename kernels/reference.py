"""The meaning of every kernel in plain PyTorch, with the kernels' own arguments; any device.

These are what the fast kernels are tested against, so nothing here is clever. Caches are
`[num_blocks, num_kv_heads, block_size, head_dim]`, of any floating dtype; arithmetic is float32.
A cache of int8 is `[num_blocks, num_kv_heads, block_size, head_dim + 2]`: in each block and head
stand the numbers of all its tokens, then a bfloat16 factor for each token.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 2
"""Bytes of a factor of an int8 cache."""

_MOST = 127


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Write keys and values `[num_tokens, num_kv_heads, head_dim]` to their slots of the caches.

    `slot_mapping` is int64 `[num_tokens]`: `block * block_size + offset`, or -1 for a token that is
    not written. Both caches are written in place.
    """
    block_size = key_cache.shape[2]
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    block, offset = slots // block_size, slots % block_size
    for cache, new in ((key_cache, key[written]), (value_cache, value[written])):
        if cache.dtype == torch.int8:
            numbers, scales = _parts(cache)
            numbers[block, :, offset], scales[block, :, offset] = quantize(new)
        else:
            cache[block, :, offset] = new.to(cache.dtype)  # [n, num_kv_heads, head_dim]


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as int8 numbers, and the two bytes of the bfloat16 factor of each, low one first.

    A factor is the greatest number over 127, rounded up; NaN if the row has one that is not finite.
    """
    rows = rows.float()
    greatest = rows.abs().amax(-1)
    bits = ((greatest / _MOST).view(torch.int32) + 0xFFFF) >> 16
    bits = torch.where(rows.isfinite().all(-1), bits, torch.full_like(bits, 0x7FC0))
    scale = (bits << 16).view(torch.float32)
    bits = torch.where(scale < torch.finfo(torch.float32).tiny, 0, bits)
    inverse = torch.where(bits == 0, 0.0, 1 / scale)
    numbers = torch.nan_to_num((rows * inverse[..., None]).round(), 0, 0, 0).to(torch.int8)
    scales = torch.stack([bits, bits >> 8], -1).to(torch.uint8).view(torch.int8)
    return numbers, scales


def fill_int8(cache: Tensor, number: float) -> None:
    """Set every slot of an int8 cache to one number, as near as it can hold it."""
    numbers, scales = _parts(cache)
    numbers[:], scales[:] = quantize(torch.full(numbers.shape[-1:], number))


def dequantize(cache: Tensor) -> Tensor:
    """Return an int8 cache as float32 `[num_blocks, num_kv_heads, block_size, head_dim]`."""
    numbers, scales = _parts(cache)
    low, high = (byte.int() & 0xFF for byte in scales.unbind(-1))
    return numbers.float() * ((low | high << 8) << 16).view(torch.float32)[..., None]


def _parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers `[..., block_size, head_dim]` and factors `[..., block_size, 2]` as views."""
    block_size, head_dim = cache.shape[2], cache.shape[3] - SCALE_BYTES
    flat = cache.view(*cache.shape[:2], -1)
    split = block_size * head_dim
    return (
        flat[..., :split].view(*cache.shape[:2], block_size, head_dim),
        flat[..., split:].view(*cache.shape[:2], block_size, SCALE_BYTES),
    )


def paged_attention(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    row_ids: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> None:
    """Attend causally, each sequence over its own blocks; fills `out`.

    `out` and `query` are `[num_tokens, num_heads, head_dim]`. The tokens of sequence `s` are
    `query_start[s]` to `query_start[s + 1]` (int32 `[num_seqs + 1]`), the last ones of its context
    of `seq_lens[s]` tokens (int32 `[num_seqs]`). Its blocks are `block_tables[row_ids[s]]` (int32
    `[max_num_seqs, max_blocks]`). Query head `h` uses KV head `h // (num_heads / num_kv_heads)`.
    With a sliding window `w`, the query at position `i` sees the keys `j` with `i - w < j <= i`.
    Rows of `out` behind the last query are set to zero.
    """
    starts, lens, rows = query_start.tolist(), seq_lens.tolist(), row_ids.tolist()
    for sequence, (seq_len, row) in enumerate(zip(lens, rows, strict=True)):
        tokens = slice(starts[sequence], starts[sequence + 1])
        keys = _gather(key_cache, block_tables[row], seq_len)
        values = _gather(value_cache, block_tables[row], seq_len)
        out[tokens] = _attend(query[tokens], keys, values, scale, sliding_window).to(out.dtype)
    out[starts[-1] :] = 0


def _gather(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """Return the context of one sequence, float32 `[num_kv_heads, seq_len, head_dim]`."""
    num_blocks = -(-seq_len // cache.shape[2])
    blocks = cache[block_table[:num_blocks].long()]  # [n, num_kv_heads, block_size, head_dim]
    if cache.dtype == torch.int8:
        blocks = dequantize(blocks)
    _, num_kv_heads, block_size, head_dim = blocks.shape
    tokens = blocks.transpose(0, 1).reshape(num_kv_heads, num_blocks * block_size, head_dim)
    return tokens[:, :seq_len].float()


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, sliding_window: int | None
) -> Tensor:
    """Return `[num_queries, num_heads, head_dim]`; the queries are the context's last tokens."""
    num_queries, num_heads, _ = query.shape
    num_kv_heads, seq_len, _ = keys.shape
    group = num_heads // num_kv_heads
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = scale * query.float().transpose(0, 1) @ keys.transpose(1, 2)  # [heads, queries, keys]
    position = torch.arange(seq_len - num_queries, seq_len, device=query.device)[:, None]
    key_position = torch.arange(seq_len, device=query.device)[None, :]
    hidden = key_position > position
    if sliding_window is not None:
        hidden |= key_position <= position - sliding_window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return (weights @ values).transpose(0, 1)
