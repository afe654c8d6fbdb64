"""The type in which tiles are multiplied."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """Return the type for tiles of `dtype`: float32, bfloat16 or float16.

    Triton's interpreter keeps bfloat16 as its bits and would multiply those: float32 there.
    """
    if dtype == torch.float32 or (dtype == torch.bfloat16 and triton.knobs.runtime.interpret):
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
