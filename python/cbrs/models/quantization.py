"""What int8 weights mean, in plain torch: the reference of the native kernels.

Numbers are rounded to integers of at most 127 in magnitude, and 32 neighbours share a scale. The
native kernels multiply the integers; the results here are the numbers that they stand for, with
which an ordinary product is the same but for the rounding of its sums.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
_MAX_INT = 127.0


def rounded_weights(weight: Tensor) -> Tensor:
    """Return `weight` `[out_features, in_features]`, rounded; float32.

    A scale is a bfloat16 number, rounded up.
    """
    groups = _groups(weight)
    scale = groups.abs().amax(-1, keepdim=True) / _MAX_INT
    upper = (scale.view(torch.int32) + 0xFFFF) & ~0xFFFF
    scale = upper.view(torch.float32)
    factor = torch.where(scale > 0, 1.0 / scale, 0.0)
    return _joined((groups * factor).round() * scale, weight)


def rounded_inputs(inputs: Tensor) -> Tensor:
    """Return `inputs` `[num_tokens, in_features]`, rounded; float32.

    Two neighbours' sum counts as a magnitude, too: the kernels add their products in 16 bits.
    """
    groups = _groups(inputs)
    sums = groups[..., 0::2] + groups[..., 1::2]
    greatest = torch.maximum(groups.abs().amax(-1), sums.abs().amax(-1)).unsqueeze(-1)
    factor = torch.where(greatest > 0, _MAX_INT / greatest, 0.0)
    return _joined((groups * factor).round() * (greatest / _MAX_INT), inputs)


def _groups(matrix: Tensor) -> Tensor:
    padding = -matrix.shape[-1] % GROUP
    return F.pad(matrix.float(), (0, padding)).reshape(len(matrix), -1, GROUP)


def _joined(groups: Tensor, matrix: Tensor) -> Tensor:
    return groups.flatten(-2)[..., : matrix.shape[-1]].contiguous()
