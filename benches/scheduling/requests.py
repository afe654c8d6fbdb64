"""What single requests cost: submission, prefix look-up, publication of blocks, cancel."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

import cbrs

from .load import (
    BLOCK_SIZE,
    CONTEXT,
    NUM_WARM_UP_STEPS,
    VOCAB_SIZE,
    check,
    config,
    quiet_gc,
    steady,
)

NUM_PROMPTS = 500
NUM_CACHED_TOKENS = 4096
PUBLISH_NUM_SEQS = 1024
CANCEL_SIZES = (10, 10_000)
NUM_CANCELS = 10


def random_prompts(num_prompts: int, num_tokens: int, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return list(random.integers(VOCAB_SIZE, size=(num_prompts, num_tokens), dtype=np.int32))


def time_submit(scheduler: cbrs.Scheduler, prompts: Sequence[object], rounds: int) -> list[int]:
    """Nanoseconds of each submission; the queue is emptied after each round, outside the timing."""
    submit, clock, durations = scheduler.submit, time.perf_counter_ns, []
    for _ in range(rounds):
        requests = []
        for prompt in prompts:
            started = clock()
            request = submit(prompt, 16)
            durations.append(clock() - started)
            requests.append(request)
        for request in requests:
            scheduler.cancel(request)
        scheduler.step()
        assert scheduler.stats()["num_waiting"] == 0, "a request is left"
    return durations


def measure_submit(options: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """512 tokens as an int32 array and as a list of int; every prompt is another one."""
    arrays = random_prompts(NUM_PROMPTS, CONTEXT, options.seed)
    forms = {"int32 array": arrays, "list of int": [prompt.tolist() for prompt in arrays]}
    results = {}
    for form, prompts in forms.items():
        scheduler = cbrs.Scheduler(
            config(
                max_num_seqs=1,
                max_num_batched_tokens=64,
                num_blocks=128,
                max_model_len=1024,
                queue_capacity=2 * NUM_PROMPTS,
            )
        )
        with quiet_gc():
            time_submit(scheduler, prompts, 1)
            durations = time_submit(scheduler, prompts, max(1, options.num_steps // 20))
        scheduler.close()
        median, p99 = np.percentile(np.asarray(durations) / 1e3, [50, 99])
        results[form] = {
            "median_us": round(float(median), 3),
            "p99_us": round(float(p99), 3),
            "num_requests": len(durations),
        }
        yield f"submit, {CONTEXT} tokens as {form}", results[form]
    yield "", results


def submit_checks(results: dict[str, dict[str, float]]) -> list[dict[str, object]]:
    goals = {"int32 array": 3, "list of int": 8}
    return [
        check(f"submit, {CONTEXT} tokens as {form}", results[form]["median_us"], "us", goal)
        for form, goal in goals.items()
    ]


def time_admission(scheduler: cbrs.Scheduler, prompt: np.ndarray, num_cached: int) -> int:
    """Nanoseconds of the step that admits `prompt`, which has so many tokens in the cache."""
    scheduler.submit(prompt, max_tokens=1)
    started = time.perf_counter_ns()
    batch = scheduler.step()
    duration = time.perf_counter_ns() - started
    assert batch.outputs.started_num_cached_tokens.tolist() == [num_cached], "unexpected cache"
    scheduler.step(np.zeros(1, dtype=np.int32))  # ends the request and publishes its blocks
    return duration


def measure_prefix(options: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """The step that admits a cached 4,096-token prompt, less the step that admits 16 new tokens.

    Both run 16 tokens; the difference is the look-up of 255 blocks, taking hold of them and
    writing them into the block table.
    """
    scheduler = cbrs.Scheduler(
        config(
            max_num_seqs=4,
            max_num_batched_tokens=2 * NUM_CACHED_TOKENS,
            num_blocks=8192,
            max_model_len=2 * NUM_CACHED_TOKENS,
        )
    )
    num_times = max(8, options.num_steps)
    # Several long prompts, in turn, so that the caches of the processor do not hold just one.
    long_prompts = random_prompts(8, NUM_CACHED_TOKENS, options.seed)
    short_prompts = random_prompts(num_times, BLOCK_SIZE, options.seed + 1)
    for prompt in long_prompts:
        time_admission(scheduler, prompt, 0)
    long_ns, short_ns = [], []
    with quiet_gc():
        for index, short in enumerate(short_prompts):
            prompt = long_prompts[index % len(long_prompts)]
            long_ns.append(time_admission(scheduler, prompt, NUM_CACHED_TOKENS - BLOCK_SIZE))
            short_ns.append(time_admission(scheduler, short, 0))
    scheduler.close()
    medians = [statistics.median(side) / 1e3 for side in (long_ns, short_ns)]
    result = {
        "lookup_us": round(medians[0] - medians[1], 3),
        "step_cached_us": round(medians[0], 3),
        "step_short_us": round(medians[1], 3),
    }
    yield f"prefix look-up, {NUM_CACHED_TOKENS} cached tokens", result
    yield "", result


def prefix_checks(result: dict[str, float]) -> list[dict[str, object]]:
    name = f"prefix look-up, {NUM_CACHED_TOKENS} cached tokens"
    return [check(name, result["lookup_us"], "us", 10)]


def measure_publish(options: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """Steps in which 1,024 sequences fill their blocks at once, with and without prefix cache.

    The difference is what hashing and publishing a block costs.
    """
    num_blocks_filled = max(4, options.num_steps // BLOCK_SIZE)
    num_steps = num_blocks_filled * BLOCK_SIZE
    sides = [
        steady(
            PUBLISH_NUM_SEQS,
            num_steps + BLOCK_SIZE,
            phases=1,
            seed=options.seed,
            enable_prefix_caching=caching,
        )
        for caching in (True, False)
    ]
    differences, filling_us = [], ([], [])
    with quiet_gc():
        for load in sides:
            while load.batch.seq_lens[0] % BLOCK_SIZE:
                load.steps(1)
        for _ in range(num_blocks_filled):
            # The last token of each block is in the batch: this step publishes, and takes blocks.
            pair = [load.steps(1)[0] / 1e3 for load in sides]
            differences.append(pair[0] - pair[1])
            for side, duration in zip(filling_us, pair, strict=True):
                side.append(duration)
            for load in sides:
                load.steps(BLOCK_SIZE - 1)
    for load in sides:
        load.close()
    result = {
        "us_per_block": round(statistics.median(differences) / PUBLISH_NUM_SEQS, 4),
        "step_us": [round(statistics.median(side), 2) for side in filling_us],
    }
    yield "publication of a block", result
    yield "", result


def publish_checks(result: dict[str, float]) -> list[dict[str, object]]:
    return [check("publication of a block", result["us_per_block"], "us", 0.12)]


class Waiting:
    """One running sequence, and a number of waiters of which ten at a time are cancelled."""

    def __init__(self, num_live: int, options: argparse.Namespace) -> None:
        self.load = steady(
            1,
            options.num_steps + NUM_WARM_UP_STEPS,
            seed=options.seed,
            queue_capacity=2 * max(CANCEL_SIZES),
        )
        self.random = np.random.default_rng(options.seed)
        self.prompt = random_prompts(1, BLOCK_SIZE, options.seed)[0]
        self.requests = [self._submit() for _ in range(num_live)]
        self.load.steps(2)

    def _submit(self) -> int:
        return self.load.scheduler.submit(self.prompt, max_tokens=1)

    def cancel(self) -> tuple[float, float]:
        """Nanoseconds of a cancel, and of the step that carries ten of them out."""
        cancel: Callable[[int], bool] = self.load.scheduler.cancel
        chosen = self.random.choice(len(self.requests), NUM_CANCELS, replace=False)
        requests, durations = [self.requests[index] for index in chosen], []
        for request in requests:
            started = time.perf_counter_ns()
            cancel(request)
            durations.append(time.perf_counter_ns() - started)
        step_ns = self.load.steps(1)[0]
        for index in chosen:
            self.requests[index] = self._submit()
        self.load.steps(1)
        return statistics.median(durations), step_ns


def measure_cancel(options: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """Cancels among few and among many live requests, the two sides in turn."""
    sides = [Waiting(num_live, options) for num_live in CANCEL_SIZES]
    with quiet_gc():
        times = [[side.cancel() for side in sides] for _ in range(max(4, options.num_steps // 2))]
    medians = np.median(np.asarray(times), axis=0) / 1e3
    names = ("cancel_us", "step_us")
    result: dict[str, object] = {
        str(num_live): dict(zip(names, medians[side].round(3).tolist(), strict=True))
        for side, num_live in enumerate(CANCEL_SIZES)
    }
    ratios = (medians[1] / medians[0]).round(3).tolist()
    result |= {"call_ratio": ratios[0], "step_ratio": ratios[1]}
    yield f"cancel at {CANCEL_SIZES[0]} and {CANCEL_SIZES[1]} live", result
    yield "", result


def cancel_checks(result: dict[str, float]) -> list[dict[str, object]]:
    """O(1): a thousand times the requests may cost cache misses, but no search."""
    few, many = CANCEL_SIZES
    names = {"call_ratio": "cancel", "step_ratio": f"step that ends {NUM_CANCELS} waiters"}
    return [
        check(f"{name}, {many} to {few} live", result[key], "ratio", 4, "O(1): <= 4")
        for key, name in names.items()
    ]
