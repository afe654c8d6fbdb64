"""What one `Scheduler.step` costs in steady decode, seen from Python, without a model.

Every sequence has about 512 tokens of context in blocks of 16 and gets one token a step. The time
is that of the whole call: commit of the last tokens, planning, filling the arrays. Prints a table
and, as its last line, one JSON object with medians and 99th percentiles in microseconds.
"""

import argparse
import json
import statistics
import time

import numpy as np
from hardware import describe_run

import cbrs

NUM_PROMPT_TOKENS = 512
BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
NUM_WARM_UP_STEPS = 20


def steady_scheduler(num_seqs: int, num_steps: int, seed: int) -> tuple[cbrs.Scheduler, cbrs.Batch]:
    """A scheduler whose next batches are `num_seqs` decodes each, and its first such batch."""
    # One more than the steps that are timed, so that nobody ends within them.
    max_model_len = NUM_PROMPT_TOKENS + num_steps + NUM_WARM_UP_STEPS + num_seqs + 1
    # While the prompts run, the first sequences already decode: room for these tokens, too.
    num_blocks = num_seqs * (max_model_len // BLOCK_SIZE + 2)
    scheduler = cbrs.Scheduler(
        cbrs.SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=16_384,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
        )
    )
    prompts = np.random.default_rng(seed).integers(
        VOCAB_SIZE, size=(num_seqs, NUM_PROMPT_TOKENS), dtype=np.int32
    )
    for prompt in prompts:
        scheduler.submit(prompt, max_tokens=max_model_len - NUM_PROMPT_TOKENS)
    batch = scheduler.step()
    while batch.num_decodes < num_seqs:
        batch = scheduler.step(np.zeros(len(batch.sample_index), dtype=np.int32))
    return scheduler, batch


def measure(num_seqs: int, num_steps: int, seed: int) -> dict[str, float]:
    """Median and 99th percentile of a step, in microseconds."""
    scheduler, batch = steady_scheduler(num_seqs, num_steps, seed)
    tokens = np.random.default_rng(seed + 1).integers(VOCAB_SIZE, size=num_seqs, dtype=np.int32)
    durations_ns = []
    for _ in range(NUM_WARM_UP_STEPS + num_steps):
        started = time.perf_counter_ns()
        batch = scheduler.step(tokens)
        durations_ns.append(time.perf_counter_ns() - started)
    assert batch.num_decodes == num_seqs, "the load was not steady"
    scheduler.close()
    durations_us = [duration / 1e3 for duration in durations_ns[NUM_WARM_UP_STEPS:]]
    return {
        "median_us": round(statistics.median(durations_us), 2),
        "p99_us": round(float(np.percentile(durations_us, 99)), 2),
    }


def main() -> None:
    """Measures each size and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 64, 256, 1024, 4096])
    parser.add_argument("--num-steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args()
    results = {}
    if not options.json:
        print(f"{'sequences':>9}  {'median, us':>10}  {'p99, us':>8}")
    for num_seqs in options.num_seqs:
        result = measure(num_seqs, options.num_steps, options.seed)
        results[str(num_seqs)] = result
        if not options.json:
            print(
                f"{num_seqs:>9}  {result['median_us']:>10.2f}  {result['p99_us']:>8.2f}", flush=True
            )
    run = describe_run(seed=options.seed, num_steps=options.num_steps)
    print(json.dumps({"bench": "step_overhead", **run, "results": results, "checks": []}))


if __name__ == "__main__":
    main()
