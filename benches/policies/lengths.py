"""Lengths of prompts and outputs: of published traces, or drawn where these are not at hand."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .workload import Int64Array

# By name: the file in `traces` of the folder that `CBRS_DATA` names.
TRACES = {
    "azure": "azure2023_conv.jsonl.gz",
    "mooncake": "mooncake_conversation.jsonl.gz",
    "servegen": "servegen_deepseek_r1_sampled.jsonl.gz",
}
SYNTHETIC = "synthetic"
# Median and sigma of the logarithm of prompts and of outputs, and the most tokens.
SYNTHETIC_PROMPTS, SYNTHETIC_OUTPUTS = (1000.0, 0.9, 16_000), (200.0, 0.9, 4_000)
NUM_SYNTHETIC = 10_000


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompts and outputs of some requests, and where they are from."""

    source: str
    num_prompt_tokens: Int64Array
    num_output_tokens: Int64Array

    def sample(self, random: np.random.Generator, num_requests: int) -> Lengths:
        """Some of them in random order, none twice while there are enough."""
        size = len(self.num_prompt_tokens)
        chosen = random.choice(size, num_requests, replace=num_requests > size)
        return Lengths(self.source, self.num_prompt_tokens[chosen], self.num_output_tokens[chosen])


def trace_folder() -> Path | None:
    """Where the traces are; None without `CBRS_DATA`, or if one is missing there."""
    data = os.environ.get("CBRS_DATA")
    folder = Path(data) / "traces" if data else None
    if folder is None or not all((folder / name).is_file() for name in TRACES.values()):
        return None
    return folder


def load_lengths(name: str) -> Lengths:
    """The lengths of a trace, or synthetic ones."""
    if name == SYNTHETIC:
        random = np.random.default_rng(0)
        drawn = (_log_normal(random, *SYNTHETIC_PROMPTS), _log_normal(random, *SYNTHETIC_OUTPUTS))
        return Lengths("log-normal, drawn", *drawn)
    folder = trace_folder()
    assert folder is not None, "the traces are not here"
    with gzip.open(folder / TRACES[name], "rt", encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    prompts, outputs = (
        np.array([max(1, entry[key]) for entry in entries], dtype=np.int64)
        for key in ("input_length", "output_length")
    )
    return Lengths(TRACES[name], prompts, outputs)


def _log_normal(
    random: np.random.Generator, median: float, sigma: float, at_most: int
) -> Int64Array:
    lengths = median * np.exp(sigma * random.standard_normal(NUM_SYNTHETIC))
    return np.clip(lengths.round(), 1, at_most).astype(np.int64)
