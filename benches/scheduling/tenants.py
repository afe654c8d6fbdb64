"""What tenants and classes cost: the same loads with many of them, and with one of each.

Steady decode has the policy `fair` on one side, its sequences spread over all tenants and classes,
and `fcfs` on the other. Where tenants are more than sequences, each of the others has one request
that waits for a row, in the lowest class, so that nobody is displaced and the load stays steady.
The sides take turns, as in `ratios.py`; here the arrays are fetched as well.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator

import numpy as np

from .arrays import fetch
from .load import BLOCK_SIZE, VOCAB_SIZE, Steady, check, quiet_gc, steady
from .mixed import NUM_HEADS, Mixed

CLASSES = ("interactive", "standard", "batch")
# Steady decode with one sequence has one tenant: there is nothing to compare.
MIN_NUM_SEQS = 64
STRETCH = 20
MIXED_STRETCH = 100


def spread(num_tenants: int) -> Callable[[int], dict[str, str]]:
    """Tenants and classes, each in turn."""

    def whose(index: int) -> dict[str, str]:
        return {"tenant": f"tenant-{index % num_tenants}", "priority": CLASSES[index % 3]}

    return whose


def with_tenants(num_seqs: int, num_steps: int, num_tenants: int, seed: int) -> Steady:
    """Steady decode of many tenants, all of which run or wait."""
    load = steady(
        num_seqs,
        num_steps,
        seed=seed,
        whose=spread(num_tenants),
        policy="fair",
        queue_capacity=num_seqs + num_tenants,
    )
    random = np.random.default_rng(seed)
    for tenant in range(num_seqs, num_tenants):
        prompt = random.integers(VOCAB_SIZE, size=BLOCK_SIZE, dtype=np.int32)
        load.scheduler.submit(prompt, max_tokens=1, tenant=f"tenant-{tenant}", priority=CLASSES[-1])
    load.steps(STRETCH)
    num_waiting = load.scheduler.stats()["num_waiting"]
    assert num_waiting == max(0, num_tenants - num_seqs), "not all of the others wait"
    return load


def measure_tenants(options: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """Steady decode by number of sequences, and the mixed load."""
    results = {}
    for num_seqs in [size for size in options.num_seqs if size >= MIN_NUM_SEQS]:
        results[str(num_seqs)] = compare_steady(num_seqs, options)
        yield f"steady decode, {num_seqs} sequences, tenants", results[str(num_seqs)]
    results["mixed"] = compare_mixed(options)
    yield f"mixed load, {options.in_flight} in flight, tenants", results["mixed"]
    yield "", {"num_tenants": options.num_tenants, "num_classes": len(CLASSES), **results}


def compare_steady(num_seqs: int, options: argparse.Namespace) -> dict[str, object]:
    """Medians of both sides in microseconds, and the median ratio of neighbouring stretches."""
    num_steps = max(2 * STRETCH, 3 * options.num_steps)
    room = num_steps + 2 * STRETCH
    many = with_tenants(num_seqs, room, options.num_tenants, options.seed)
    one = steady(num_seqs, room, seed=options.seed)
    sides, ratios = (one, many), []
    medians: tuple[list[float], list[float]] = ([], [])
    with quiet_gc():
        for turn in range(num_steps // STRETCH):
            stretch = [0.0, 0.0]
            for side in (0, 1) if turn % 2 == 0 else (1, 0):
                stretch[side] = statistics.median(sides[side].steps(STRETCH, fetch)) / 1e3
                medians[side].append(stretch[side])
            ratios.append(stretch[1] / stretch[0])
    for load in sides:
        load.close()
    return {
        "ratio": round(statistics.median(ratios), 4),
        "median_us": [round(statistics.median(side), 3) for side in medians],
        "num_waiting": max(0, options.num_tenants - num_seqs),
    }


def compare_mixed(options: argparse.Namespace) -> dict[str, object]:
    """Time per output token, submissions included, and of the steps alone.

    A tenant keeps its head, so that both sides find as much in the cache: what a tenant has
    computed is not for others.
    """
    # A multiple of the number of heads: prompts have them in turn.
    num_tenants = -(-options.num_tenants // NUM_HEADS) * NUM_HEADS
    num_stretches = max(2, 10 * options.num_steps // MIXED_STRETCH)
    ratios: list[float] = []
    step_ratios: list[float] = []
    us_per_token: tuple[list[float], list[float]] = ([], [])
    with quiet_gc():
        sides = (
            Mixed(options.in_flight, options.seed),
            Mixed(options.in_flight, options.seed, spread(num_tenants), policy="fair"),
        )
        num_cached, num_started = [0, 0], [0, 0]
        for turn in range(num_stretches):
            stretch, step_us = [0.0, 0.0], [0.0, 0.0]
            for side in (0, 1) if turn % 2 == 0 else (1, 0):
                turns = sides[side].steps(MIXED_STRETCH)
                stretch[side] = turns.us_per_output_token()
                step_us[side] = statistics.median(turns.step_ns)
                us_per_token[side].append(stretch[side])
                num_cached[side] += turns.num_cached
                num_started[side] += sum(turns.num_admitted)
            ratios.append(stretch[1] / stretch[0])
            step_ratios.append(step_us[1] / step_us[0])
    for load in sides:
        load.close()
    return {
        "ratio": round(statistics.median(ratios), 4),
        "step_ratio": round(statistics.median(step_ratios), 4),
        "us_per_output_token": [round(statistics.median(side), 4) for side in us_per_token],
        "num_tenants": num_tenants,
        "cached_tokens_per_request": [
            round(cached / max(1, started), 1)
            for cached, started in zip(num_cached, num_started, strict=True)
        ],
    }


def tenants_checks(results: dict[str, dict[str, float]]) -> list[dict[str, object]]:
    """Every ratio against the goal of the policy: at most one and a half times."""
    named = f"{results['num_tenants']} tenants and {results['num_classes']} classes to one of each"
    checks = []
    for load, figures in results.items():
        if isinstance(figures, dict):
            name = "mixed load" if load == "mixed" else f"steady decode, {load} sequences"
            checks.append(check(f"{name}, {named}", figures["ratio"], "ratio", 1.5))
    return checks
