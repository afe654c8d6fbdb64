"""The options of a closed loop, alike in every bench of serving."""

from __future__ import annotations

import argparse
import os

from peers.serving.harness import Load


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Adds clients, runs, lengths, counts and threads."""
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--runs", type=int, default=3, help="the median counts (default: 3)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=512, help="prompt and output at most")
    parser.add_argument("--requests-per-client", type=int, default=2)
    parser.add_argument("--min-requests", type=int, default=4, help="of each run")
    parser.add_argument("--vocab-size", type=int, default=32_000, help="prompts' ids are below it")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))


def load_of(options: argparse.Namespace, level: int, seed: int) -> Load:
    """The load of a run with so many clients; each seed has other prompts."""
    return Load(
        concurrency=level,
        num_requests=max(options.min_requests, options.requests_per_client * level),
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        vocab_size=options.vocab_size,
        seed=1000 * level + seed,
    )
