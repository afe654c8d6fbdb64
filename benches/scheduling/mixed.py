"""Mixed load: a closed loop in which every finished request makes room for the next."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np

import cbrs

from .arrays import check_that_all_are_fetched, fetch
from .load import BLOCK_SIZE, VOCAB_SIZE, check, config, quiet_gc

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


def mixed_config(num_in_flight: int) -> cbrs.SchedulerConfig:
    """Room for all requests in flight, with a tenth to spare."""
    max_model_len = NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS
    return config(
        max_num_seqs=num_in_flight,
        max_num_batched_tokens=TOKEN_BUDGET,
        num_blocks=num_in_flight * max_model_len // BLOCK_SIZE * 11 // 10,
        max_model_len=max_model_len,
    )


def run_mixed(num_in_flight: int, num_steps: int, seed: int) -> dict[str, float]:
    """Runs the loop until it has turned over twice, then times `num_steps` of it.

    `submit_us` covers the submissions before a step, `step_us` the step with all arrays fetched.
    """
    scheduler = cbrs.Scheduler(mixed_config(num_in_flight))
    pool = list(prompts(max(NUM_PROMPTS, 4 * num_in_flight), seed))
    tokens = np.random.default_rng(seed).integers(VOCAB_SIZE, size=TOKEN_BUDGET, dtype=np.int32)
    submit, step, clock = scheduler.submit, scheduler.step, time.perf_counter_ns
    batch = step()
    check_that_all_are_fetched(batch)
    to_submit, at = num_in_flight, 0
    submit_ns, step_ns, num_output_tokens, num_admitted, num_cached = [], [], 0, [], 0
    num_warm_up_steps = (
        2 * NUM_OUTPUT_TOKENS + 2 * num_in_flight * NUM_PROMPT_TOKENS // TOKEN_BUDGET
    )
    with quiet_gc():
        for index in range(num_warm_up_steps + num_steps):
            chosen = [pool[(at + offset) % len(pool)] for offset in range(to_submit)]
            result = tokens[: len(batch.sample_index)]
            started = clock()
            for prompt in chosen:
                submit(prompt, NUM_OUTPUT_TOKENS, ignore_eos=True)
            submitted = clock()
            batch = step(result)
            fetch(batch)
            ended = clock()
            at += to_submit
            to_submit = int(np.count_nonzero(batch.outputs.finish_reasons))
            if index >= num_warm_up_steps:
                submit_ns.append(submitted - started)
                step_ns.append(ended - submitted)
                num_output_tokens += len(batch.outputs)
                num_admitted.append(len(batch.outputs.started_request_ids))
                num_cached += int(batch.outputs.started_num_cached_tokens.sum())
    assert scheduler.stats()["num_preemptions"] == 0, "the pool was too small"
    scheduler.close()
    step_us = np.asarray(step_ns) / 1e3
    median, p99, p999 = (float(value) for value in np.percentile(step_us, [50, 99, 99.9]))
    total_us = (sum(submit_ns) + sum(step_ns)) / 1e3
    return {
        "us_per_output_token": round(total_us / num_output_tokens, 4),
        "submit_us_per_request": round(sum(submit_ns) / 1e3 / max(1, sum(num_admitted)), 3),
        "step_median_us": round(median, 2),
        "step_p99_us": round(p99, 2),
        "step_p999_us": round(p999, 2),
        "tokens_per_step": round(num_output_tokens / num_steps, 1),
        "admitted_per_step": round(sum(num_admitted) / num_steps, 2),
        "most_admitted_in_a_step": max(num_admitted),
        "cached_tokens_per_request": round(num_cached / max(1, sum(num_admitted)), 1),
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
