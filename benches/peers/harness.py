"""The load that every scheduler gets, and the program that runs it in a peer's interpreter.

    python -m peers.harness vllm_v1 --num-seqs 1 64 --in-flight 1024

Needs nothing but the standard library and the peer: its interpreter may have neither cbrs nor
numpy. Prints one JSON object as the last line of stdout.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import platform
import random
import sys
import time
from dataclasses import dataclass
from typing import Any, Protocol

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
CONTEXT = 512
NUM_WARM_UP_STEPS = 10
GROUP = 64
# The mixed load, as `scheduling/mixed.py` has it.
NUM_SHARED_TOKENS = 256
NUM_HEADS = 16
NUM_OUTPUT_TOKENS = 128
TOKEN_BUDGET = 8192


@dataclass(frozen=True)
class Limits:
    """What a scheduler is made for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int = BLOCK_SIZE
    vocab_size: int = VOCAB_SIZE


class Peer(Protocol):
    """A scheduler under load. `schedule` and `update` are timed, `sample` is not."""

    version: str
    # What was timed, in one sentence.
    measured: str

    def __init__(self, limits: Limits) -> None: ...

    def prepare(self, prompt: list[int]) -> Any:
        """A prompt in the form in which this scheduler likes it best; not timed."""

    def submit(self, prompt: Any, max_tokens: int) -> None:
        """Makes a request and queues it; timed in the mixed load."""

    def schedule(self) -> None:
        """Plans a step, and reads or fills the arrays that the interface offers."""

    def sample(self) -> None:
        """Makes up what a model would have answered."""

    def update(self) -> tuple[int, int]:
        """Commits the answer: how many tokens came, and how many requests ended."""


def load_peer(name: str) -> type[Peer]:
    peer: type[Peer] = importlib.import_module(f"peers.{name}").Peer
    return peer


