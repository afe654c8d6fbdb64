"""Products with int8 and int4 weights for few tokens; layout and meaning in `twins/`.

Such a product reads every weight once, so that reading is all that counts: weights stay small
until they are in registers, one step takes one group of inputs, and its scales are applied to the
group's partial sums, which is exact. With few outputs the inputs are split among several programs
(split-K), whose sums a second kernel adds up, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dot_type import dot_type
from .launch import choose, device_of
from .twins.quantized_linear import QuantizedWeight

_PROGRAMS = 256
"""About as many programs as keep a large GPU busy: with fewer, inputs are split."""

_MAX_SPLITS = 16
_LEAST_INPUTS = 256
"""Inputs that a split has at least: below, adding up costs more than it gains."""

_MAX_TOKENS_OF_TILE = 64


@triton.jit
def quantized_linear_kernel(
    out_ptr,  # [num_tokens, out_features], or float32 [SPLITS, num_tokens, out_features]
    input_ptr,
    number_ptr,
    scale_ptr,
    bias_ptr,
    num_tokens,
    out_features,
    num_groups,
    groups_of_split,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """A tile of outputs for a tile of tokens, over one split of the inputs."""
    token = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    feature = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    split = tl.program_id(2).to(tl.int64)
    has_token = (token < num_tokens)[:, None]
    has_feature = (feature < out_features)[:, None]
    width: tl.constexpr = GROUP if BITS == 8 else GROUP // 2
    column = tl.arange(0, width)
    input_row = input_ptr + token[:, None].to(tl.int64) * num_groups * GROUP + column[None, :]
    number_row = number_ptr + feature[:, None].to(tl.int64) * num_groups * width + column[None, :]
    scale_row = scale_ptr + feature.to(tl.int64) * num_groups
    total = tl.zeros([BLOCK_TOKENS, BLOCK_OUT], tl.float32)
    first = split.to(tl.int32) * groups_of_split
    for group in range(first, tl.minimum(first + groups_of_split, num_groups)):
        numbers = tl.load(number_row + group * width, mask=has_feature, other=0)  # [OUT, width]
        scale = tl.load(scale_row + group, mask=feature < out_features, other=0.0).to(tl.float32)
        inputs = tl.load(input_row + group * GROUP, mask=has_token, other=0.0)
        inputs = inputs.to(DOT_TYPE)  # [TOKENS, width]
        if BITS == 8:
            weights = _exact(numbers.to(tl.int32) + 128, 128, DOT_TYPE)
            sums = tl.dot(inputs, tl.trans(weights), input_precision="ieee")
        else:
            upper = tl.load(input_row + group * GROUP + width, mask=has_token, other=0.0)
            upper = upper.to(DOT_TYPE)
            low = _exact((numbers & 0xF).to(tl.int32), 8, DOT_TYPE)
            high = _exact((numbers >> 4).to(tl.int32), 8, DOT_TYPE)
            sums = tl.dot(inputs, tl.trans(low), input_precision="ieee")
            sums = tl.dot(upper, tl.trans(high), sums, input_precision="ieee")
        total += sums * scale[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + feature, mask=feature < out_features, other=0.0)
        total += bias.to(tl.float32)[None, :]
    place = (split * num_tokens + token[:, None]) * out_features + feature[None, :]
    stored = has_token & (feature < out_features)[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _exact(number, offset: tl.constexpr, dtype: tl.constexpr):
    """Return `number - offset` as a floating number, for int32 numbers below 2^23.

    A number in the mantissa of 2^23 is added to it. That takes fewer cycles than a conversion,
    of which a processor does a quarter as many, and which would be slower than the memory.
    """
    shifted = (number | 0x4B000000).to(tl.float32, bitcast=True)
    return (shifted - (8388608.0 + offset)).to(dtype)


@triton.jit
def add_splits_kernel(
    out_ptr,
    partial_ptr,
    bias_ptr,
    size,
    out_features,
    num_splits,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the sums of all splits, in their order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros([BLOCK], tl.float32)
    source_ptr = partial_ptr + place
    for _ in range(num_splits):
        total += tl.load(source_ptr, mask=inside, other=0.0)
        source_ptr += size
    if HAS_BIAS:
        total += tl.load(bias_ptr + place % out_features, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


def workspace_size(num_tokens: int, weight: QuantizedWeight) -> int:
    """Return how many float32 elements of workspace a product needs for up to `num_tokens`."""
    # More tokens are never split more often, but their tiles are more than their splits are fewer.
    most = num_tokens
    sizes = [
        tokens * weight.out_features * _num_splits(tokens, weight)
        for tokens in {most, *(size for size in (16, 32, 64, 128, 256, 512) if size < most)}
    ]
    return max(sizes)


def quantized_linear(
    out: Tensor,
    inputs: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Fill `out` with `inputs` times `weight`, plus `bias`; see the twin. All contiguous.

    Without a `workspace` of `workspace_size` float32 elements one is allocated where it is needed.
    Raises `ValueError` if shapes do not fit, or the workspace is too small.
    """
    num_tokens, in_features = inputs.shape
    out_features = weight.out_features
    _check(out, inputs, weight, bias)
    if num_tokens == 0:
        return
    launch = choose("quantized_linear", device_of(inputs.device).capability, bits=weight.bits)
    num_groups = in_features // weight.group_size
    splits = _num_splits(num_tokens, weight)
    partial = out
    if splits > 1:
        partial = _partial(workspace, splits * num_tokens * out_features, inputs.device)
    block_out = launch.constants["BLOCK_OUT"]
    tokens = _tokens_of_tile(num_tokens)
    grid = (triton.cdiv(out_features, block_out), triton.cdiv(num_tokens, tokens), splits)
    quantized_linear_kernel[grid](
        partial,
        inputs,
        weight.numbers,
        weight.scales,
        weight.scales if bias is None else bias,
        num_tokens,
        out_features,
        num_groups,
        triton.cdiv(num_groups, splits),
        BITS=weight.bits,
        GROUP=weight.group_size,
        HAS_BIAS=bias is not None and splits == 1,
        DOT_TYPE=dot_type(inputs.dtype),
        BLOCK_TOKENS=tokens,
        BLOCK_OUT=block_out,
        **launch.options,
    )
    if splits > 1:
        size = num_tokens * out_features
        launch = choose("add_splits", device_of(inputs.device).capability)
        add_splits_kernel[(triton.cdiv(size, launch.constants["BLOCK"]),)](
            out,
            partial,
            weight.scales if bias is None else bias,
            size,
            out_features,
            splits,
            HAS_BIAS=bias is not None,
            **launch.constants,
            **launch.options,
        )


