"""What a step must not depend on: length of the contexts, number of waiters, size of the pool.

The two sides of a ratio live in one process and take turns, a stretch of steps each; the result is
the median of the ratios of neighbouring stretches. Only the call is timed: arrays that are fetched
cost the same on both sides and would hide a difference.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator

import numpy as np

import cbrs

from .load import BLOCK_SIZE, CONTEXT, VOCAB_SIZE, Steady, check, config, quiet_gc, start, steady

NUM_SEQS = 64
POOL_NUM_SEQS = 24
# 24 sequences of so many tokens, and what they generate, fit into 1,000 blocks.
POOL_CONTEXT = 256
STRETCH = 20
SHUFFLE_TOKEN_BUDGET = 1 << 20
NUM_WAITING_TOKENS = 16


def compare(small: Steady, large: Steady, num_steps: int) -> dict[str, object]:
    """Medians in microseconds of both sides, and the median ratio large to small."""
    ratios: list[float] = []
    medians: tuple[list[float], list[float]] = ([], [])
    with quiet_gc():
        for turn in range(num_steps // STRETCH):
            order = (0, 1) if turn % 2 == 0 else (1, 0)
            stretch = [0.0, 0.0]
            for side in order:
                stretch[side] = statistics.median((small, large)[side].steps(STRETCH)) / 1e3
                medians[side].append(stretch[side])
            ratios.append(stretch[1] / stretch[0])
    return {
        "ratio": round(statistics.median(ratios), 4),
        "median_us": [round(statistics.median(side), 3) for side in medians],
        "num_stretches": len(ratios),
    }


def measure_context(options: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """64 sequences with a short against a very long context.

    The ratio is that of two schedulers with the same limits, those that the long context needs: the
    length of what runs is the only difference. Beside it stands the ratio to a scheduler with just
    the memory that the short context needs, whose smaller pool the caches hold.
    """
    num_steps = max(2 * STRETCH, 3 * options.num_steps)
    contexts = (CONTEXT, options.long_context)

    def load(context: int, **limits: int) -> Steady:
        steps = 2 * num_steps + STRETCH
        return steady(NUM_SEQS, steps, context=context, seed=options.seed, **limits)

    large = load(max(contexts))
    limits = large.scheduler.config
    small = load(min(contexts), num_blocks=limits.num_blocks, max_model_len=limits.max_model_len)
    result = {"context": list(contexts), **compare(small, large, num_steps)}
    smaller = compare(load(min(contexts)), large, num_steps)
    result["ratio_to_small_pool"] = smaller["ratio"]
    result["small_pool_median_us"] = smaller["median_us"]
    yield f"{NUM_SEQS} sequences, context {CONTEXT} and {options.long_context}", result
    yield "", result


def measure_waiting(options: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """64 sequences, all rows taken, with few against many requests waiting for a row."""
    num_steps, sizes = max(2 * STRETCH, 3 * options.num_steps), (10, options.waiting)
    prompts = np.random.default_rng(options.seed).integers(
        VOCAB_SIZE, size=(max(sizes), NUM_WAITING_TOKENS), dtype=np.int32
    )
    sides = []
    for size in sizes:
        load = steady(
            NUM_SEQS,
            num_steps + 2 * STRETCH,
            seed=options.seed,
            queue_capacity=max(sizes) + NUM_SEQS,
        )
        for prompt in prompts[:size]:
            load.scheduler.submit(prompt, max_tokens=1)
        load.steps(STRETCH)
        assert load.scheduler.stats()["num_waiting"] == size, "not all of them wait"
        sides.append(load)
    result = {"waiting": list(sizes), **compare(sides[0], sides[1], num_steps)}
    yield f"{NUM_SEQS} sequences, {sizes[0]} and {sizes[1]} waiting", result
    yield "", result


def fill_and_release(
    scheduler: cbrs.Scheduler, prompts: list[np.ndarray], until: int, random: np.random.Generator
) -> None:
    """Runs `prompts` until the longest has `until` tokens, then gives all blocks back as free ones.

    The cache forgets the blocks while they are held (so they are released as free, not as cached),
    and the requests are cancelled in random order.
    """
    requests = [scheduler.submit(prompt, ignore_eos=True) for prompt in prompts]
    batch = scheduler.step()
    while batch.max_seq_len < until or batch.num_seqs < len(prompts):
        batch = scheduler.step(np.zeros(len(batch.sample_index), dtype=np.int32))
        assert not batch.outputs.finish_reasons.any(), "a sequence ended before all ran"
    assert scheduler.stats()["num_preemptions"] == 0, "more was taken than there is"
    scheduler.reset_prefix_cache()
    for index in random.permutation(len(prompts)):
        scheduler.cancel(requests[index])
    scheduler.step(np.zeros(len(batch.sample_index), dtype=np.int32))
    stats = scheduler.stats()
    assert stats["num_free_blocks"] == scheduler.config.num_blocks, "a block is not free"


def shuffled(num_blocks: int, seed: int) -> cbrs.Scheduler:
    """A scheduler whose free blocks lie scattered over the pool.

    First long prompts take nearly all blocks, each a run of them, and give the runs back in random
    order. Then many short prompts grow by turns: neighbours in the free list go to different
    sequences, so that each holds a block of every run, and gives them back in random order, too.
    """
    num_rows = 4 * math.isqrt(num_blocks)
    blocks_each = num_blocks // num_rows - 2
    num_tokens = blocks_each * BLOCK_SIZE
    scheduler = cbrs.Scheduler(
        config(
            max_num_seqs=num_rows,
            max_num_batched_tokens=SHUFFLE_TOKEN_BUDGET,
            num_blocks=num_blocks,
            max_model_len=max(num_tokens + BLOCK_SIZE, 2 * CONTEXT),
        )
    )
    random = np.random.default_rng(seed)
    # Windows of one text that begin at different places share no block.
    text = random.integers(VOCAB_SIZE, size=num_tokens + num_rows, dtype=np.int32)
    # While the last prompts are read, the first ones already decode.
    num_tokens_before = num_tokens * num_rows // (SHUFFLE_TOKEN_BUDGET - num_rows) + 2
    long_prompts = [text[index:][: num_tokens - num_tokens_before] for index in range(num_rows)]
    short_prompts = [text[index : index + 1 + index % BLOCK_SIZE] for index in range(num_rows)]
    fill_and_release(scheduler, long_prompts, 0, random)
    fill_and_release(scheduler, short_prompts, num_tokens, random)
    return scheduler


def measure_pool(options: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """24 sequences in a small against a huge pool, with shuffled free lists."""
    num_steps = min(max(2 * STRETCH, options.num_steps), 300)
    sizes = (1000, options.pool_blocks)
    sides, distances = [], []
    for size in sizes:
        load = start(
            shuffled(size, options.seed),
            POOL_NUM_SEQS,
            num_steps + STRETCH,
            POOL_CONTEXT,
            options.seed,
            BLOCK_SIZE,
        )
        blocks = load.batch.block_tables[load.batch.row_ids, : POOL_CONTEXT // BLOCK_SIZE]
        distances.append(float(np.abs(np.diff(blocks.astype(np.int64))).mean() / size))
        sides.append(load)
    result = {
        "pool": list(sizes),
        # About a third if blocks are taken at random, nothing if they lie in a row.
        "mean_distance_of_neighbours": [round(distance, 3) for distance in distances],
        **compare(sides[0], sides[1], num_steps),
    }
    yield f"{POOL_NUM_SEQS} sequences, pools of {sizes[0]} and {sizes[1]} blocks", result
    yield "", result


def context_checks(result: dict[str, object]) -> list[dict[str, object]]:
    short, long = result["context"]
    name = f"step of {NUM_SEQS} sequences, context {long} to {short}"
    return [check(name, result["ratio"], "ratio", 1.1)]


def waiting_checks(result: dict[str, object]) -> list[dict[str, object]]:
    few, many = result["waiting"]
    name = f"step of {NUM_SEQS} sequences, {many} to {few} waiting"
    return [check(name, result["ratio"], "ratio", 1.1)]


def pool_checks(result: dict[str, object]) -> list[dict[str, object]]:
    small, large = result["pool"]
    name = f"step of {POOL_NUM_SEQS} sequences, pool of {large} to {small} blocks"
    return [check(name, result["ratio"], "ratio", 1.5)]