def summary(durations_ns: list[int]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    ordered = sorted(durations_ns)
    return {
        "median_us": round(ordered[len(ordered) // 2] / 1e3, 3),
        "p99_us": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] / 1e3, 3),
    }


def random_ids(source: random.Random, number: int) -> list[int]:
    # The highest ids are left to what a peer may reserve, the lowest to its special tokens.
    return [source.randrange(1000, VOCAB_SIZE - 1000) for _ in range(number)]


def step(peer: Peer) -> tuple[int, int, int]:
    """Nanoseconds of a step, the tokens that it brought and the requests that it ended."""
    started = time.perf_counter_ns()
    peer.schedule()
    scheduled = time.perf_counter_ns()
    peer.sample()
    sampled = time.perf_counter_ns()
    num_tokens, num_ended = peer.update()
    return scheduled - started + time.perf_counter_ns() - sampled, num_tokens, num_ended


def freeze() -> None:
    """What was set up stays out of Python's garbage collections, as vLLM does it."""
    gc.collect()
    gc.freeze()


def run_steady(make: type[Peer], num_seqs: int, num_steps: int, seed: int) -> dict[str, float]:
    """Sequences of about 512 tokens that all decode; 1/16 of them take a block in each step."""
    num_groups = -(-num_seqs // GROUP)
    num_extra_steps = NUM_WARM_UP_STEPS + num_groups + 16
    max_model_len = CONTEXT + BLOCK_SIZE + num_groups + num_extra_steps + num_steps
    peer = make(
        Limits(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=GROUP * (CONTEXT + BLOCK_SIZE) + num_seqs,
            max_model_len=max_model_len,
            num_blocks=num_seqs * (max_model_len // BLOCK_SIZE + 2),
        )
    )
    source = random.Random(seed)
    num_tokens = 0
    for first in range(0, num_seqs, GROUP):
        groups_after = num_groups - 1 - first // GROUP
        for index in range(first, min(first + GROUP, num_seqs)):
            length = CONTEXT - groups_after + index % BLOCK_SIZE
            prompt = peer.prepare(random_ids(source, length))
            peer.submit(prompt, groups_after + num_extra_steps + num_steps)
        num_tokens = step(peer)[1]
    for _ in range(16):  # some plan a prompt over several steps, or pass its token on later
        num_tokens = step(peer)[1] if num_tokens < num_seqs else num_tokens
    assert num_tokens == num_seqs, f"{num_tokens} of {num_seqs} sequences decode"
    freeze()
    for _ in range(NUM_WARM_UP_STEPS):
        step(peer)
    durations = []
    cpu_started = time.thread_time_ns()
    for _ in range(num_steps):
        duration, num_tokens, _ = step(peer)
        durations.append(duration)
        assert num_tokens == num_seqs, "the load was not steady"
    cpu_ns = time.thread_time_ns() - cpu_started
    gc.unfreeze()
    # Processor time, `sample` included: what to look at on a machine that others use, too.
    return {**summary(durations), "mean_cpu_us": round(cpu_ns / num_steps / 1e3, 3)}


def run_mixed(make: type[Peer], in_flight: int, num_steps: int, seed: int) -> dict[str, float]:
    """The closed loop: 512-token prompts that share 16 heads of 256, 128 output tokens."""
    max_model_len = CONTEXT + NUM_OUTPUT_TOKENS
    peer = make(
        Limits(
            max_num_seqs=in_flight,
            max_num_batched_tokens=TOKEN_BUDGET,
            max_model_len=max_model_len,
            num_blocks=in_flight * (max_model_len // BLOCK_SIZE) * 11 // 10,
        )
    )
    source = random.Random(seed)
    heads = [random_ids(source, NUM_SHARED_TOKENS) for _ in range(NUM_HEADS)]
    own = CONTEXT - NUM_SHARED_TOKENS
    # Used again only when their own halves have long been evicted.
    pool = [
        peer.prepare(heads[index % NUM_HEADS] + random_ids(source, own))
        for index in range(4 * in_flight)
    ]
    freeze()
    at, to_submit, index = 0, in_flight, 0
    submit_ns = step_ns = num_output_tokens = num_submitted = 0
    durations = []
    num_warm_up_steps = NUM_OUTPUT_TOKENS + in_flight * CONTEXT // TOKEN_BUDGET
    for index in range(num_warm_up_steps + num_steps):
        started = time.perf_counter_ns()
        for offset in range(to_submit):
            peer.submit(pool[(at + offset) % len(pool)], NUM_OUTPUT_TOKENS)
        submitted = time.perf_counter_ns() - started
        at += to_submit
        duration, num_tokens, num_ended = step(peer)
        if index >= num_warm_up_steps:
            submit_ns, step_ns = submit_ns + submitted, step_ns + duration
            num_output_tokens, num_submitted = (
                num_output_tokens + num_tokens,
                num_submitted + to_submit,
            )
            durations.append(duration)
        to_submit = num_ended
    gc.unfreeze()
    return {
        **{f"step_{name}": value for name, value in summary(durations).items()},
        "us_per_output_token": round((submit_ns + step_ns) / 1e3 / num_output_tokens, 4),
        "submit_us_per_request": round(submit_ns / 1e3 / max(1, num_submitted), 3),
        "tokens_per_step": round(num_output_tokens / num_steps, 1),
        "admitted_per_step": round(num_submitted / num_steps, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer")
    parser.add_argument("--num-seqs", type=int, nargs="*", default=[])
    parser.add_argument("--in-flight", type=int, default=0, help="of the mixed load; 0 = skip it")
    parser.add_argument("--num-steps", type=int, default=200)
    parser.add_argument("--num-mixed-steps", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make = load_peer(options.peer)
    result: dict[str, Any] = {
        "version": make.version,
        "measured": make.measured,
        "python": platform.python_version(),
        "steady": {},
    }
    for num_seqs in options.num_seqs:
        steady = run_steady(make, num_seqs, options.num_steps, options.seed)
        result["steady"][str(num_seqs)] = steady
        print(f"{options.peer}: {num_seqs} sequences: {steady}", file=sys.stderr, flush=True)
    if options.in_flight:
        mixed = run_mixed(make, options.in_flight, options.num_mixed_steps, options.seed)
        result["mixed"] = {"in_flight": options.in_flight, **mixed}
        print(f"{options.peer}: mixed: {mixed}", file=sys.stderr, flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
