"""What the checks of kernels share: tolerances, poisoned outputs."""

import torch
from torch import Tensor

TOLERANCE = {
    torch.float32: (2e-6, 2e-6),
    torch.float16: (2**-10, 1e-6),
    # twice the rounding of a GPU: Triton's interpreter cuts the lower bits off
    torch.bfloat16: (2**-7, 1e-6),
}
"""Relative and absolute tolerance of what is stored in each type."""


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an output in which what is not written fails a comparison."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype)
    return torch.full(shape, -9, dtype=dtype)


def assert_close(actual: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    """Compare two tensors of one type, within `factor` times its tolerance."""
    relative, absolute = TOLERANCE[expected.dtype]
    torch.testing.assert_close(
        actual, expected, rtol=factor * relative, atol=factor * absolute, equal_nan=False
    )
