"""Speed of the CPU attention kernels: decode as KV bytes a second, prefill as arithmetic.

    python benches/attention.py --json

The caches of several layers take turns, so that they do not stay in the processor's cache, as in a
real step. The plain read rate of the same memory (a torch sum) stands beside it: decode cannot beat
that. Rates are given for the median run and, as `best_…`, for the fastest (a busy machine).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hardware import describe_run

from cbrs._core import CpuKernels, cpu_features

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SEED = 0
HEADS = ("num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class Shape:
    num_seqs: int
    context: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def blocks_per_seq(self) -> int:
        return -(-self.context // self.block_size)


@dataclass(frozen=True)
class Times:
    """Median and least seconds of a call."""

    median: float
    least: float

    def rates(self, name: str, amount: float) -> dict[str, float]:
        """Return `amount` per nanosecond: giga-somethings a second."""
        return {
            name: round(amount / self.median / 1e9, 2),
            f"best_{name}": round(amount / self.least / 1e9, 2),
        }


def measure_call(run: Callable[[int], object], repeat: int) -> Times:
    """Time `repeat` runs after two to warm up; `run` gets the index of the run."""
    times = []
    for index in range(repeat + 2):
        start = time.perf_counter()
        run(index)
        times.append(time.perf_counter() - start)
    return Times(statistics.median(times[2:]), min(times[2:]))


def make_caches(shape: Shape, dtype: torch.dtype, layers: int) -> list[list[np.ndarray]]:
    """Return `layers` pairs of random key and value caches as the kernels take them."""
    num_blocks = shape.num_seqs * shape.blocks_per_seq
    size = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    tensors = [[torch.randn(size).to(dtype) for _ in range(2)] for _ in range(layers)]
    if dtype == torch.bfloat16:
        tensors = [[t.view(torch.uint16) for t in pair] for pair in tensors]
    return [[t.numpy() for t in pair] for pair in tensors]


def attend(
    kernels: CpuKernels, shape: Shape, dtype: torch.dtype, query_len: int, layers: int, repeat: int
) -> Times:
    """Time one call with `query_len` query tokens for each sequence."""
    caches = make_caches(shape, dtype, layers)
    query = np.random.default_rng(SEED).standard_normal(
        (shape.num_seqs * query_len, shape.num_heads, shape.head_dim), dtype=np.float32
    )
    out = np.empty_like(query)
    blocks = np.random.default_rng(SEED).permutation(shape.num_seqs * shape.blocks_per_seq)
    index = (
        blocks.astype(np.int32).reshape(shape.num_seqs, shape.blocks_per_seq),
        np.arange(shape.num_seqs, dtype=np.int32),
        np.arange(shape.num_seqs + 1, dtype=np.int32) * np.int32(query_len),
        np.full(shape.num_seqs, shape.context, dtype=np.int32),
    )
    scale = shape.head_dim**-0.5
    return measure_call(
        lambda run: kernels.paged_attention(out, query, *caches[run % layers], *index, scale),
        repeat,
    )


def read_memory(num_threads: int, repeat: int) -> dict[str, float]:
    """Rate of summing a float32 array that no cache holds."""
    torch.set_num_threads(num_threads)
    data = torch.ones(64 * 1024**2)
    return measure_call(lambda _: data.sum(), repeat).rates("memory_read_gb_per_s", data.nbytes)


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    heads = [getattr(options, name) for name in HEADS]
    batch = Shape(options.num_seqs, options.context, *heads, options.block_size)
    prompt = Shape(1, options.context, *heads, options.block_size)
    pairs = prompt.context * (prompt.context + 1) // 2 * prompt.num_heads
    rows: list[dict[str, object]] = []
    for num_threads in options.threads:
        kernels = CpuKernels(num_threads)
        memory = read_memory(num_threads, options.repeat)
        for name, dtype in DTYPES.items():
            row_bytes = 2 * batch.num_kv_heads * batch.head_dim * dtype.itemsize
            kv_bytes = batch.num_seqs * batch.context * row_bytes
            decode = attend(kernels, batch, dtype, 1, options.layers, options.repeat)
            prefill = attend(kernels, prompt, dtype, prompt.context, options.layers, options.repeat)
            rows.append(
                {"threads": num_threads, "cache": name, "decode_us": round(decode.median * 1e6, 1)}
                | decode.rates("decode_gb_per_s", kv_bytes)
                | memory
                | {"prefill_us": round(prefill.median * 1e6, 1)}
                | prefill.rates("prefill_gflop_per_s", 4 * pairs * prompt.head_dim)
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-seqs", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--num-heads", type=int, default=9)
    parser.add_argument("--num-kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=6, help="caches that take turns")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    rows = measure(options)
    if not options.json:
        for row in rows:
            print("  ".join(f"{name} {value}" for name, value in row.items()))
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    run = describe_run(seed=SEED, features=cpu_features(), **settings)
    print(json.dumps({"bench": "attention", **run, "results": rows, "checks": []}))


if __name__ == "__main__":
    main()
