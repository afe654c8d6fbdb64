"""The paged KV cache: its layouts, quantization and writing.

Caches are `[num_blocks, num_kv_heads, block_size, head_dim]`, of float32, bfloat16 or float16. A
quantized cache (int8 or float8_e4m3fn) is `[num_blocks, num_kv_heads, block_size, head_dim + 2]`:
in each block and head stand the numbers of all its tokens, then a bfloat16 factor for each token.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 2
"""Bytes of a factor of a quantized cache."""

FP8 = torch.float8_e4m3fn
"""The 8-bit floating type of caches: 4 bits of exponent, 3 of mantissa, no infinity, NaN."""

QUANTIZED = {torch.int8: 127.0, FP8: 448.0}
"""The types of caches with factors, and the greatest number of each."""


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
        if cache.dtype in QUANTIZED:
            numbers, scales = _parts(cache)
            new_numbers, new_scales = quantize(new, cache.dtype)
            numbers[block, :, offset] = new_numbers.view(torch.int8)
            scales[block, :, offset] = new_scales
        else:
            cache[block, :, offset] = new.to(cache.dtype)  # [n, num_kv_heads, head_dim]


def quantize(rows: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Return rows as numbers of `dtype`, and the two bytes (int8) of each one's bfloat16 factor.

    The low byte comes first. `dtype` is one of `QUANTIZED`. A factor is the row's greatest number
    over the greatest of `dtype`, rounded up; NaN if the row has one that is not finite.
    """
    rows, most = rows.float(), QUANTIZED[dtype]
    greatest = rows.abs().amax(-1)
    bits = ((greatest / most).view(torch.int32) + 0xFFFF) >> 16
    bits = torch.where(rows.isfinite().all(-1), bits, torch.full_like(bits, 0x7FC0))
    scale = (bits << 16).view(torch.float32)
    bits = torch.where(scale < torch.finfo(torch.float32).tiny, 0, bits)
    inverse = torch.where(bits == 0, 0.0, 1 / scale)
    numbers = torch.nan_to_num(rows * inverse[..., None], 0, 0, 0)
    # an inverse is rounded: the greatest number may come out above what `dtype` has
    numbers = (numbers.round() if dtype == torch.int8 else numbers).clamp(-most, most).to(dtype)
    scales = torch.stack([bits, bits >> 8], -1).to(torch.uint8).view(torch.int8)
    return numbers, scales


def fill_quantized(cache: Tensor, number: float) -> None:
    """Set every slot of a quantized cache to one number, as near as it can hold it."""
    numbers, scales = _parts(cache)
    row, scale = quantize(torch.full(numbers.shape[-1:], number), cache.dtype)
    numbers[:], scales[:] = row.view(torch.int8), scale


def dequantize(cache: Tensor) -> Tensor:
    """Return a quantized cache as float32 `[num_blocks, num_kv_heads, block_size, head_dim]`."""
    numbers, scales = _parts(cache)
    low, high = (byte.int() & 0xFF for byte in scales.unbind(-1))
    factors = ((low | high << 8) << 16).view(torch.float32)
    return numbers.view(cache.dtype).float() * factors[..., None]


def _parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers `[..., block_size, head_dim]` and factors `[..., block_size, 2]`.

    Both are views as int8: not every operation knows 8-bit floating numbers.
    """
    block_size, head_dim = cache.shape[2], cache.shape[3] - SCALE_BYTES
    flat = cache.view(torch.int8).view(*cache.shape[:2], -1)
    split = block_size * head_dim
    return (
        flat[..., :split].view(*cache.shape[:2], block_size, head_dim),
        flat[..., split:].view(*cache.shape[:2], block_size, SCALE_BYTES),
    )
