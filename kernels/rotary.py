"""Norm of heads, rotary positions, quantization and KV write, in one pass over a projection.

See `twins/rotary.py`. A program takes one token and a few heads of one kind (query, key or value),
so that the angles are computed once for them. The caches' layouts are those of
`twins/kv_cache.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import choose, device_of
from .twins.kv_cache import FP8, QUANTIZED, SCALE_BYTES

_KINDS = {torch.int8: 1, FP8: 2}
_LEAST_FP8 = (8, 9)


@triton.jit
def rotary_kv_write_kernel(
    query_out_ptr,
    qkv_ptr,
    key_ptr,  # caches, as bytes where they are quantized to int8
    value_ptr,
    key_scale_ptr,  # the same memory as bfloat16
    value_scale_ptr,
    positions_ptr,
    slots_ptr,
    frequencies_ptr,
    query_norm_ptr,
    key_norm_ptr,
    magnitude,
    eps,
    num_heads,
    num_kv_heads,
    head_dim,
    half,  # rotary_dim / 2
    block_size,
    HAS_ROTARY: tl.constexpr,
    HAS_NORM: tl.constexpr,
    QUANTIZATION: tl.constexpr,  # 0 none, 1 int8, 2 fp8
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One token and `BLOCK_HEADS` heads of one kind a program."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts = tl.cdiv(num_heads, BLOCK_HEADS)
    key_parts = tl.cdiv(num_kv_heads, BLOCK_HEADS)
    is_query = part < query_parts
    is_value = part >= query_parts + key_parts
    slot = tl.load(slots_ptr + token)
    if is_query | (slot >= 0):
        if is_query:
            first, limit, base = part * BLOCK_HEADS, num_heads, 0
        elif is_value:
            first = (part - query_parts - key_parts) * BLOCK_HEADS
            limit, base = num_kv_heads, num_heads + num_kv_heads
        else:
            first, limit, base = (part - query_parts) * BLOCK_HEADS, num_kv_heads, num_heads
        head = first + tl.arange(0, BLOCK_HEADS)
        dim = tl.arange(0, BLOCK_DIM)
        inside = (head < limit)[:, None] & (dim < head_dim)[None, :]
        row_ptr = qkv_ptr + (token * (num_heads + 2 * num_kv_heads) + base) * head_dim
        own = head[:, None] * head_dim
        rows = tl.load(row_ptr + own + dim[None, :], mask=inside, other=0.0).to(tl.float32)
        if not is_value:
            norm_ptr = key_norm_ptr
            if is_query:
                norm_ptr = query_norm_ptr
            factor = tl.full([BLOCK_HEADS], 1.0, tl.float32)
            if HAS_NORM:
                factor = tl.rsqrt(tl.sum(rows * rows, 1) / head_dim + eps)
                weight = tl.load(norm_ptr + dim, mask=dim < head_dim, other=0.0)
                rows = rows * factor[:, None] * weight[None, :]
            if HAS_ROTARY:
                # The partner of dimension i is i + half, or i - half; from 2 * half on none turns.
                is_first = dim < half
                turns = dim < 2 * half
                partner = tl.where(is_first, dim + half, dim - half)
                partner = tl.where(turns, partner, dim)
                other = tl.load(row_ptr + own + partner[None, :], mask=inside, other=0.0)
                other = other.to(tl.float32)
                if HAS_NORM:
                    weight = tl.load(norm_ptr + partner, mask=dim < head_dim, other=0.0)
                    other = other * factor[:, None] * weight[None, :]
                pair = tl.where(is_first, dim, dim - half)
                frequency = tl.load(frequencies_ptr + pair, mask=turns, other=0.0)
                angle = tl.load(positions_ptr + token).to(tl.float32) * frequency
                sine, cosine = _sine_cosine(angle)
                cosine = tl.where(turns, cosine * magnitude, 1.0)
                sine = tl.where(turns, sine * magnitude, 0.0)
                sine = tl.where(is_first, -sine, sine)
                rows = rows * cosine[None, :] + other * sine[None, :]
        if is_query:
            out_ptr = query_out_ptr + token * num_heads * head_dim + own + dim[None, :]
            tl.store(out_ptr, rows.to(query_out_ptr.dtype.element_ty), mask=inside)
        else:
            block, offset = slot // block_size, slot % block_size
            cell = block * num_kv_heads + head  # [BLOCK_HEADS], int64
            cache_ptr, scale_ptr = key_ptr, key_scale_ptr
            if is_value:
                cache_ptr, scale_ptr = value_ptr, value_scale_ptr
            if QUANTIZATION == 0:
                place = (cell * block_size + offset)[:, None] * head_dim + dim[None, :]
                tl.store(cache_ptr + place, rows.to(key_ptr.dtype.element_ty), mask=inside)
            else:
                numbers, bits = _quantized(rows, QUANTIZATION)
                room = block_size * (head_dim + 2)
                place = cell[:, None] * room + offset * head_dim + dim[None, :]
                tl.store(cache_ptr + place, numbers.to(key_ptr.dtype.element_ty), mask=inside)
                # room and the numbers in front are even: the factors lie on 2-byte borders
                scale_at = (cell * room + block_size * head_dim) // 2 + offset
                scale = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
                tl.store(scale_ptr + scale_at, scale, mask=head < limit)


@triton.jit
def _quantized(rows, QUANTIZATION: tl.constexpr):
    """Return float32 numbers `[heads, dims]` to store, and the bits of a bfloat16 factor a row."""
    most: tl.constexpr = 127.0 if QUANTIZATION == 1 else 448.0
    finite = (tl.abs(rows) < float("inf")).to(tl.int32)  # false for NaN, too
    usable = tl.min(finite, 1) > 0
    clean = tl.where(usable[:, None], rows, 0.0)
    greatest = tl.max(tl.abs(clean), 1)
    exact = tl.div_rn(greatest, tl.full(greatest.shape, most, tl.float32))
    bits = (exact.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    bits = tl.where(bits < 0x80, 0, bits)  # less than the smallest normal number
    scale = (bits << 16).to(tl.float32, bitcast=True)
    one = tl.full(scale.shape, 1.0, tl.float32)
    inverse = tl.where(bits == 0, 0.0, tl.div_rn(one, tl.where(bits == 0, one, scale)))
    numbers = clean * inverse[:, None]
    if QUANTIZATION == 1:
        # Adding and taking away 1.5 * 2^23 rounds to the nearest integer, half to even.
        numbers = (numbers + 12582912.0) - 12582912.0
    else:
        # To 3 bits behind the first one, or, below 2^-6, to multiples of 2^-9; the conversion is
        # exact then, wherever it is done.
        raw = numbers.to(tl.int32, bitcast=True)
        normal = ((raw + 0x7FFFF + ((raw >> 20) & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
        small = (numbers + 24576.0) - 24576.0
        numbers = tl.where(tl.abs(numbers) < 0.015625, small, normal)
    numbers = tl.minimum(tl.maximum(numbers, -most), most)
    return numbers, tl.where(usable, bits, 0x7FC0)


@triton.jit
def _sine_cosine(angle):
    """Return sine and cosine of float32 angles up to 2^30, to about 1e-7.

    The angle is reduced to [-pi / 4, pi / 4] in float64, where late positions keep their precision
    without the table that a general reduction needs; the polynomials are those of Cephes (Moshier).
    """
    exact = angle.to(tl.float64)
    quarter = tl.floor(exact * 0.6366197723675814 + 0.5)
    rest = (exact - quarter * 1.5707963267948966).to(tl.float32)
    turn = quarter.to(tl.int32) & 3
    square = rest * rest
    sine = ((-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1) * square
    sine = sine * rest + rest
    cosine = (2.443315711809948e-5 * square - 1.388731625493765e-3) * square
    cosine = (cosine + 4.166664568298827e-2) * square * square - 0.5 * square + 1.0
    swapped = (turn & 1) == 1
    first = tl.where(swapped, cosine, sine)
    second = tl.where(swapped, sine, cosine)
    first = tl.where(turn >= 2, -first, first)
    second = tl.where((turn == 1) | (turn == 2), -second, second)
    return first, second


def rotary_kv_write(
    query_out: Tensor,
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    inverse_frequencies: Tensor | None,
    magnitude: float = 1.0,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norm and turn queries and keys, fill `query_out` and write to the caches; see the twin.

    All tensors are contiguous; an fp8 cache needs compute capability 8.9 or more.
    """
    num_tokens, num_heads, head_dim = query_out.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    _check(query_out, qkv, key_cache, value_cache, inverse_frequencies, query_norm, key_norm)
    if num_tokens == 0:
        return
    quantization = _KINDS.get(key_cache.dtype, 0)
    capability = device_of(qkv.device).capability
    if key_cache.dtype == FP8 and capability < _LEAST_FP8:
        raise ValueError(
            f"an fp8 cache needs compute capability {_LEAST_FP8[0]}.{_LEAST_FP8[1]} or more, this "
            f"device has {capability[0]}.{capability[1]}: use int8"
        )
    launch = choose("rotary_kv_write", capability, head_dim=head_dim)
    heads = launch.constants["BLOCK_HEADS"]
    parts = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    nothing = slot_mapping
    rotary_kv_write_kernel[(num_tokens, parts)](
        query_out,
        qkv,
        key_cache,
        value_cache,
        _factors(key_cache),
        _factors(value_cache),
        positions,
        slot_mapping,
        nothing if inverse_frequencies is None else inverse_frequencies,
        nothing if query_norm is None else query_norm,
        nothing if key_norm is None else key_norm,
        magnitude,
        eps,
        num_heads,
        num_kv_heads,
        head_dim,
        0 if inverse_frequencies is None else len(inverse_frequencies),
        block_size,
        HAS_ROTARY=inverse_frequencies is not None,
        HAS_NORM=query_norm is not None,
        QUANTIZATION=quantization,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        **launch.constants,
        # A product must not be fused with the sum that rounds it: the twin rounds twice.
        enable_fp_fusion=False,
        **launch.options,
    )


