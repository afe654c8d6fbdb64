"""Products with weights that are stored as int8 or int4 in groups, in plain PyTorch.

Layout: `numbers` holds one row per output. With 8 bits it is int8 `[out_features, in_features]`.
With 4 bits it is uint8 `[out_features, in_features / 2]`: each group of `group_size` inputs takes
`group_size / 2` bytes, of which byte `j` holds number `j` of the group in its low half and number
`j + group_size / 2` in its high half, both plus 8. So a group is unpacked by two masks, and both
halves meet inputs that lie together. `scales` is bfloat16 `[out_features, in_features /
group_size]`: a weight is its number times the scale of its group; numbers lie in [-127, 127] or
[-7, 7].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP_SIZES = (32, 64, 128)
"""Inputs that share a scale."""

_LARGEST = {8: 127, 4: 7}
_OFFSET = 8


class QuantizedWeight(NamedTuple):
    """A matrix `[out_features, in_features]` as the module says; `bits` is 8 or 4."""

    numbers: Tensor
    scales: Tensor
    bits: int
    group_size: int

    @property
    def out_features(self) -> int:
        """Rows of the matrix."""
        return self.numbers.shape[0]

    @property
    def in_features(self) -> int:
        """Columns of the matrix."""
        return self.scales.shape[1] * self.group_size


def quantize_weight(weight: Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """Round `weight` `[out_features, in_features]`, floating and finite, to 8 or 4 bits.

    Raises `ValueError` for another number of bits, an unknown group size, or inputs that do not
    fill their groups.
    """
    if bits not in _LARGEST:
        raise ValueError(f"bits={bits}: weights are stored in 8 or 4 bits")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size={group_size}: choose one of {GROUP_SIZES}")
    out_features, in_features = weight.shape
    if in_features % group_size != 0:
        raise ValueError(
            f"{in_features} inputs do not fill groups of {group_size}: choose a group_size that "
            "divides them"
        )
    groups = weight.float().reshape(out_features, -1, group_size)
    greatest = groups.abs().amax(-1, keepdim=True)
    # Rounded up to bfloat16, so that no number exceeds the largest one.
    bits_up = ((greatest / _LARGEST[bits]).view(torch.int32) + 0xFFFF) & ~0xFFFF
    scale = bits_up.view(torch.float32)
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    numbers = (groups * inverse).round().to(torch.int8)
    scales = scale.squeeze(-1).to(torch.bfloat16)
    if bits == 8:
        return QuantizedWeight(numbers.flatten(1), scales, bits, group_size)
    low, high = (numbers + _OFFSET).to(torch.uint8).chunk(2, dim=-1)
    return QuantizedWeight((low | high << 4).flatten(1), scales, bits, group_size)


def dequantize_weight(weight: QuantizedWeight) -> Tensor:
    """Return the matrix that `weight` stands for, float32 `[out_features, in_features]`."""
    numbers = weight.numbers
    if weight.bits == 4:
        halves = numbers.reshape(weight.out_features, -1, weight.group_size // 2)
        numbers = torch.cat([halves & 0xF, halves >> 4], -1).to(torch.int8) - _OFFSET
    groups = numbers.reshape(weight.out_features, -1, weight.group_size).float()
    return (groups * weight.scales.float().unsqueeze(-1)).flatten(1)


def quantized_linear(
    out: Tensor,
    inputs: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Fill `out` `[num_tokens, out_features]` with `inputs` times the weights, plus `bias`.

    `inputs` is `[num_tokens, in_features]` in bfloat16, float16 or float32, `out` of any floating
    dtype, `bias` floating `[out_features]`. `workspace` is for the kernel alone (`workspace_size`
    elements of float32).
    """
    product = inputs.float() @ dequantize_weight(weight).T
    out.copy_(product if bias is None else product + bias.float())
