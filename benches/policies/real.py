"""What the benches of the policy that run a real model share: options, and the steps' work."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np

from cbrs import hub

KNOWN = "smollm2-135m-instruct"
# Of a step: query tokens, tokens of all contexts, pairs of query and key within chunks.
WORK = ("new_tokens", "kv_tokens_read", "attn_pairs")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all of these benches have."""
    result = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--model", help=f"a GGUF file or folder; default: {KNOWN}")
    result.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores"
    )
    result.add_argument("--quick", action="store_true", help="a few steps; figures mean little")
    result.add_argument("--plot", type=Path, metavar="PNG", help="draw the result into this file")
    result.add_argument("--json", action="store_true", help="print only the JSON line to stdout")
    return result


def model(options: argparse.Namespace) -> str:
    """The model to run; the known one is fetched if it is not here."""
    return options.model or str(hub.pull(KNOWN))


def prompt(random: np.random.Generator, num_tokens: int, vocab_size: int) -> list[int]:
    """Random ids, so that no prompt begins like another; the first ids are often special."""
    ids: list[int] = random.integers(vocab_size // 100 + 1, vocab_size, size=num_tokens).tolist()
    return ids


def work(batch: Any) -> tuple[int, int, int]:
    """What a step has to do, in the order of `WORK`, counted from its batch."""
    query = np.diff(batch.query_start).astype(np.int64)
    context = batch.seq_lens.astype(np.int64)
    chunks = query > 1
    start = (context - query)[chunks]
    pairs = query[chunks] * (start + query[chunks] // 2)
    return int(query.sum()), int(context.sum()), int(pairs.sum())
