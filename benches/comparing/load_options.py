"""The options of a closed loop, alike in every bench of serving."""

from __future__ import annotations

import argparse
import os


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Adds clients, runs, lengths, counts and threads."""
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--runs", type=int, default=3, help="the median counts (default: 3)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=512, help="prompt and output at most")
    parser.add_argument("--requests-per-client", type=int, default=2)
    parser.add_argument("--min-requests", type=int, default=8, help="of each run")
    parser.add_argument("--vocab-size", type=int, default=32_000, help="prompts' ids are below it")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
