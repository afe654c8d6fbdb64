"""What tests of `AsyncLLM` share."""

import asyncio
import time

from cbrs import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


async def collect(stream):
    """All outputs of a stream."""
    return [output async for output in stream]


async def final(stream):
    """The last output of a stream."""
    return (await collect(stream))[-1]


async def started(stream):
    """A stream that has given its first output."""
    await anext(stream)
    return stream


async def until(condition, timeout_s=30.0):
    """Waits until a condition holds, and lets the loop run meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it does not come to pass"
        await asyncio.sleep(0.001)


def is_idle(llm):
    """Whether nothing runs or waits."""
    stats = llm.stats()
    return stats["num_running"] == stats["num_waiting"] == 0


def live_ids(llm):
    """How many request ids are in use."""
    return len(llm._thread.ports.ids)
