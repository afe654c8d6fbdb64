"""Memory: bytes of a running sequence, bytes of a block, and growth over many requests.

Rust's memory is seen as the resident set of the process: each reading is that of a fresh process,
and what a figure counts is the difference of two of them that differ in one number only. Huge pages
are off in these processes: one more of them is as much as 128 bytes for each sequence. And with
glibc tables of 64 KiB and more have pages of their own, as those of 32 MiB and more always do: in
the heap, a table of zeros is cleared as far as it takes memory that somebody gave back, which says
more about what the process did before than about the table (about 20 bytes for each sequence).
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

import cbrs

from .load import BLOCK_SIZE, VOCAB_SIZE, check, config

NUM_SEQS = (8192, 45_056)
# Requests that are submitted at a time.
GROUP = 4096
NUM_SEQUENCE_TOKENS = 64
# So few that no sequence fills its first block while the others are submitted.
NUM_SEQUENCE_PROMPT_TOKENS = 2
# `PR_SET_THP_DISABLE` of Linux.
DISABLE_HUGE_PAGES = 41
# `M_MMAP_THRESHOLD` of glibc.
MMAP_THRESHOLD = -3
NUM_BLOCKS = (65_536, 524_288)
NUM_PROMPT_TOKENS = 1024
NUM_WARM_UP_REQUESTS = 100_000
SOAK_NUM_REQUESTS = 10_000_000


def resident_bytes() -> int:
    """Resident set of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Rss:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("the kernel does not tell the resident set")


def run_all(scheduler: cbrs.Scheduler, prompts: np.ndarray, max_tokens: int, stop_at: int) -> None:
    """Submits all prompts and steps until `stop_at` sequences run, or none is left."""
    for prompt in prompts:
        scheduler.submit(prompt, max_tokens=max_tokens, ignore_eos=True)
    batch = scheduler.step()
    while 0 < batch.num_seqs < stop_at:
        batch = scheduler.step(np.zeros(len(batch.sample_index), dtype=np.int32))
    if batch.num_seqs:
        scheduler.step(np.zeros(len(batch.sample_index), dtype=np.int32))


