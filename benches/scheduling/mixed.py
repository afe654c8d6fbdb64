"""Mixed load: a closed loop in which every finished request makes room for the next."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

import cbrs

from .arrays import check_that_all_are_fetched, fetch
from .load import BLOCK_SIZE, VOCAB_SIZE, check, config, nobody_in_particular, quiet_gc

NUM_IN_FLIGHT = 1024
NUM_PROMPT_TOKENS = 512
NUM_SHARED_TOKENS = 256
NUM_HEADS = 16
NUM_OUTPUT_TOKENS = 128
TOKEN_BUDGET = 8192
# Prompts are used again after so many requests or more: their own halves have been evicted then.
NUM_PROMPTS = 4096


def prompts(num_prompts: int, seed: int) -> np.ndarray:
    """int32 `[num_prompts, 512]`: the first 256 tokens are one of 16 heads, in turn."""
    random = np.random.default_rng(seed)
    heads = random.integers(VOCAB_SIZE, size=(NUM_HEADS, NUM_SHARED_TOKENS), dtype=np.int32)
    result = random.integers(VOCAB_SIZE, size=(num_prompts, NUM_PROMPT_TOKENS), dtype=np.int32)
    result[:, :NUM_SHARED_TOKENS] = heads[np.arange(num_prompts) % NUM_HEADS]
    return result


def mixed_config(num_in_flight: int, **policy: object) -> cbrs.SchedulerConfig:
    """Room for all requests in flight, with a tenth to spare."""
    max_model_len = NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS
    return config(
        max_num_seqs=num_in_flight,
        max_num_batched_tokens=TOKEN_BUDGET,
        num_blocks=num_in_flight * max_model_len // BLOCK_SIZE * 11 // 10,
        max_model_len=max_model_len,
        **policy,
    )


@dataclass
class Turns:
    """What some steps of the loop took, and what they brought."""

    submit_ns: list[int] = field(default_factory=list)
    step_ns: list[int] = field(default_factory=list)
    num_admitted: list[int] = field(default_factory=list)
    num_output_tokens: int = 0
    num_cached: int = 0

    def us_per_output_token(self) -> float:
        return (sum(self.submit_ns) + sum(self.step_ns)) / 1e3 / self.num_output_tokens

    def step_us_per_output_token(self) -> float:
        return sum(self.step_ns) / 1e3 / self.num_output_tokens


class Mixed:
    """The loop, turned over twice, so that requests of all ages are there.

    `whose` has the tenant and the class of a request by its number.
    """

    def __init__(
        self,
        num_in_flight: int,
        seed: int,
        whose: Callable[[int], dict[str, str]] = nobody_in_particular,
        **policy: object,
    ) -> None:
        self.scheduler = cbrs.Scheduler(mixed_config(num_in_flight, **policy))
        self.whose = whose
        self.pool = list(prompts(max(NUM_PROMPTS, 4 * num_in_flight), seed))
        random = np.random.default_rng(seed)
        self.tokens = random.integers(VOCAB_SIZE, size=TOKEN_BUDGET, dtype=np.int32)
        self.batch = self.scheduler.step()
        check_that_all_are_fetched(self.batch)
        self.to_submit, self.at = num_in_flight, 0
        self.steps(2 * NUM_OUTPUT_TOKENS + 2 * num_in_flight * NUM_PROMPT_TOKENS // TOKEN_BUDGET)

    def steps(self, num_steps: int) -> Turns:
        """Runs so many steps; each is timed with all arrays fetched, and apart from it the
        submissions before it.
        """
        submit, step, clock = self.scheduler.submit, self.scheduler.step, time.perf_counter_ns
        turns = Turns()
        for _ in range(num_steps):
            numbers = range(self.at, self.at + self.to_submit)
            chosen = [
                (self.pool[number % len(self.pool)], self.whose(number)) for number in numbers
            ]
            result = self.tokens[: len(self.batch.sample_index)]
            started = clock()
            for prompt, whose in chosen:
                submit(prompt, NUM_OUTPUT_TOKENS, ignore_eos=True, **whose)
            submitted = clock()
            batch = step(result)
            fetch(batch)
            ended = clock()
            self.at += self.to_submit
            self.to_submit = int(np.count_nonzero(batch.outputs.finish_reasons))
            self.batch = batch
            turns.submit_ns.append(submitted - started)
            turns.step_ns.append(ended - submitted)
            turns.num_output_tokens += len(batch.outputs)
            turns.num_admitted.append(len(batch.outputs.started_request_ids))
            turns.num_cached += int(batch.outputs.started_num_cached_tokens.sum())
        return turns

    def close(self) -> None:
        assert self.scheduler.stats()["num_preemptions"] == 0, "the pool was too small"
        self.scheduler.close()


def run_mixed(num_in_flight: int, num_steps: int, seed: int) -> dict[str, float]:
    """Times `num_steps` of the loop."""
    with quiet_gc():
        load = Mixed(num_in_flight, seed)
        turns = load.steps(num_steps)
    load.close()
    step_us = np.asarray(turns.step_ns) / 1e3
    median, p99, p999 = (float(value) for value in np.percentile(step_us, [50, 99, 99.9]))
    num_started = max(1, sum(turns.num_admitted))
    return {
        "us_per_output_token": round(turns.us_per_output_token(), 4),
        "submit_us_per_request": round(sum(turns.submit_ns) / 1e3 / num_started, 3),
        "step_median_us": round(median, 2),
        "step_p99_us": round(p99, 2),
        "step_p999_us": round(p999, 2),
        "tokens_per_step": round(turns.num_output_tokens / num_steps, 1),
        "admitted_per_step": round(sum(turns.num_admitted) / num_steps, 2),
        "most_admitted_in_a_step": max(turns.num_admitted),
        "cached_tokens_per_request": round(turns.num_cached / num_started, 1),
    }


def measure_mixed(options: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """The loop of each run; the median run counts, and of the slowest steps the best run."""
    runs = []
    for run in range(options.runs):
        result = run_mixed(options.in_flight, 10 * options.num_steps, options.seed + run)
        runs.append(result)
        yield f"mixed load, {options.in_flight} in flight", result
    yield (
        "",
        {
            "in_flight": options.in_flight,
            "us_per_output_token": float(np.median([run["us_per_output_token"] for run in runs])),
            "step_p999_us": min(run["step_p999_us"] for run in runs),
            "runs": runs,
        },
    )


def mixed_checks(result: dict[str, float]) -> list[dict[str, object]]:
    name = f"mixed load, {result['in_flight']} in flight, "
    return [
        check(f"{name}submit and step", result["us_per_output_token"], "us/output token", 0.12),
        check(f"{name}p99.9 of a step", result["step_p999_us"], "us", 1000),
    ]
