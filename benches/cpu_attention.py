"""Attention on the CPU beside what the machine can do: decoding as bytes, prompts as products.

    python benches/cpu_attention.py --json

A decode reads each key and value once, so its bound is the bytes of keys and values at the rate of
plain reading, measured in the same run with the same threads. The caches of several layers take
turns, as in a step, so that they do not stay in the processor's cache; blocks lie in random order.
Prompts are held against the faster of torch's bfloat16 matrix product and float32 multiply-adds
alone; of the square of queries and keys the half that is not masked counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hardware import describe_run
from policies.output import Check, at_least, at_most
from running.rates import matmul_flops, median_seconds

from cbrs._core import CpuKernels, cpu_features
from cbrs.runner.attention import cache_view
from cbrs.runner.kv_cache import KV_DTYPES, KVCache, row_len

SEED = 0
LARGE_MIB = 64
DECODE_GOAL = 1.5
PREFILL_GOAL = 0.5
LONG_CONTEXT = 1024
MAX_MIB_PER_LAYER = 512


@dataclass(frozen=True)
class Shape:
    num_seqs: int
    context: int
    query_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def blocks_per_seq(self) -> int:
        return -(-self.context // self.block_size)

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the keys and values that all queries see."""
        row_bytes = row_len(self.head_dim, dtype) * dtype.itemsize
        return 2 * self.num_seqs * self.context * self.num_kv_heads * row_bytes

    @property
    def flops(self) -> int:
        """Floating-point operations of scores and weighted values; masked pairs do not count."""
        pairs = self.query_len * (2 * self.context - self.query_len + 1) // 2
        return 4 * self.num_seqs * pairs * self.num_heads * self.head_dim


