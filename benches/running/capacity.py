"""One way to spend the KV memory, under a queue that never empties."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from cbrs import LLM

MAX_NUM_SEQS = 512
MAX_NUM_BATCHED_TOKENS = 2 * MAX_NUM_SEQS  # the least that so many allow, for all ways
BLOCK_SIZE = 16
# Lengths of outputs are log-normal with this deviation; the longest are cut.
OUTPUT_SIGMA = 0.7
FIRST_ID = 2  # after the ends of sequences
NUM_AHEAD = 64
"""Requests that wait at any time."""
Figures = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """What differs between two engines."""

    name: str
    is_contiguous: bool = False
    shares_prefixes: bool = False
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True)
class Load:
    """Lengths in tokens: common beginning, own prompt, mean output, all together at most."""

    shared: int
    own: int
    output: int
    most: int

    def prompt(self, random: np.random.Generator, vocab_size: int) -> np.ndarray:
        """The common beginning and ids of its own."""
        common = np.random.default_rng(0).integers(FIRST_ID, vocab_size, self.shared, np.int32)
        own = random.integers(FIRST_ID, vocab_size, self.own, np.int32)
        return np.concatenate([common, own])

    def output_tokens(self, random: np.random.Generator) -> int:
        """The length of an output."""
        center = np.log(self.output) - OUTPUT_SIGMA**2 / 2
        drawn = int(random.lognormal(center, OUTPUT_SIGMA))
        return min(max(1, drawn), self.most - self.shared - self.own)


def fits(options: argparse.Namespace) -> str | None:
    """What is wrong with the lengths, if anything is."""
    if options.pool_tokens < options.max_model_len:
        return f"--pool-tokens {options.pool_tokens} holds no sequence of --max-model-len"
    needed = options.shared_tokens + options.prompt_tokens + options.output_tokens
    if needed > options.max_model_len:
        return f"--max-model-len {options.max_model_len} is less than a mean request, {needed}"
    return None


def engine(way: Way, options: argparse.Namespace) -> LLM:
    """An engine whose pool has as many bytes as `--pool-tokens` take in `--dtype`."""
    num_seqs = options.pool_tokens // options.max_model_len if way.is_contiguous else MAX_NUM_SEQS
    return LLM(
        options.model,
        dtype=options.dtype,
        num_threads=options.threads,
        block_size=BLOCK_SIZE,
        kv_cache_bytes=pool_bytes(options),
        kv_cache_dtype=way.kv_cache_dtype,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=options.max_model_len,
        enable_prefix_caching=way.shares_prefixes,
        admission="estimated",
    )


def pool_bytes(options: argparse.Namespace) -> int:
    """Bytes of the pool, the same in all ways."""
    from comparing.weights import DTYPE_BYTES, config_of

    shape = config_of(options.model)
    if shape is None:
        raise ValueError("a model without weights has no KV memory")
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return int(options.pool_tokens * token_bytes * DTYPE_BYTES[options.dtype])


class Queue:
    """Keeps requests waiting, and counts."""

    def __init__(self, llm: LLM, load: Load, seed: int) -> None:
        self._engine, self._load = llm.engine, load
        self._vocab_size = llm.tokenizer.vocab_size
        self._random = np.random.default_rng(seed)
        self._num_submitted = 0
        self.num_ended = 0
        self.num_running = 0
        self.seconds = self.sequence_seconds = 0.0
        self.num_tokens = self.num_steps = 0

    def step(self) -> None:
        """Lets requests come and those that run go on, and adds up what that was."""
        processor = self._engine.processor
        self.num_ended += len(processor.take_finished())
        while processor.num_live < self.num_running + NUM_AHEAD:
            processor.submit(
                self._load.prompt(self._random, self._vocab_size),
                index=self._num_submitted,
                max_tokens=self._load.output_tokens(self._random),
                ignore_eos=True,
                temperature=0.0,
            )
            self._num_submitted += 1
        started_s = time.perf_counter()
        batch = self._engine.step()
        elapsed_s = time.perf_counter() - started_s
        self.num_running = batch.num_seqs
        self.num_steps += 1
        self.num_tokens += len(batch.sample_index)
        self.seconds += elapsed_s
        self.sequence_seconds += elapsed_s * batch.num_seqs

    def start_clock(self) -> None:
        """Begins to count anew."""
        self.seconds = self.sequence_seconds = 0.0
        self.num_tokens = self.num_steps = 0


def measure(way: Way, load: Load, options: argparse.Namespace, seed: int) -> Figures:
    """Figures of one run."""
    with engine(way, options) as llm:
        queue = Queue(llm, load, seed)
        while queue.num_ended <= queue.num_running:
            queue.step()
        queue.start_clock()
        num_preemptions = llm.stats()["num_preemptions"]
        while queue.seconds < options.seconds:
            queue.step()
        num_preemptions = llm.stats()["num_preemptions"] - num_preemptions
        config = llm.config()
        llm.engine.close()
    return {
        "num_running": queue.sequence_seconds / queue.seconds,
        "tokens_per_s": queue.num_tokens / queue.seconds,
        "num_preemptions": num_preemptions,
        "num_steps": queue.num_steps,
        "pool_bytes": config.kv_cache_bytes,
        "pool_tokens": config.num_blocks * BLOCK_SIZE,
        "max_num_seqs": config.max_num_seqs,
    }
