"""Loads without a model: schedulers in steady decode, and how a step and its arrays are timed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

import cbrs

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
CONTEXT = 512
NUM_WARM_UP_STEPS = 20
# Prompts that start in one step while a load is set up: a multiple of the block size, so that each
# step brings as many sequences of each phase.
MAX_GROUP = 128
MAX_GROUP_TOKENS = MAX_GROUP * (CONTEXT + BLOCK_SIZE)


def check(name: str, value: float, unit: str, at_most: float, goal: str = "") -> dict[str, object]:
    """One entry of `checks`: a figure and whether it reaches its goal."""
    return {
        "name": name,
        "value": float(f"{value:.4g}"),
        "unit": unit,
        "goal": goal or f"<= {at_most:g}",
        "ok": bool(value <= at_most),
    }


def config(**limits: object) -> cbrs.SchedulerConfig:
    """A configuration as all loads have it: blocks of 16, prefix cache on, ids checked."""
    defaults: dict[str, object] = {"block_size": BLOCK_SIZE, "vocab_size": VOCAB_SIZE}
    return cbrs.SchedulerConfig(**{**defaults, **limits})  # type: ignore[arg-type]


@contextmanager
def quiet_gc() -> Iterator[None]:
    """Keeps Python's garbage collector out: what lives is frozen, and no collection runs."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@dataclass
class Steady:
    """A scheduler all of whose sequences decode, with 1/16 of them taking a block in each step."""

    scheduler: cbrs.Scheduler
    batch: cbrs.Batch
    tokens: np.ndarray

    def steps(self, num_steps: int, fetch: Callable[[cbrs.Batch], None] | None = None) -> list[int]:
        """Nanoseconds of each step: of the call, and of `fetch` if given."""
        step, tokens, clock = self.scheduler.step, self.tokens, time.perf_counter_ns
        durations = []
        for _ in range(num_steps):
            started = clock()
            batch = step(tokens)
            if fetch is not None:
                fetch(batch)
            durations.append(clock() - started)
        assert batch.num_decodes == batch.num_seqs == len(tokens), "the load was not steady"
        self.batch = batch
        return durations

    def close(self) -> None:
        self.scheduler.close()


def nobody_in_particular(index: int) -> dict[str, str]:
    """Whose the request of this number is: one tenant, one class."""
    return {}


def start(
    scheduler: cbrs.Scheduler,
    num_seqs: int,
    num_steps: int,
    context: int,
    seed: int,
    phases: int,
    whose: Callable[[int], dict[str, str]] = nobody_in_particular,
) -> Steady:
    """Brings `num_seqs` sequences to about `context` tokens; they can decode `num_steps` more.

    `whose` has the tenant and the class of each by its number.

    Block boundaries are spread evenly over `phases` steps (16, or 1: all sequences take their
    blocks in the same step). Prompts that start earlier are shorter by the tokens that they
    generate until all decode.
    """
    random = np.random.default_rng(seed)
    group = max(1, min(MAX_GROUP, MAX_GROUP_TOKENS // (context + BLOCK_SIZE)))
    num_groups = -(-num_seqs // group)
    batch = scheduler.step()
    for first in range(0, num_seqs, group):
        groups_after = num_groups - 1 - first // group
        for index in range(first, min(first + group, num_seqs)):
            length = max(1, context - groups_after) + index % phases
            prompt = random.integers(VOCAB_SIZE, size=length, dtype=np.int32)
            max_tokens = groups_after + NUM_WARM_UP_STEPS + num_steps + 2
            scheduler.submit(prompt, max_tokens=max_tokens, ignore_eos=True, **whose(index))
        batch = scheduler.step(np.zeros(len(batch.sample_index), dtype=np.int32))
        assert batch.num_seqs == min(first + group, num_seqs), "a prompt waits"
    tokens = random.integers(VOCAB_SIZE, size=num_seqs, dtype=np.int32)
    steady = Steady(scheduler, batch, tokens)
    steady.steps(NUM_WARM_UP_STEPS)
    return steady


def steady(
    num_seqs: int,
    num_steps: int,
    *,
    context: int = CONTEXT,
    seed: int = 0,
    phases: int = BLOCK_SIZE,
    whose: Callable[[int], dict[str, str]] = nobody_in_particular,
    **limits: object,
) -> Steady:
    """A new scheduler in steady decode; `limits` add to its configuration or replace parts."""
    max_model_len = context + BLOCK_SIZE + NUM_WARM_UP_STEPS + num_steps + MAX_GROUP + 2
    defaults: dict[str, object] = {
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": max(MAX_GROUP_TOKENS, context + BLOCK_SIZE) + num_seqs,
        "num_blocks": num_seqs * (max_model_len // BLOCK_SIZE + 2),
        "max_model_len": max_model_len,
    }
    scheduler = cbrs.Scheduler(config(**{**defaults, **limits}))
    return start(scheduler, num_seqs, num_steps, context, seed, phases, whose)