_TILE_OUT = 64
"""Outputs of a tile that splits are counted by, whatever the launch table says."""


def _tokens_of_tile(num_tokens: int) -> int:
    # at least 16, which is what tensor cores multiply at once
    return min(16 << max((num_tokens - 1) // 16, 0).bit_length(), _MAX_TOKENS_OF_TILE)


def _num_splits(num_tokens: int, weight: QuantizedWeight) -> int:
    tiles = -(-weight.out_features // _TILE_OUT)
    tiles *= -(-num_tokens // _tokens_of_tile(num_tokens))
    most = min(_MAX_SPLITS, max(weight.in_features // _LEAST_INPUTS, 1))
    splits = max(min(_PROGRAMS // tiles, most), 1)
    groups = weight.in_features // weight.group_size
    return -(-groups // -(-groups // splits))  # no split without groups


def _partial(workspace: Tensor | None, size: int, device: torch.device) -> Tensor:
    if workspace is None:
        return torch.empty(size, dtype=torch.float32, device=device)
    if workspace.dtype != torch.float32 or workspace.numel() < size:
        raise ValueError(
            f"the workspace has {workspace.numel()} elements of {workspace.dtype}: this product "
            f"needs {size} of float32 (workspace_size)"
        )
    return workspace


def _check(out: Tensor, inputs: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
    num_tokens, in_features = inputs.shape
    if in_features != weight.in_features:
        raise ValueError(f"inputs have {in_features} features, the weights {weight.in_features}")
    if out.shape != (num_tokens, weight.out_features):
        raise ValueError(
            f"out is {list(out.shape)}: for these inputs and weights it must be "
            f"{[num_tokens, weight.out_features]}"
        )
    if bias is not None and bias.shape != (weight.out_features,):
        raise ValueError(f"bias is {list(bias.shape)}: it must be {[weight.out_features]}")
    for name, tensor in (("out", out), ("inputs", inputs), ("numbers", weight.numbers)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous: pass a contiguous tensor")
