"""`AsyncLLM`: every way to end a request, its id, and a request that is still prepared."""

import asyncio
import gc
import threading

import pytest
from async_kit import GREEDY, collect, final, is_idle, live_ids, started, until

from cbrs import SamplingParams
from cbrs.errors import (
    InvalidRequestError,
)

ENDLESS = SamplingParams(max_tokens=4000, output_kind="delta")


@pytest.fixture
def llm(make_async_llm, tiny):
    return make_async_llm(tiny)


@pytest.fixture
def slow(make_async_llm):
    """Takes 1 ms per step; a request may run for seconds."""
    return make_async_llm("null:0.001", max_model_len=4096)


async def close_by_aclose(llm, stream):
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def close_by_cancelling_the_task(llm, stream):
    task = asyncio.create_task(collect(stream))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def close_by_timeout(llm, stream):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(collect(stream), 0.02)


async def close_by_name(llm, stream):
    assert llm.cancel("x")
    assert not llm.cancel("x")
    outputs = await collect(stream)
    assert outputs[-1].outputs[0].finish_reason == "cancelled"
    assert outputs[-1].finished


CLOSINGS = [close_by_aclose, close_by_cancelling_the_task, close_by_timeout, close_by_name]


@pytest.mark.parametrize("close", CLOSINGS)
def test_closing_a_stream_cancels_its_request(slow, close):
    async def main():
        await close(slow, await started(slow.generate([1], ENDLESS, "x")))
        await until(lambda: is_idle(slow))

    asyncio.run(main())
    assert slow.stats()["num_cancelled_requests"] == 1
    assert slow.stats()["num_output_tokens"] < 4000
    assert live_ids(slow) == 0


def test_leaving_the_loop_cancels_the_request(slow):
    async def main():
        async for _ in slow.generate([1], ENDLESS, "x"):
            break
        await until(lambda: is_idle(slow))

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
    assert slow.stats()["num_cancelled_requests"] == 1


def test_a_stream_that_nobody_asks_for_an_output_is_not_submitted(slow):
    slow.generate([1], ENDLESS, "x")
    assert slow.stats()["num_accepted_requests"] == 0
    assert not slow.cancel("x")


def test_a_live_id_cannot_be_given_twice(slow):
    async def main():
        first = await started(slow.generate([1], ENDLESS, "x"))
        with pytest.raises(InvalidRequestError, match="'x' belongs to a request") as caught:
            await anext(slow.generate([2], ENDLESS, "x"))
        assert caught.value.param == "request_id"
        assert slow.stats()["num_accepted_requests"] == 1
        await first.aclose()
        output = await final(slow.generate([2], GREEDY, "x"))
        assert output.request_id == "x"
        again = await final(slow.generate([2], GREEDY, "x"))
        assert again.finished

    asyncio.run(main())
    assert live_ids(slow) == 0


def test_generated_ids_differ_and_can_be_cancelled(slow):
    async def main():
        streams = [await started(slow.generate([1], ENDLESS)) for _ in range(3)]
        assert len({stream.request_id for stream in streams}) == 3
        for stream in streams:
            assert slow.cancel(stream.request_id)
            assert (await final(stream)).request_id == stream.request_id

    asyncio.run(main())
    with pytest.raises(TypeError, match="request_id"):
        slow.generate([1], ENDLESS, 5)


def test_e03_a_cancelled_id_can_be_used_again_while_the_queue_is_blocked(make_async_llm):
    llm = make_async_llm("null:0.002", max_num_seqs=1, max_model_len=4096)

    async def main():
        blocker = await started(llm.generate([1], ENDLESS))
        tasks = []
        for _ in range(3):
            tasks.append(asyncio.create_task(final(llm.generate([2], GREEDY, "X"))))
            await until(lambda: live_ids(llm) == 2)
            assert llm.cancel("X")
        tasks.append(asyncio.create_task(final(llm.generate([2], GREEDY, "X"))))
        await asyncio.sleep(0.01)
        await blocker.aclose()
        return [output.outputs[0].finish_reason for output in await asyncio.gather(*tasks)]

    assert asyncio.run(main()) == ["cancelled"] * 3 + ["length"]
    assert live_ids(llm) == 0


def test_only_one_task_may_wait_for_the_next_output(slow):
    async def main():
        stream = slow.generate([1], ENDLESS)
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task"):
            await anext(stream)
        await task
        await stream.aclose()

    asyncio.run(main())


def test_aclose_wakes_the_task_that_waits_for_an_output(make_async_llm):
    llm = make_async_llm("null:0.002", max_num_seqs=1, max_model_len=4096)

    async def main():
        blocker = await started(llm.generate([1], ENDLESS))
        stream = llm.generate([2], ENDLESS)
        task = asyncio.create_task(collect(stream))
        await until(lambda: llm.stats()["num_waiting"] == 1)
        await stream.aclose()
        assert await task == []
        await blocker.aclose()

    asyncio.run(main())


LONG = "word " * 410  # just too long for the loop
HI = [{"role": "user", "content": "Hi"}]


def hold_preparations(llm, monkeypatch):
    """Lets texts be tokenized and chats be rendered only once the returned event is set."""
    may_go_on = threading.Event()

    def held(function):
        def wait_and_call(*arguments):
            assert may_go_on.wait(60)
            return function(*arguments)

        return wait_and_call

    monkeypatch.setattr(llm, "encode", held(llm.encode))
    monkeypatch.setattr(llm, "_render", held(llm._render))
    return may_go_on


async def end_by_name(llm):
    assert llm.cancel("x")
    assert not llm.cancel("x")


async def end_by_pause(llm):
    await llm.pause("cancel")
    await llm.resume()


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final_only"])
@pytest.mark.parametrize("end", [end_by_name, end_by_pause])
@pytest.mark.parametrize("is_chat", [True, False])
def test_what_is_cancelled_while_it_is_prepared_ends_as_cancelled(
    llm, monkeypatch, is_chat, end, kind
):
    may_go_on = hold_preparations(llm, monkeypatch)
    params = SamplingParams(
        n=2, max_tokens=400, truncate_prompt_tokens=8, ignore_eos=True, output_kind=kind
    )

    async def main():
        stream = llm.chat(HI, params, "x") if is_chat else llm.generate(LONG, params, "x")
        task = asyncio.create_task(collect(stream))
        await asyncio.sleep(0.01)
        await end(llm)
        may_go_on.set()
        return await task

    outputs = asyncio.run(main())
    reasons = [(c.index, c.finish_reason) for output in outputs for c in output.outputs]
    assert [reason for reason in reasons if reason[1]] == [(0, "cancelled"), (1, "cancelled")]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert llm.stats()["num_output_tokens"] < 100
    assert live_ids(llm) == 0


def test_the_id_of_a_request_is_taken_while_it_is_prepared(llm, monkeypatch):
    may_go_on = hold_preparations(llm, monkeypatch)

    async def main():
        task = asyncio.create_task(final(llm.chat(HI, GREEDY, "x")))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequestError, match="'x' belongs to a request"):
            await anext(llm.generate([1], GREEDY, "x"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert live_ids(llm) == 0
        stream = llm.chat(HI, GREEDY, "x")
        task = asyncio.create_task(collect(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        may_go_on.set()
        assert await task == []

    asyncio.run(main())
    assert live_ids(llm) == 0
    assert llm.stats()["num_accepted_requests"] == 0
