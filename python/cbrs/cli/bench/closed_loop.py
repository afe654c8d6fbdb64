"""A closed loop: as many clients as the concurrency, each sends its next request after the last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cbrs.cli.bench.figures import ClientTimes, Level

if TYPE_CHECKING:
    from cbrs.async_llm import AsyncLLM
    from cbrs.cli.bench.workload import BenchRequest


async def run_level(
    llm: AsyncLLM,
    requests: Sequence[BenchRequest],
    concurrency: int,
    on_done: Callable[[], object],
) -> Level:
    """Runs all requests, `concurrency` at a time; `on_done` is called after each.

    Raises what the engine refuses; a request whose step failed is counted and the rest goes on.
    """
    waiting = iter(requests)
    done: list[ClientTimes] = []

    async def client() -> None:
        # All clients take from one iterator; they run in one thread.
        for request in waiting:
            done.append(await _run_one(llm, request))
            on_done()

    started = time.perf_counter()
    clients = [asyncio.ensure_future(client()) for _ in range(min(concurrency, len(requests)))]
    try:
        await asyncio.gather(*clients)
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return Level(concurrency, time.perf_counter() - started, done)


async def _run_one(llm: AsyncLLM, request: BenchRequest) -> ClientTimes:
    times = ClientTimes(len(request.prompt), time.perf_counter())
    async for output in llm.generate(request.prompt, request.params):
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        if num_tokens > 0:
            times.arrivals.append((time.perf_counter(), num_tokens))
        times.error = output.error
    return times
