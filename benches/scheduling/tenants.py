"""What tenants and classes cost: the same loads with many of them, and with one of each.

Steady decode has the policy `fair` on one side, its sequences spread over all tenants and classes,
and `fcfs` on the other. Of every tenant one more request waits for a row, in the lowest class, so
that nobody is displaced and the load stays steady.
The sides take turns, as in `ratios.py`; here the arrays are fetched as well.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator

import numpy as np

from .arrays import fetch
from .load import BLOCK_SIZE, VOCAB_SIZE, Steady, check, quiet_gc, steady
from .mixed import NUM_HEADS, NUM_OUTPUT_TOKENS, Mixed, Turns

CLASSES = ("interactive", "standard", "batch")
# Steady decode with one sequence has one tenant: there is nothing to compare.
MIN_NUM_SEQS = 64
STRETCH = 20
# As many steps as a request has outputs: crowded and quiet steps are in each.
MIXED_STRETCH = NUM_OUTPUT_TOKENS


def spread(num_tenants: int) -> Callable[[int], dict[str, str]]:
    """Tenants and classes, each in turn."""

    def whose(index: int) -> dict[str, str]:
        return {"tenant": f"tenant-{index % num_tenants}", "priority": CLASSES[index % 3]}

    return whose


def with_tenants(num_seqs: int, num_steps: int, num_tenants: int, seed: int) -> Steady:
    """Steady decode of many tenants, a request of each of which waits."""
    load = steady(
        num_seqs,
        num_steps,
        seed=seed,
        whose=spread(num_tenants),
        policy="fair",
        queue_capacity=2 * (num_seqs + num_tenants),
    )
    random = np.random.default_rng(seed)
    for tenant in range(num_tenants):
        prompt = random.integers(VOCAB_SIZE, size=BLOCK_SIZE, dtype=np.int32)
        load.scheduler.submit(prompt, max_tokens=1, tenant=f"tenant-{tenant}", priority=CLASSES[-1])
    load.steps(STRETCH)
    stats = load.scheduler.stats()
    assert stats["num_waiting"] == num_tenants, "not all of them wait"
    assert stats["num_preemptions"] == 0, "somebody was displaced"
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
        "num_waiting": options.num_tenants,
    }


def compare_mixed(options: argparse.Namespace) -> dict[str, object]:
    """Time per output token, submissions included and of the steps alone.

    A tenant keeps its head, so that both sides find as much in the cache: what a tenant has
    computed is not for others.
    """
    # A multiple of the number of heads: prompts have them in turn.
    num_tenants = -(-options.num_tenants // NUM_HEADS) * NUM_HEADS
    with quiet_gc():
        sides = (
            Mixed(options.in_flight, options.seed),
            Mixed(options.in_flight, options.seed, spread(num_tenants), policy="fair"),
        )
        turns: tuple[list[Turns], list[Turns]] = ([], [])
        for turn in range(max(2, 10 * options.num_steps // MIXED_STRETCH)):
            for side in (0, 1) if turn % 2 == 0 else (1, 0):
                turns[side].append(sides[side].steps(MIXED_STRETCH))
    for load in sides:
        load.close()

    def cost(measure: Callable[[Turns], float]) -> tuple[float, list[float]]:
        """Median ratio of neighbouring stretches, and the medians of both sides."""
        one, many = ([measure(stretch) for stretch in side] for side in turns)
        ratios = [figure[1] / figure[0] for figure in zip(one, many, strict=True)]
        medians = [round(statistics.median(side), 4) for side in (one, many)]
        return round(statistics.median(ratios), 4), medians

    ratio, us = cost(lambda stretch: stretch.us_per_output_token())
    step_ratio, step_us = cost(lambda stretch: stretch.step_us_per_output_token())
    return {
        "ratio": ratio,
        "us_per_output_token": us,
        "step_ratio": step_ratio,
        "step_us_per_output_token": step_us,
        "num_tenants": num_tenants,
        "cached_tokens_per_request": [
            round(sum(stretch.num_cached for stretch in side) / num_started, 1)
            for side in turns
            if (num_started := sum(sum(stretch.num_admitted) for stretch in side))
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
            if "step_ratio" in figures:
                steps = f"{name}, steps alone, {named}"
                checks.append(check(steps, figures["step_ratio"], "ratio", 1.5))
    return checks
