"""Steady decode: the median and 99th percentile of a step, alone and beside a busy thread."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

import cbrs

from .arrays import check_that_all_are_fetched, fetch
from .load import check, config, quiet_gc, steady

# Microseconds: goals for the median and the 99th percentile, by number of sequences.
GOALS = {1: (2, 10), 64: (3, 10), 256: (6, 20), 1024: (20, 50), 4096: (80, 160)}
BUSY_NUM_SEQS = (64, 256, 1024)
NUM_BUSY_ROUNDS = 4


def summary(durations_ns: list[int]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    median, p99 = np.percentile(np.asarray(durations_ns) / 1e3, [50, 99])
    return {"median_us": round(float(median), 3), "p99_us": round(float(p99), 3)}


def over_runs(runs: list[dict[str, float]]) -> dict[str, float]:
    """Median of the runs' medians, and the lowest of their 99th percentiles."""
    return {
        "median_us": round(statistics.median(run["median_us"] for run in runs), 3),
        "p99_us": min(run["p99_us"] for run in runs),
    }


def measure_steady(options: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """By number of sequences: the step with all arrays fetched, the step alone, the fetching.

    `step` alone and with arrays alternate in stretches of 25 steps, so that both see the same.
    """
    results = {}
    for num_seqs in options.num_seqs:
        fetched, alone = [], []
        for run in range(options.runs):
            load = steady(
                num_seqs, 2 * options.num_steps, context=options.context, seed=options.seed + run
            )
            check_that_all_are_fetched(load.batch)
            durations: tuple[list[int], list[int]] = ([], [])
            with quiet_gc():
                load.steps(1, fetch)
                for _ in range(0, options.num_steps, 25):
                    stretch = min(25, options.num_steps - len(durations[0]))
                    durations[0].extend(load.steps(stretch, fetch))
                    durations[1].extend(load.steps(stretch))
            load.close()
            fetched.append(summary(durations[0]))
            alone.append(summary(durations[1]))
        result = over_runs(fetched)
        result |= {f"step_alone_{name}": value for name, value in over_runs(alone).items()}
        result["arrays_us"] = round(result["median_us"] - result["step_alone_median_us"], 3)
        if (rust_us := rust_alone_us(options.criterion, num_seqs)) is not None:
            result["rust_us"] = rust_us
            result["call_adds_us"] = round(result["step_alone_median_us"] - rust_us, 3)
        result["parts_us"] = measure_parts(num_seqs, options)
        result["ns_per_seq"] = round(1e3 * result["median_us"] / num_seqs, 2)
        results[str(num_seqs)] = result
        yield f"steady decode, {num_seqs} sequences", result
    results["no sequence"] = measure_empty(options)
    yield "step without a sequence (the call itself)", results["no sequence"]
    yield "", results


def measure_parts(num_seqs: int, options: argparse.Namespace) -> dict[str, float]:
    """Medians of a step's commit, plan, and hand-over (result in, batch described).

    Measured inside the call, so they leave out what Python adds: the call itself and the end of the
    last batch.
    """
    load = steady(num_seqs, options.num_steps, context=options.context, seed=options.seed)
    with quiet_gc():
        parts = [load.scheduler._time_step(load.tokens) for _ in range(options.num_steps)]
    load.close()
    medians = np.median(np.asarray(parts) / 1e3, axis=0)
    names = ("commit", "plan", "hand_over")
    return {name: round(float(us), 3) for name, us in zip(names, medians, strict=True)}


def rust_alone_us(folder: Path | None, num_seqs: int) -> float | None:
    """Median of the same step as `benches/scheduler.rs` measured it; None if it did not."""
    if folder is None:
        return None
    path = folder / "steady_decode" / "num_seqs" / str(num_seqs) / "new" / "estimates.json"
    if not path.is_file():
        return None
    estimates = json.loads(path.read_text(encoding="utf-8"))
    return round(estimates["median"]["point_estimate"] / 1e3, 3)


def measure_empty(options: argparse.Namespace) -> dict[str, float]:
    """What the call costs when there is nothing to do: the border between Python and Rust."""
    scheduler = cbrs.Scheduler(
        config(max_num_seqs=64, max_num_batched_tokens=64, num_blocks=64, max_model_len=64)
    )
    load = steady(1, 1)
    load.close()
    load.scheduler, load.tokens = scheduler, np.zeros(0, dtype=np.int32)
    with quiet_gc():
        durations = load.steps(10 * options.num_steps)
    scheduler.close()
    return summary(durations)


def steady_checks(results: dict[str, dict[str, float]]) -> list[dict[str, object]]:
    """The step with all arrays against the goals; other sizes have none."""
    checks = []
    for num_seqs, (median, p99) in GOALS.items():
        if str(num_seqs) in results:
            result = results[str(num_seqs)]
            name = f"steady decode, {num_seqs} sequences"
            checks.append(check(f"{name}, median", result["median_us"], "us", median))
            checks.append(check(f"{name}, p99", result["p99_us"], "us", p99))
    return checks


@contextmanager
def busy_thread() -> Iterator[None]:
    """A thread that runs Python code without a pause, and so always wants the GIL."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure_busy(options: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """The same step with and without a busy Python thread, in turn on one scheduler.

    The stretches are long: the interpreter hands the GIL over every 5 ms only.
    """
    results = {}
    for num_seqs in [size for size in BUSY_NUM_SEQS if size in options.num_seqs]:
        stretch = 5 * options.num_steps
        load = steady(
            num_seqs, 2 * NUM_BUSY_ROUNDS * stretch, context=options.context, seed=options.seed
        )
        check_that_all_are_fetched(load.batch)
        quiet: list[int] = []
        busy: list[int] = []
        with quiet_gc():
            for _ in range(NUM_BUSY_ROUNDS):
                quiet.extend(load.steps(stretch, fetch))
                with busy_thread():
                    busy.extend(load.steps(stretch, fetch))
        load.close()
        result = {"quiet": summary(quiet), "busy": summary(busy)}
        result["ratio"] = round(result["busy"]["p99_us"] / result["quiet"]["p99_us"], 3)
        results[str(num_seqs)] = result
        yield f"with a busy Python thread, {num_seqs} sequences", result
    yield "", results


def busy_checks(results: dict[str, dict[str, float]]) -> list[dict[str, object]]:
    name = "p99 with a busy Python thread to p99 without, {} sequences"
    return [
        check(name.format(size), result["ratio"], "ratio", 2) for size, result in results.items()
    ]


def measure_growth(options: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """Medians of the step alone from 64 sequences on, and the exponents of their growth."""
    sizes = sorted({64, 256, 1024, 4096, 16_384} & set(options.growth_num_seqs))
    medians = {}
    for num_seqs in sizes:
        load = steady(num_seqs, options.num_steps, seed=options.seed)
        with quiet_gc():
            medians[num_seqs] = summary(load.steps(options.num_steps))["median_us"]
        load.close()
        yield f"growth, {num_seqs} sequences", {"median_us": medians[num_seqs]}

    def exponent(first: int, last: int) -> float:
        return round(math.log(medians[last] / medians[first]) / math.log(last / first), 4)

    steps = {f"{a} to {b}": exponent(a, b) for a, b in pairwise(sizes)}
    yield (
        "",
        {
            "median_us": {str(size): median for size, median in medians.items()},
            "exponent": exponent(sizes[0], sizes[-1]),
            "exponents": steps,
            "from": sizes[0],
            "to": sizes[-1],
        },
    )


def growth_checks(result: dict[str, float]) -> list[dict[str, object]]:
    name = f"exponent of time, {result['from']} to {result['to']} sequences"
    return [check(name, result["exponent"], "exponent", 1)]