def bytes_with_seqs(num_seqs: int) -> tuple[int, int]:
    """Resident bytes with so many running sequences of few tokens; all else is the same.

    And how many of them one sequence has in the arrays that two steps lend by turns.
    """
    token_budget, most_seqs = 2 * max(NUM_SEQS), max(NUM_SEQS)
    scheduler = cbrs.Scheduler(
        config(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=token_budget,
            num_blocks=most_seqs * NUM_SEQUENCE_TOKENS // BLOCK_SIZE,
            max_model_len=NUM_SEQUENCE_TOKENS,
        )
    )
    random = np.random.default_rng(0)

    def prompts(number: int, num_tokens: int) -> np.ndarray:
        return random.integers(VOCAB_SIZE, size=(number, num_tokens), dtype=np.int32)

    # Prompts that fill the budget, for either buffer set: its arrays about tokens are in memory
    # from here on. A decode between them has the sets change places.
    full, filled = NUM_SEQUENCE_TOKENS - 2, set()
    for max_tokens in (2, 1):
        for prompt in prompts(token_budget // full, full):
            scheduler.submit(prompt, max_tokens=max_tokens, ignore_eos=True)
        batch = scheduler.step()
        filled.add(batch.token_ids.__array_interface__["data"][0])
        while batch.num_seqs:
            batch = scheduler.step(np.zeros(len(batch.sample_index), dtype=np.int32))
    assert len(filled) == 2, "one buffer set was filled twice"
    short_prompts, tokens = prompts(most_seqs, NUM_SEQUENCE_PROMPT_TOKENS), prompts(1, most_seqs)[0]
    # What requests take that wait is no part of it: no more of them wait at a time than half of the
    # smaller number, and what such groups leave behind in the allocator is there from here on.
    group = min(GROUP, max(1, num_seqs // 2))
    for _ in range(3):
        for prompt in short_prompts[:group]:
            scheduler.submit(prompt, max_tokens=1, ignore_eos=True)
        batch = scheduler.step(tokens[: len(batch.sample_index)])
    for first in range(0, num_seqs, group):
        for prompt in short_prompts[first : min(first + group, num_seqs)]:
            scheduler.submit(prompt, max_tokens=NUM_SEQUENCE_TOKENS // 2, ignore_eos=True)
        batch = scheduler.step(tokens[: len(batch.sample_index)])
    for _ in range(2):
        batch = scheduler.step(tokens[:num_seqs])
    assert batch.num_decodes == scheduler.stats()["num_running"] == num_seqs, "not all of them run"
    return resident_bytes(), 2 * bytes_lent_per_seq(batch)


def bytes_lent_per_seq(batch: cbrs.Batch) -> int:
    """Bytes that each sequence of a batch has in its arrays and in those of its outputs.

    The arrays about tokens are left out: they are as long as the token budget is large.
    """
    of_tokens = {"token_ids", "positions", "slot_mapping"}
    names = [name for name in dir(batch) if name not in of_tokens and not name.startswith("_")]
    arrays = [getattr(batch, name) for name in names]
    arrays += [getattr(batch.outputs, name) for name in dir(batch.outputs)]
    lengths = (batch.num_seqs, batch.num_seqs + 1)
    lent = [array for array in arrays if isinstance(array, np.ndarray) and array.ndim == 1]
    by_row = {id(array) for array in parameters_by_row(batch)}
    return sum(
        array.itemsize for array in lent if len(array) in lengths and id(array) not in by_row
    )


def parameters_by_row(batch: cbrs.Batch) -> list[np.ndarray]:
    """The sampling parameters by row, of which there is one set."""
    return [
        *(batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seeds),
        *(batch.presence_penalty, batch.frequency_penalty, batch.repetition_penalty),
        *(batch.min_tokens, batch.num_logprobs),
    ]


def bytes_with_blocks(num_blocks: int) -> int:
    """Resident bytes with so many blocks, every one of which was filled and published."""
    scheduler = cbrs.Scheduler(
        config(
            max_num_seqs=16,
            max_num_batched_tokens=16 * NUM_PROMPT_TOKENS,
            num_blocks=num_blocks,
            max_model_len=2 * NUM_PROMPT_TOKENS,
        )
    )
    random = np.random.default_rng(0)
    for _ in range(num_blocks * BLOCK_SIZE // (16 * NUM_PROMPT_TOKENS) + 2):
        prompts = random.integers(VOCAB_SIZE, size=(16, NUM_PROMPT_TOKENS), dtype=np.int32)
        run_all(scheduler, prompts, 1, 17)
    stats = scheduler.stats()
    assert stats["num_cached_blocks"] >= 0.99 * num_blocks, "the cache is not full"
    return resident_bytes()


def growth_over_requests(num_requests: int) -> list[int]:
    """Resident bytes after 100,000 small requests, and after `num_requests`."""
    scheduler = cbrs.Scheduler(
        config(
            max_num_seqs=256,
            max_num_batched_tokens=256 * BLOCK_SIZE,
            num_blocks=4096,
            max_model_len=64,
        )
    )
    random, done, readings = np.random.default_rng(0), 0, []
    for target in (min(NUM_WARM_UP_REQUESTS, num_requests // 2), num_requests):
        while done < target:
            prompts = random.integers(VOCAB_SIZE, size=(256, BLOCK_SIZE + 1), dtype=np.int32)
            run_all(scheduler, prompts, 1, 257)
            done += 256
        readings.append(resident_bytes())
    return readings


def make_pages_countable() -> None:
    """Has this process get small pages only, and tables their own, on Linux with glibc."""
    libc = ctypes.CDLL(None)
    if libc.prctl(DISABLE_HUGE_PAGES, 1, 0, 0, 0):
        raise RuntimeError("the kernel does not switch huge pages off")
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, 64 * 1024)


def in_fresh_process(function: object, argument: int) -> object:
    """The result of `function(argument)` in a process of its own."""
    context = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=make_pages_countable) as executor:
        return executor.submit(function, argument).result()  # type: ignore[arg-type]


def measure_memory(options: argparse.Namespace) -> Iterator[tuple[str, object]]:
    (few, _), (many, lent) = (in_fresh_process(bytes_with_seqs, num_seqs) for num_seqs in NUM_SEQS)
    per_seq = (many - few) / (NUM_SEQS[1] - NUM_SEQS[0])
    # The tokens of its last block, and one table entry for each block. Those of full blocks would
    # stand in the pool, which is as large for few sequences as for many.
    own = 4 * BLOCK_SIZE + 4 * NUM_SEQUENCE_TOKENS // BLOCK_SIZE
    result: dict[str, object] = {"bytes_per_sequence": round(per_seq - own, 1)}
    result |= {"of_which_in_lent_arrays": lent, "tokens_and_table_bytes": own}
    yield "memory of a running sequence, without tokens and block table", dict(result)
    few, many = (in_fresh_process(bytes_with_blocks, num_blocks) for num_blocks in NUM_BLOCKS)
    result["bytes_per_block"] = round((many - few) / (NUM_BLOCKS[1] - NUM_BLOCKS[0]), 1)
    yield "memory of a block", {"bytes_per_block": result["bytes_per_block"]}
    num_requests = SOAK_NUM_REQUESTS if options.soak else options.num_requests
    before, after = in_fresh_process(growth_over_requests, num_requests)
    result |= {"num_requests": num_requests, "growth_bytes": after - before}
    yield f"growth over {num_requests} requests", {"growth_bytes": result["growth_bytes"]}
    yield "", result


def memory_checks(result: dict[str, float]) -> list[dict[str, object]]:
    """A leak of one byte a request is seen; the allocator may move by half a megabyte."""
    name = "memory of a running sequence besides tokens and block table"
    return [
        check(name, result["bytes_per_sequence"], "bytes", 400),
        check(
            "metadata of a block, stored tokens included", result["bytes_per_block"], "bytes", 100
        ),
        check(
            f"growth over {result['num_requests']} requests",
            result["growth_bytes"],
            "bytes",
            512 * 1024,
            "none: <= 524288",
        ),
    ]