def make_caches(shape: Shape, dtype: torch.dtype, kernels: CpuKernels) -> list[list[Any]]:
    """Return pairs of random caches: more than the processor's cache holds, if they are small."""
    num_blocks = shape.num_seqs * shape.blocks_per_seq
    layers = max(1, min(8, LARGE_MIB * 2**20 // shape.kv_bytes(dtype)))
    cache = KVCache(layers, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype)
    pairs = [[cache_view(k), cache_view(v)] for k, v in zip(cache.keys, cache.values, strict=True)]
    random = np.random.default_rng(SEED)
    num_slots = num_blocks * shape.block_size
    for start in range(0, num_slots, 65_536):
        slots = np.arange(start, min(num_slots, start + 65_536), dtype=np.int64)
        size = (len(slots), shape.num_kv_heads, shape.head_dim)
        new = random.standard_normal(size, dtype=np.float32)
        for key, value in pairs:
            kernels.write_kv(new, new, key, value, slots)
    return [[cache, *pair] for pair in pairs]


def attend(kernels: CpuKernels, shape: Shape, dtype: torch.dtype, seconds: float) -> float:
    """Return the seconds of the median call."""
    caches = make_caches(shape, dtype, kernels)
    random = np.random.default_rng(SEED)
    size = (shape.num_seqs * shape.query_len, shape.num_heads, shape.head_dim)
    query = random.standard_normal(size, dtype=np.float32)
    out = np.empty_like(query)
    blocks = random.permutation(shape.num_seqs * shape.blocks_per_seq).astype(np.int32)
    index = (
        blocks.reshape(shape.num_seqs, shape.blocks_per_seq),
        np.arange(shape.num_seqs, dtype=np.int32),
        np.arange(shape.num_seqs + 1, dtype=np.int32) * np.int32(shape.query_len),
        np.full(shape.num_seqs, shape.context, dtype=np.int32),
    )
    scale = shape.head_dim**-0.5

    def run(turn: int) -> None:
        _, key, value = caches[turn % len(caches)]
        kernels.paged_attention(out, query, key, value, *index, scale)

    return median_seconds(run, seconds)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    kernels = CpuKernels(options.threads)
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for name, num_kv_heads in (("grouped", options.num_kv_heads), ("mha", options.num_heads)):
        heads = (options.num_heads, num_kv_heads, options.head_dim, options.block_size)
        loads = [(b, c, 1) for b in options.batches for c in options.contexts]
        loads += [(1, c, c) for c in options.prefill]
        for num_seqs, context, query_len in loads:
            shape = Shape(num_seqs, context, query_len, *heads)
            for dtype_name in options.dtypes:
                dtype = KV_DTYPES[dtype_name]
                mib = shape.kv_bytes(dtype) / 2**20
                if mib > MAX_MIB_PER_LAYER:
                    continue
                # Before each: the machine's rates change from one minute to the next.
                flops, read = kernels.measure_rates(1)
                seconds = attend(kernels, shape, dtype, options.seconds)
                row = {
                    "heads": name,
                    "batch": num_seqs,
                    "context": context,
                    "queries": query_len,
                    "kv": dtype_name,
                    "us": round(1e6 * seconds, 1),
                    "kv_mib": round(mib, 2),
                    "read_gb_per_s": round(read / 1e9, 2),
                    "to_reading": round(seconds * read / shape.kv_bytes(dtype), 3),
                    "gflop_per_s": round(shape.flops / seconds / 1e9, 2),
                    "to_multiply_adds": round(shape.flops / seconds / flops, 3),
                }
                if query_len > 1:
                    rate = matmul_flops(torch.bfloat16, options.seconds)
                    row["to_bf16_matmul"] = round(shape.flops / seconds / rate, 3)
                    rate = matmul_flops(torch.float32, options.seconds)
                    row["to_f32_matmul"] = round(shape.flops / seconds / rate, 3)
                rows.append(row)
                if not options.json:
                    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    """Hold large decodes against reading, prompts of 2,048 against products, int8 against bf16."""
    found = []
    decodes = [row for row in rows if row["queries"] == 1]
    for heads, kv in dict.fromkeys((row["heads"], row["kv"]) for row in decodes):
        same = [row for row in decodes if (row["heads"], row["kv"]) == (heads, kv)]
        large = [row["to_reading"] for row in same if row["kv_mib"] >= LARGE_MIB]
        if large:
            name = f"decode over {LARGE_MIB} MiB or more, {heads} heads, {kv}, to reading: worst"
            found.append(at_most(name, max(large), "ratio", DECODE_GOAL))
    for row in rows:
        if row["queries"] == 2048:
            name = f"prompt of 2,048, {row['heads']} heads, {row['kv']}, to the faster arithmetic"
            to_faster = min(row["to_bf16_matmul"], row["to_multiply_adds"])
            found.append(at_least(name, to_faster, "ratio", PREFILL_GOAL))
    times = {(r["heads"], r["batch"], r["context"], r["kv"]): r["us"] for r in decodes}
    ratios: dict[int, list[float]] = {}
    for (*place, kv), us in times.items():
        context = place[2]
        if kv == "int8" and context >= LONG_CONTEXT and (*place, "bfloat16") in times:
            ratios.setdefault(context, []).append(us / times[*place, "bfloat16"])
    if ratios:
        name = f"decode at {LONG_CONTEXT} or more, int8 to bfloat16: median of the worst context"
        found.append(at_most(name, max(map(statistics.median, ratios.values())), "ratio", 1.0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="*", default=[64, 192, 1024, 8192])
    parser.add_argument("--prefill", type=int, nargs="*", default=[128, 2048])
    parser.add_argument("--dtypes", nargs="+", choices=KV_DTYPES, default=list(KV_DTYPES))
    parser.add_argument("--num-heads", type=int, default=9)
    parser.add_argument("--num-kv-heads", type=int, default=3, help="of the grouped heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement")
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    rows = measure(options)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    run = describe_run(seed=SEED, features=cpu_features(), **settings)
    print(json.dumps({"bench": "cpu_attention", **run, "results": rows, "checks": checks(rows)}))


if __name__ == "__main__":
    main()