def _factors(cache: Tensor) -> Tensor:
    """Return the memory of a quantized cache as bfloat16; another cache as it is."""
    if cache.dtype not in QUANTIZED:
        return cache
    return cache.view(-1).view(torch.bfloat16)


def _check(
    query_out: Tensor,
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    inverse_frequencies: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
) -> None:
    num_tokens, num_heads, head_dim = query_out.shape
    num_kv_heads = key_cache.shape[1]
    wanted = (num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    if qkv.shape != wanted:
        raise ValueError(f"qkv is {list(qkv.shape)}: for these heads it must be {list(wanted)}")
    row = head_dim + (SCALE_BYTES if key_cache.dtype in QUANTIZED else 0)
    if key_cache.shape[3] != row:
        raise ValueError(
            f"the last dimension of a {key_cache.dtype} cache is {key_cache.shape[3]}: for heads "
            f"of {head_dim} it must be {row}"
        )
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError("the caches of keys and of values differ in shape or dtype")
    if key_cache.dtype in QUANTIZED and head_dim % 2 != 0:
        raise ValueError(f"head_dim={head_dim}: a quantized cache needs an even one")
    if inverse_frequencies is not None and 2 * len(inverse_frequencies) > head_dim:
        raise ValueError(
            f"{len(inverse_frequencies)} frequencies turn {2 * len(inverse_frequencies)} "
            f"dimensions, but heads have {head_dim}"
        )
    if (query_norm is None) != (key_norm is None):
        raise ValueError("query_norm and key_norm come together: pass both or none")
    for name, tensor in (("query_out", query_out), ("qkv", qkv), ("key_cache", key_cache)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous: pass a contiguous tensor")
    if not value_cache.is_contiguous():
        raise ValueError("value_cache is not contiguous: pass a contiguous tensor")
