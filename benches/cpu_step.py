"""A decode step of the whole engine on the CPU, beside what the machine can do at most.

    python benches/cpu_step.py --json

All sequences of a batch decode; a step's time is the median of `--num-steps`. Beside it stand two
bounds, from rates measured in the same run, between the batches: the bytes that a step must read
(packed weights and the keys and values of all contexts) at the rate of plain reading, and its
arithmetic at the rate of the faster of float32 multiply-adds and, on a CPU with bfloat16
instructions, torch's product of bfloat16 matrices. From some batch on the second bound binds.
Products of int8 weights may take less time than it says, so with int8 a step is held against its
bytes alone. The split says where the time of the mean step went.

`--quantization none int8` runs an engine of each, in turn at each batch, and compares them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from comparing.timed import Timed
from hardware import describe_run
from policies.output import Check, at_least, at_most
from running.rates import Rates, measure_rates

from cbrs import LLM
from cbrs._core import CpuKernels, cpu_features
from cbrs.runner.kv_cache import row_len

GOAL = 1.2
INT8_GOALS = {1: 1.6, 64: 1.3}
NUM_WARM_UP_STEPS = 4
PREFILL_TOKENS = 2048
CHECKED_BATCHES = (8, 32, 64, 128)


def prefill_steps(options: argparse.Namespace, num_seqs: int) -> int:
    """Return the most steps that pass until all of `num_seqs` sequences decode."""
    # Beside the decodes of a full batch, which is at most a quarter of the budget.
    return -(-num_seqs * options.context // (PREFILL_TOKENS - num_seqs)) + 4


class TimedScheduler:
    """Stands before the scheduler and adds up the time of its steps."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.seconds = 0.0

    def step(self, *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        result = self.inner.step(*arguments, **options)
        self.seconds += time.perf_counter() - started
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Bench:
    """An engine whose parts are timed."""

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self.llm, self.engine, self.options = llm, llm.engine, options
        self.decoder, self.shape = self.engine._runner.decoder, self.engine._runner.config
        self.kv_dtype = self.engine._runner.kv_cache.dtype
        self.config = llm.config()
        self.runner = self.engine._runner = Timed(self.engine._runner)
        self.sampler = self.engine._sampler = Timed(self.engine._sampler)
        self.scheduler = self.engine.scheduler = TimedScheduler(self.engine.scheduler)
        self.random = np.random.default_rng(options.seed)

    def run(self, num_seqs: int) -> dict[str, float]:
        """Return milliseconds of the median step of `num_seqs` sequences, and of its parts."""
        options = self.options
        # The context that is asked for is that of the middle of the measured steps.
        before = options.num_steps // 2 + NUM_WARM_UP_STEPS
        shape = (num_seqs, options.context - before)
        vocab_size = self.llm.tokenizer.vocab_size
        for index, prompt in enumerate(self.random.integers(2, vocab_size, shape, dtype=np.int32)):
            self.engine.processor.submit(
                prompt,
                index=index,
                # The first ones decode while the last ones' prompts run.
                max_tokens=options.num_steps + NUM_WARM_UP_STEPS + prefill_steps(options, num_seqs),
                ignore_eos=True,
                temperature=0.0,
            )
        batch = self.engine.step()
        while batch.num_decodes < num_seqs:
            batch = self.engine.step()
        for _ in range(NUM_WARM_UP_STEPS):
            self.engine.step()
        self.decoder.take_times()
        self.runner.seconds = self.sampler.seconds = self.scheduler.seconds = 0.0
        times = []
        started = time.perf_counter()
        for _ in range(options.num_steps):
            before_step = time.perf_counter()
            batch = self.engine.step()
            times.append(time.perf_counter() - before_step)
        whole = time.perf_counter() - started
        assert batch.num_decodes == num_seqs, "the load was not steady"
        _, linears, attention, tokens = self.decoder.take_times()
        parts = {
            "linears": linears,
            "attention": attention,
            "norms_and_rotary": tokens,
            "sampling": self.sampler.seconds,
            "scheduler": self.scheduler.seconds,
        }
        parts["python"] = whole - sum(parts.values())
        self.drain()
        per_step = {f"{name}_ms": 1e3 * t / options.num_steps for name, t in parts.items()}
        return {
            "step_ms": 1e3 * statistics.median(times),
            "mean_step_ms": 1e3 * whole / options.num_steps,
            **per_step,
        }

    def drain(self) -> None:
        """Step until every request has been handed over."""
        while self.engine.processor.num_live > 0:
            if self.engine.step().num_seqs == 0:
                self.engine.processor.wait_finished(0.01)
            self.engine.processor.take_finished()


def bounds(bench: Bench, num_seqs: int, rates: Rates) -> dict[str, float]:
    """Return milliseconds that a step takes at least, by bytes and by arithmetic."""
    shape, context = bench.shape, bench.options.context
    row_bytes = row_len(shape.head_dim, bench.kv_dtype) * bench.kv_dtype.itemsize
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * row_bytes
    num_bytes = bench.decoder.weight_bytes + num_seqs * context * token_bytes
    # A group of 32 int8 weights has a scale of two bytes.
    itemsize = getattr(torch, bench.config.dtype).itemsize
    weight_bytes = itemsize if bench.config.quantization is None else 34 / 32
    weights = bench.decoder.weight_bytes / weight_bytes
    pairs = 2 * shape.num_layers * shape.num_heads * shape.head_dim * context
    flops = 2 * num_seqs * (weights + pairs)
    return {
        "by_bytes_ms": 1e3 * num_bytes / rates.bytes_per_s,
        "by_flops_ms": 1e3 * flops / rates.flops_per_s,
    }


def open_bench(options: argparse.Namespace, quantization: str | None, stack: ExitStack) -> Bench:
    """Return an engine that `stack` closes."""
    llm = LLM(
        options.model,
        dtype=options.dtype,
        quantization=quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        max_num_seqs=max(options.batches),
        max_model_len=options.context
        + options.num_steps
        + prefill_steps(options, max(options.batches)),
        max_num_batched_tokens=PREFILL_TOKENS,
        num_threads=options.num_threads,
        enable_prefix_caching=False,
    )
    return Bench(stack.enter_context(llm), options)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of each batch and kind of weights: medians of the rounds."""
    kinds = [None if name == "none" else name for name in options.quantization]
    runs: dict[tuple[int, str | None], list[dict[str, float]]] = {}
    with ExitStack() as stack:
        benches = {kind: open_bench(options, kind, stack) for kind in kinds}
        probe = CpuKernels(benches[kinds[0]].config.num_threads)
        for _ in range(options.rounds):
            for batch in options.batches:
                for kind, bench in benches.items():
                    runs.setdefault((batch, kind), []).append(run_one(bench, batch, probe))
    rows = []
    for (batch, kind), found in runs.items():
        median = {
            name: round(statistics.median(run[name] for run in found), 3) for name in found[0]
        }
        tokens_per_s = round(1e3 * batch / median["step_ms"], 1)
        row = {"batch": batch, "quantization": kind, **median, "tokens_per_s": tokens_per_s}
        if kind is not None and (batch, None) in runs:
            # Of neighbours, which whatever else the machine did hit alike.
            pairs = zip(runs[batch, None], found, strict=True)
            ratios = [plain["step_ms"] / own["step_ms"] for plain, own in pairs]
            row["times_as_fast"] = round(statistics.median(ratios), 3)
        rows.append(row)
    return rows


def run_one(bench: Bench, batch: int, probe: CpuKernels) -> dict[str, float]:
    """Return what a batch took beside its bounds, by rates of just before."""
    rates = measure_rates(probe)
    run = bench.run(batch) | bounds(bench, batch, rates)
    return run | {
        "gflop_per_s": rates.flops_per_s / 1e9,
        "read_gb_per_s": rates.bytes_per_s / 1e9,
        "to_bytes": run["step_ms"] / run["by_bytes_ms"],
        "to_bound": run["step_ms"] / max(run["by_bytes_ms"], run["by_flops_ms"]),
    }


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    """Hold the steps against their bounds, and int8 weights against those of 16 bits.

    The bound is bytes, and arithmetic where that takes longer; for quantized weights bytes alone,
    since their products are not those of the bound.
    """
    found = []
    for row in rows:
        if row["batch"] in CHECKED_BATCHES:
            is_plain = row["quantization"] is None
            computes = is_plain and row["by_flops_ms"] > row["by_bytes_ms"]
            name = "step" if is_plain else f"{row['quantization']} step"
            name += f" of {row['batch']} sequences to its bound"
            name += " (by arithmetic)" if computes else " (by bytes)"
            found.append(at_most(name, row["to_bound" if computes else "to_bytes"], "ratio", GOAL))
        if row["batch"] in INT8_GOALS and "times_as_fast" in row:
            name = f"{row['quantization']} step of {row['batch']}: times as fast as without"
            found.append(at_least(name, row["times_as_fast"], "ratio", INT8_GOALS[row["batch"]]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--quantization", nargs="+", choices=["none", "int8"], default=["none"], help="in turn"
    )
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    options = parser.parse_args()
    rows = measure(options)
    if not options.json:
        for row in rows:
            print("  ".join(f"{name} {value}" for name, value in row.items()))
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    run = describe_run(features=cpu_features(), **settings)
    found = checks(rows)
    print(json.dumps({"bench": "cpu_step", **run, "results": rows, "checks": found}))


if __name__ == "__main__":
    main()
