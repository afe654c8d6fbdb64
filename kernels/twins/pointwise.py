"""Norms and gated activations in plain PyTorch: float32 inside, one rounding at the end."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(out: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> None:
    """Fill `out` with `hidden` over the root of its mean square, times `weight`.

    `out` and `hidden` are `[num_tokens, width]` of any floating dtype, `weight` is float32
    `[width]` (Zhang and Sennrich, "Root mean square layer normalization", 2019).
    """
    out.copy_(_normed(hidden, weight, eps))


def fused_add_rms_norm(
    out: Tensor,
    residual: Tensor,
    added: Tensor,
    weight: Tensor,
    eps: float,
    added_weight: Tensor | None = None,
) -> None:
    """Add `added` to `residual` in place, then fill `out` with the norm of the sum.

    `residual` is float32 `[num_tokens, width]`: between the layers nothing is rounded. `added` and
    `out` have that shape and any floating dtype; `weight` is float32 `[width]`. With
    `added_weight`, float32 `[width]`, what is added is the norm of `added` (Gemma 3).
    """
    residual.add_(added.float() if added_weight is None else _normed(added, added_weight, eps))
    out.copy_(_normed(residual, weight, eps))


def _normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = hidden.float()
    mean = values.square().mean(-1, keepdim=True)
    return values * torch.rsqrt(mean + eps) * weight


def silu_and_mul(out: Tensor, gate_up: Tensor) -> None:
    """Fill `out` `[num_tokens, width]` with SiLU(gate) * up.

    `gate_up` is `[num_tokens, 2 * width]`, the gate first; any floating dtypes.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


def gelu_tanh_and_mul(out: Tensor, gate_up: Tensor) -> None:
    """Do as `silu_and_mul` with GELU in its tanh form (Hendrycks and Gimpel, 2016)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(F.gelu(gate, approximate="tanh") * up)
