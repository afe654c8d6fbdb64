"""cbrs: `AsyncLLM` in process, a task of one event loop for each client."""

from __future__ import annotations

import asyncio

import cbrs
from cbrs import AsyncLLM, SamplingParams
from cbrs.cli.bench.closed_loop import run_level
from cbrs.cli.bench.workload import BenchRequest

from . import harness
from .harness import Load, Seen, Settings


class Peer(harness.Peer):
    version = cbrs.__version__
    measured = "AsyncLLM in process, streams of single tokens as text and ids"

    def __init__(self, settings: Settings) -> None:
        self.llm = AsyncLLM(
            settings.model,
            dtype=settings.dtype,
            quantization=settings.quantization,
            num_threads=settings.num_threads,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            max_num_batched_tokens=settings.token_budget,
        )

    def run(self, load: Load) -> list[Seen]:
        params = SamplingParams(
            temperature=0.0, max_tokens=load.output_tokens, ignore_eos=True, output_kind="delta"
        )
        requests = [BenchRequest(prompt, params) for prompt in load.prompts()]
        level = asyncio.run(run_level(self.llm, requests, load.concurrency, lambda: None))
        if level.errors:
            raise RuntimeError(f"{len(level.errors)} requests failed: {level.errors[0]}")
        return [Seen(request.sent_s, request.arrivals) for request in level.requests]

    def close(self) -> None:
        asyncio.run(self.llm.aclose())
