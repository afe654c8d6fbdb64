"""An engine in a process of its own, which its parent measures from inside and over HTTP.

    python benches/serving/inside.py MODEL MAX_NUM_SEQS

It prints its URL; then it reads a load as a JSON line, runs it without HTTP and prints the figures,
until the end of its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np

from cbrs import AsyncLLM, SamplingParams
from cbrs.cli.bench.closed_loop import run_level
from cbrs.cli.bench.workload import BenchRequest

FIRST_ID = 256


def prompts(num_requests: int, num_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids."""
    random = np.random.default_rng(seed)
    shape = (num_requests, num_tokens)
    return [list(map(int, row)) for row in random.integers(FIRST_ID, vocab_size, shape)]


async def closed_loop(llm: AsyncLLM, load: dict[str, Any]) -> dict[str, float]:
    """Output tokens per second of clients that each wait for their answer."""
    ids = prompts(
        load["num_requests"], load["prompt_tokens"], llm.tokenizer.vocab_size, load["seed"]
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=load["output_tokens"], ignore_eos=True, output_kind="delta"
    )
    requests = [BenchRequest(prompt, params) for prompt in ids]
    level = await run_level(llm, requests, load["concurrency"], lambda: None)
    return {"output_tokens_per_s": level.output_tokens_per_s}


def open_loop(llm: AsyncLLM, load: dict[str, Any]) -> dict[str, float]:
    """Milliseconds that the engine alone takes for requests that come at random."""
    engine = llm.engine
    num_requests = int(load["rate"] * load["duration_s"])
    ids = prompts(num_requests, load["prompt_tokens"], llm.tokenizer.vocab_size, load["seed"])
    random = np.random.default_rng(load["seed"])
    due = time.perf_counter() + np.cumsum(random.exponential(1 / load["rate"], num_requests))
    finished = []
    for index, (prompt, time_s) in enumerate(zip(ids, due, strict=True)):
        if (wait_s := time_s - time.perf_counter()) > 0:
            time.sleep(wait_s)
        engine.processor.submit(
            prompt, index=index, max_tokens=load["output_tokens"], ignore_eos=True
        )
    while len(finished) < num_requests:
        finished += engine.processor.wait_finished(1.0)
    times_ms = [1e3 * (one.finished_time_s - one.arrival_time_s) for one in finished]
    return {f"p{p}_ms": float(np.percentile(times_ms, p)) for p in (50, 99)}


def main() -> None:
    """Serves, and runs what it is told."""
    llm = AsyncLLM(sys.argv[1], max_num_seqs=int(sys.argv[2]), policy="fair")
    try:
        with llm.serve_in_background(port=0) as server:
            print(server.url, flush=True)
            for line in sys.stdin:
                load = json.loads(line)
                is_open = "rate" in load
                figures = open_loop(llm, load) if is_open else asyncio.run(closed_loop(llm, load))
                print(json.dumps(figures), flush=True)
    finally:
        asyncio.run(llm.aclose())


if __name__ == "__main__":
    main()
