"""The launch table's rows for the device that a tensor is on."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from .launch import Launch, choose

_INTERPRETED = (9, 0)
"""Capability whose rows are used where there is no GPU, under Triton's interpreter."""


def choose_on(device: torch.device, kernel: str, **shape: int) -> Launch:
    """Return how `kernel` is launched for `shape` on `device`."""
    return choose(kernel, _capability(device), **shape)


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """Return the type in which tiles of `dtype` are multiplied.

    Triton's interpreter keeps bfloat16 as its bits and would multiply those: float32 there.
    """
    if dtype == torch.float32 or (dtype == torch.bfloat16 and triton.knobs.runtime.interpret):
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return _INTERPRETED if device.type == "cpu" else torch.cuda.get_device_capability(device)
