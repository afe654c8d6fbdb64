"""What the machine does at most: arithmetic and plain reading, measured in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cbrs._core import CpuKernels
from cbrs.models.layers import native_bfloat16

MATMUL_SIZE = 1024
MATMUL_SECONDS = 0.05


@dataclass(frozen=True)
class Rates:
    """Operations in the faster arithmetic (a multiply-add is two of them), and plain reading."""

    flops_per_s: float
    bytes_per_s: float


def measure_rates(kernels: CpuKernels, repeat: int = 3) -> Rates:
    """The rates of all threads of `kernels` together.

    Arithmetic is float32 multiply-adds in registers or, where the CPU multiplies bfloat16 in
    hardware, torch's product of bfloat16 matrices, whichever is faster.
    """
    flops, read = kernels.measure_rates(repeat)
    if native_bfloat16():
        torch.set_num_threads(kernels.num_threads)
        flops = max(flops, matmul_flops(torch.bfloat16, MATMUL_SECONDS))
    return Rates(flops, read)


def matmul_flops(dtype: torch.dtype, seconds: float) -> float:
    """Floating-point operations a second of torch's matrix product."""
    # Emulated bfloat16 is so slow that the full size takes seconds.
    is_fast = dtype == torch.float32 or native_bfloat16()
    size = MATMUL_SIZE if is_fast else MATMUL_SIZE // 4
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda _: left @ right, seconds)


def median_seconds(run: Callable[[int], object], seconds: float) -> float:
    """Times runs for about `seconds`, three at least, after one to warm up."""
    times: list[float] = []
    run(0)
    begun = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begun < seconds and len(times) < 200):
        started = time.perf_counter()
        run(len(times))
        times.append(time.perf_counter() - started)
    return statistics.median(times)
