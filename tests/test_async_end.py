"""`AsyncLLM`: failed steps, a dead engine, loops that close, and the end of the engine."""

import asyncio
import gc
import threading
import time
import weakref

import pytest
from async_kit import GREEDY, collect, final, is_idle, live_ids, started, until

from cbrs import AsyncLLM, SamplingParams
from cbrs.errors import (
    EngineClosedError,
    EngineDeadError,
)

DELTA = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, output_kind="delta")
ENDLESS = SamplingParams(max_tokens=4000, output_kind="delta")


@pytest.fixture
def llm(make_async_llm, tiny):
    return make_async_llm(tiny)


@pytest.fixture
def slow(make_async_llm):
    """Takes 1 ms per step; a request may run for seconds."""
    return make_async_llm("null:0.001", max_model_len=4096)


def test_a_failed_step_ends_its_streams_with_an_error_as_llm_does(llm, monkeypatch):
    runner = llm.engine._runner
    forward = runner.forward

    def fail_on_long_prompts(batch):
        if batch.max_query_len > 100:
            raise MemoryError("no room for 101 tokens")
        return forward(batch)

    monkeypatch.setattr(runner, "forward", fail_on_long_prompts)

    async def main():
        failed = await collect(llm.generate(list(range(101)), DELTA))
        return failed, await final(llm.generate("fine", GREEDY))

    failed, fine = asyncio.run(main())
    assert [output.finished for output in failed] == [True]
    assert failed[0].outputs[0].finish_reason == "error"
    assert failed[0].error == "MemoryError: no room for 101 tokens"
    assert fine.outputs[0].finish_reason == "length"


def test_a_dead_engine_ends_every_stream_and_refuses_new_ones(make_async_llm, monkeypatch):
    llm = make_async_llm("null:0.001", max_model_len=4096, max_num_seqs=2)
    engine = llm.engine

    async def main():
        streams = [await started(llm.generate([1], ENDLESS)) for _ in range(2)]
        waiting = asyncio.create_task(anext(llm.generate([1], ENDLESS)))
        await until(lambda: llm.stats()["num_waiting"] == 1)
        monkeypatch.setattr(engine, "_schedule", break_down)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="invariant broken"):
                await collect(stream)
        with pytest.raises(EngineDeadError):
            await waiting
        for use in (lambda: anext(llm.generate([1])), lambda: llm.score([1], [2]), llm.pause):
            with pytest.raises(EngineDeadError, match="invariant broken"):
                await use()
        for use in (llm.stats, llm.config, lambda: llm.cancel("x")):
            with pytest.raises(EngineDeadError, match="invariant broken"):
                use()
        await llm.aclose()

    def break_down(block=False):
        raise RuntimeError("invariant broken")

    asyncio.run(main())
    assert not any(thread.name == "cbrs-engine" for thread in threading.enumerate())


def test_a_panic_in_native_code_kills_the_engine_with_a_typed_error(make_async_llm, monkeypatch):
    llm = make_async_llm("null:0.001", max_model_len=4096)

    class PanicException(BaseException):
        __module__ = "pyo3_runtime"

    def panic(block=False):
        raise PanicException("index out of bounds")

    async def main():
        stream = await started(llm.generate([1], ENDLESS))
        monkeypatch.setattr(llm.engine, "_schedule", panic)
        with pytest.raises(EngineDeadError, match="index out of bounds"):
            await collect(stream)
        await llm.aclose()

    asyncio.run(main())


def test_a_loop_that_closes_takes_its_requests_with_it(slow):
    kept = []

    async def main():
        for name in "xy":
            kept.append(await started(slow.generate([1], ENDLESS, name)))

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    assert live_ids(slow) == 2
    loop.close()
    assert live_ids(slow) == 0

    async def other():
        await until(lambda: is_idle(slow))
        with pytest.raises(RuntimeError, match="belong to the event loop"):
            await anext(kept[0])
        return await final(slow.generate([1], GREEDY, "x"))

    assert asyncio.run(other()).finished
    assert slow.stats()["num_cancelled_requests"] == 2


def test_dropping_the_last_reference_ends_the_engine_without_the_garbage_collector():
    async def main():
        llm = AsyncLLM("null", max_model_len=64)
        await final(llm.generate([1], GREEDY))
        engine, thread = weakref.ref(llm.engine.scheduler), llm._thread._thread
        gc.collect()
        gc.disable()
        del llm
        # A step of the thread ends first, then the loop leaves the channel.
        await until(lambda: not thread.is_alive())
        await asyncio.sleep(0.01)
        return engine

    try:
        engine = asyncio.run(main())
        assert engine() is None
    finally:
        gc.enable()


def test_a_stream_keeps_the_engine_in_use():
    async def main():
        stream = AsyncLLM("null", max_model_len=64).generate([1], GREEDY)
        gc.collect()
        return await final(stream)

    assert asyncio.run(main()).finished


def test_closing_ends_the_streams_of_all_loops(make_async_llm):
    llm = make_async_llm("null:0.001", max_model_len=4096)
    errors = []

    async def read():
        try:
            await collect(llm.generate([1], ENDLESS))
        except EngineClosedError as error:
            errors.append(error)

    threads = [threading.Thread(target=lambda: asyncio.run(read())) for _ in range(3)]
    for thread in threads:
        thread.start()

    async def main():
        reader = asyncio.create_task(read())
        await until(lambda: llm.stats()["num_running"] == 4)
        await asyncio.gather(llm.aclose(), llm.aclose())
        await reader

    asyncio.run(main())
    for thread in threads:
        thread.join(10)
    assert len(errors) == 4


def test_after_close_everything_raises_a_typed_error_and_close_does_not(tiny):
    async def main():
        async with AsyncLLM(tiny, max_model_len=64) as llm:
            await final(llm.generate("a", GREEDY))
        await llm.aclose()
        assert llm.is_closed
        for use in SYNC_USES.values():
            with pytest.raises(EngineClosedError, match="AsyncLLM is closed"):
                use(llm)
        for use in ASYNC_USES.values():
            with pytest.raises(EngineClosedError, match="AsyncLLM is closed"):
                await use(llm)

    asyncio.run(main())
    public = {name for name in dir(AsyncLLM) if not name.startswith("_")}
    assert public == {*SYNC_USES, *ASYNC_USES, "aclose", "is_closed"}


SYNC_USES = {
    "serve_in_background": lambda llm: llm.serve_in_background(port=0),
    "cancel": lambda llm: llm.cancel("x"),
    "config": lambda llm: llm.config(),
    "stats": lambda llm: llm.stats(),
    "encode": lambda llm: llm.encode("a"),
    "decode": lambda llm: llm.decode([1]),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "set_policy": lambda llm: llm.set_policy("fair"),
    "engine": lambda llm: llm.engine,
    "tokenizer": lambda llm: llm.tokenizer,
}
ASYNC_USES = {
    "generate": lambda llm: anext(llm.generate("a")),
    "chat": lambda llm: anext(llm.chat([{"role": "user", "content": "a"}])),
    "score": lambda llm: llm.score("a", "b"),
    "pause": lambda llm: llm.pause(),
    "resume": lambda llm: llm.resume(),
}


def test_an_idle_engine_thread_sleeps(make_async_llm):
    llm = make_async_llm("null")
    asyncio.run(final(llm.generate([1], GREEDY)))
    time.sleep(0.05)
    steps, before = llm.stats()["num_steps"], time.process_time()
    time.sleep(0.5)
    assert llm.stats()["num_steps"] == steps
    assert time.process_time() - before < 0.1
