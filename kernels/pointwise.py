"""RMSNorm, with and without the residual sum, and gated activations; see `twins/pointwise.py`.

A program holds whole rows of a norm in registers, so that each number is read once. Sums are
float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import choose, device_of

MAX_WIDTH = 16_384
"""Widest row that a norm takes."""


@triton.jit
def rms_norm_kernel(out_ptr, hidden_ptr, weight_ptr, width, eps, BLOCK: tl.constexpr):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    hidden = tl.load(hidden_ptr + row + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    normed = hidden * tl.rsqrt(tl.sum(hidden * hidden, 0) / width + eps) * weight
    tl.store(out_ptr + row + column, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def fused_add_rms_norm_kernel(
    out_ptr,
    residual_ptr,
    added_ptr,
    weight_ptr,
    added_weight_ptr,
    width,
    eps,
    HAS_ADDED_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    added = tl.load(added_ptr + row + column, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    residual = tl.load(residual_ptr + row + column, mask=inside, other=0.0)
    if HAS_ADDED_WEIGHT:
        added_weight = tl.load(added_weight_ptr + column, mask=inside, other=0.0)
        added = added * tl.rsqrt(tl.sum(added * added, 0) / width + eps) * added_weight
    residual += added
    tl.store(residual_ptr + row + column, residual, mask=inside)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    normed = residual * tl.rsqrt(tl.sum(residual * residual, 0) / width + eps) * weight
    tl.store(out_ptr + row + column, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated_kernel(out_ptr, gate_up_ptr, width, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_ptr = gate_up_ptr + row * 2 * width + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    inner = gate
    if IS_GELU:
        # (1 + tanh(y)) / 2 = sigmoid(2 y), with 2 sqrt(2 / pi) in front
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = gate * tl.sigmoid(inner)
    tl.store(
        out_ptr + row * width + column, (active * up).to(out_ptr.dtype.element_ty), mask=inside
    )


def rms_norm(out: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> None:
    """Fill `out` with the norm of `hidden`; see the twin. Contiguous, `width <= MAX_WIDTH`."""
    num_tokens, width = _check_norm(out, hidden, weight)
    if num_tokens == 0:
        return
    launch = choose("rms_norm", device_of(hidden.device).capability, width=width)
    rms_norm_kernel[(num_tokens,)](
        out,
        hidden,
        weight,
        width,
        eps,
        BLOCK=triton.next_power_of_2(width),
        **launch.options,
    )


def fused_add_rms_norm(
    out: Tensor,
    residual: Tensor,
    added: Tensor,
    weight: Tensor,
    eps: float,
    added_weight: Tensor | None = None,
) -> None:
    """Add `added` to `residual`, then fill `out` with its norm; see the twin."""
    num_tokens, width = _check_norm(out, residual, weight)
    _check_norm(out, added, weight if added_weight is None else added_weight)
    if residual.dtype != torch.float32:
        raise ValueError(f"residual is {residual.dtype}: the sum between layers must be float32")
    if num_tokens == 0:
        return
    launch = choose("fused_add_rms_norm", device_of(residual.device).capability, width=width)
    fused_add_rms_norm_kernel[(num_tokens,)](
        out,
        residual,
        added,
        weight,
        weight if added_weight is None else added_weight,
        width,
        eps,
        HAS_ADDED_WEIGHT=added_weight is not None,
        BLOCK=triton.next_power_of_2(width),
        **launch.options,
    )


def silu_and_mul(out: Tensor, gate_up: Tensor) -> None:
    """Fill `out` `[num_tokens, width]` with SiLU(gate) * up; see the twin. Contiguous."""
    _gated(out, gate_up, is_gelu=False)


def gelu_tanh_and_mul(out: Tensor, gate_up: Tensor) -> None:
    """Fill `out` `[num_tokens, width]` with GELU(gate) * up; see the twin. Contiguous."""
    _gated(out, gate_up, is_gelu=True)


def _gated(out: Tensor, gate_up: Tensor, *, is_gelu: bool) -> None:
    num_tokens, width = out.shape
    if gate_up.shape != (num_tokens, 2 * width):
        raise ValueError(
            f"gate_up is {list(gate_up.shape)}: for out {list(out.shape)} it must be "
            f"{[num_tokens, 2 * width]}"
        )
    _check_contiguous(out=out, gate_up=gate_up)
    if num_tokens == 0:
        return
    launch = choose("gated", device_of(out.device).capability, width=width)
    grid = (num_tokens, triton.cdiv(width, launch.constants["BLOCK"]))
    gated_kernel[grid](
        out,
        gate_up,
        width,
        IS_GELU=is_gelu,
        **launch.constants,
        **launch.options,
    )


def _check_norm(out: Tensor, hidden: Tensor, weight: Tensor) -> tuple[int, int]:
    num_tokens, width = hidden.shape
    if out.shape != hidden.shape or weight.shape != (width,):
        raise ValueError(
            f"out {list(out.shape)} and weight {list(weight.shape)} do not fit rows "
            f"{list(hidden.shape)}"
        )
    if weight.dtype != torch.float32:
        raise ValueError(f"weight is {weight.dtype}: norms are scaled in float32")
    if width > MAX_WIDTH:
        raise ValueError(f"rows of {width} numbers: norms take at most {MAX_WIDTH}")
    _check_contiguous(out=out, hidden=hidden, weight=weight)
    return num_tokens, width


def _check_contiguous(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous: pass a contiguous tensor")
