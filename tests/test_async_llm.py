"""`AsyncLLM`: what a stream gives, how it ends, many loops, and nothing left behind."""

import asyncio
import gc
import itertools
import threading
import time
import weakref

import pytest
from async_kit import GREEDY, collect, final, is_idle, live_ids, started, until

from cbrs import AsyncLLM, SamplingParams
from cbrs.errors import (
    CbrsError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
)
from cbrs.loop_ports import LoopPort

DELTA = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, output_kind="delta")
ENDLESS = SamplingParams(max_tokens=4000, output_kind="delta")


def ids(output):
    return output.outputs[0].token_ids


def all_ids(deltas):
    return [token for delta in deltas for token in ids(delta)]


@pytest.fixture
def llm(make_async_llm, tiny):
    return make_async_llm(tiny)


@pytest.fixture
def slow(make_async_llm):
    """Takes 1 ms per step; a request may run for seconds."""
    return make_async_llm("null:0.001", max_model_len=4096)


def test_cumulative_outputs_grow_to_the_result_of_llm(llm, make_llm, tiny):
    (expected,) = make_llm(tiny).generate("Hello", GREEDY)
    outputs = asyncio.run(collect(llm.generate("Hello", GREEDY)))
    assert outputs[-1].outputs == expected.outputs
    assert outputs[-1].prompt_token_ids == expected.prompt_token_ids
    assert outputs[-1].prompt == "Hello"
    assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
    assert outputs[-1].finished
    for before, after in itertools.pairwise(outputs):
        assert len(ids(before)) < len(ids(after))
        assert ids(after)[: len(ids(before))] == ids(before)
        assert after.outputs[0].text.startswith(before.outputs[0].text)


def test_deltas_joined_are_the_result_and_every_step_brings_one(llm):
    async def main():
        deltas = await collect(llm.generate("Hello", DELTA))
        return deltas, await final(llm.generate("Hello", GREEDY))

    deltas, whole = asyncio.run(main())
    assert [len(ids(delta)) for delta in deltas] == [1] * 8
    assert all_ids(deltas) == ids(whole)
    assert "".join(delta.outputs[0].text for delta in deltas) == whole.outputs[0].text
    assert [delta.outputs[0].finish_reason for delta in deltas] == [None] * 7 + ["length"]
    assert all(delta.prompt_token_ids == whole.prompt_token_ids for delta in deltas)


def test_final_only_gives_one_output(llm):
    params = SamplingParams(
        temperature=0.0, max_tokens=8, ignore_eos=True, output_kind="final_only"
    )

    async def main():
        outputs = await collect(llm.generate([1, 2, 3], params))
        return outputs, await final(llm.generate([1, 2, 3], GREEDY))

    (output,), expected = asyncio.run(main())
    assert output.finished
    assert output.outputs == expected.outputs
    assert output.prompt is None


def test_metrics_of_a_stream_are_consistent(llm):
    outputs = asyncio.run(collect(llm.generate("Hello", DELTA)))
    last = outputs[-1].metrics
    assert 0 <= last.queue_time_s <= last.time_to_first_token_s <= last.total_time_s < 60
    assert len(last.inter_token_latencies_s) == 7
    assert sum(last.inter_token_latencies_s) == pytest.approx(
        last.total_time_s - last.time_to_first_token_s, abs=1e-3
    )
    assert outputs[0].metrics.inter_token_latencies_s == []


def test_chat_renders_the_template(llm):
    stream = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
    output = asyncio.run(final(stream))
    assert output.prompt == "<user>Hi</s><assistant>"
    assert llm.decode(output.prompt_token_ids, skip_special_tokens=False) == output.prompt
    with pytest.raises(TypeError, match="messages must be a list"):
        asyncio.run(final(llm.chat("Hi", GREEDY)))
    with pytest.raises(InvalidRequestError, match="content"):
        asyncio.run(final(llm.chat([{"role": "user"}], GREEDY)))


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], GREEDY, InvalidRequestError, "empty"),
        ([300], GREEDY, InvalidRequestError, "300"),
        ([1] * 512, GREEDY, PromptTooLongError, "512"),
        ("a", SamplingParams(temperature=-1.0), InvalidRequestError, "temperature"),
        ("a", SamplingParams(temperature="hot"), TypeError, "temperature"),
        (None, GREEDY, TypeError, "prompt_token_ids"),
        (["a"], GREEDY, TypeError, "prompt_token_ids"),
        (b"bytes", {"max_tokens": 5}, TypeError, "SamplingParams, not dict"),
    ],
)
def test_a_refused_request_says_why_and_leaves_nothing(llm, prompt, params, error, message):
    async def main():
        with pytest.raises(error, match=message):
            await anext(llm.generate(prompt, params))

    asyncio.run(main())
    assert live_ids(llm) == 0
    assert llm.stats()["num_accepted_requests"] == 0


def test_a_full_queue_refuses_the_first_output(make_async_llm):
    llm = make_async_llm("null:0.01", max_num_seqs=1, queue_capacity=1, max_model_len=4096)

    async def main():
        running = await started(llm.generate([1], ENDLESS))
        waiting = asyncio.create_task(anext(llm.generate([2], ENDLESS)))
        await until(lambda: llm.stats()["num_waiting"] == 1)
        with pytest.raises(OverloadedError):
            await anext(llm.generate([3], ENDLESS))
        waiting.cancel()
        await running.aclose()

    asyncio.run(main())


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


def test_loops_and_threads_share_the_engine_and_get_their_own_results(make_async_llm, tiny):
    llm = make_async_llm(tiny, max_num_seqs=8)
    prompts = [[1 + number, 2 + number] for number in range(24)]

    async def all_of(numbers):
        streams = [llm.generate(prompts[number], GREEDY) for number in numbers]
        return [ids(output) for output in await asyncio.gather(*map(final, streams))]

    async def one_by_one():
        return [ids(await final(llm.generate(prompt, GREEDY))) for prompt in prompts]

    expected = asyncio.run(one_by_one())
    results = {}

    def work(thread):
        numbers = range(thread, 24, 6)
        results[thread] = [asyncio.run(all_of(numbers)) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for thread in range(6):
        assert results[thread] == [expected[thread::6]] * 3


def test_a_loop_is_woken_once_per_step_however_many_requests_it_has(make_async_llm, monkeypatch):
    llm = make_async_llm("null:0.002", max_num_seqs=32, max_num_batched_tokens=64)
    wakes = []
    on_readable = LoopPort._on_readable

    def count(port):
        wakes.append(port)
        on_readable(port)

    monkeypatch.setattr(LoopPort, "_on_readable", count)
    params = SamplingParams(max_tokens=20, output_kind="delta")

    async def main():
        streams = [llm.generate([1], params) for _ in range(32)]
        return await asyncio.gather(*map(collect, streams))

    outputs = asyncio.run(main())
    assert [len(deltas) for deltas in outputs] == [20] * 32
    assert 1 <= len(wakes) <= llm.stats()["num_steps"] + 1


def test_a_slow_reader_holds_nobody_up_and_misses_nothing(slow):
    params = SamplingParams(max_tokens=200, output_kind="delta")

    async def main():
        lazy = slow.generate([1], params)
        first = await anext(lazy)
        other = await collect(slow.generate([2], params))
        await until(lambda: is_idle(slow))  # the lazy one's request is done as well
        rest = await collect(lazy)
        return all_ids([first, *rest]), all_ids(other)

    lazy, other = asyncio.run(main())
    assert lazy == other
    assert len(lazy) == 200


def test_a_blocked_loop_does_not_block_another(slow):
    is_blocked, may_go_on = threading.Event(), threading.Event()

    async def block():
        stream = await started(slow.generate([1], SamplingParams(max_tokens=2000)))
        is_blocked.set()
        assert may_go_on.wait(60)  # the loop does nothing meanwhile
        return await final(stream)

    results = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(block())))
    thread.start()
    assert is_blocked.wait(60)
    assert asyncio.run(final(slow.generate([2], GREEDY))).finished
    may_go_on.set()
    thread.join(60)
    assert len(ids(results[0])) == 2000


def test_a_long_text_is_tokenized_off_the_loop(make_async_llm):
    llm = make_async_llm("null")
    threads = []
    encode = llm.encode
    llm.encode = lambda *arguments: threads.append(threading.get_ident()) or encode(*arguments)
    params = SamplingParams(max_tokens=2, truncate_prompt_tokens=7)

    async def main():
        long = await final(llm.generate("x" * 2_049, params))
        await final(llm.generate("x" * 2_048, params))
        return long

    output = asyncio.run(main())
    assert len(output.prompt_token_ids) == 7
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
    llm.encode = encode


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


def test_choices_of_one_request_are_streamed_together(llm):
    params = SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True, output_kind="delta")

    async def main():
        deltas = await collect(llm.generate("Hello", params))
        cancelled = await started(
            llm.generate("Hello", SamplingParams(n=4, max_tokens=400, ignore_eos=True), "x")
        )
        llm.cancel("x")
        return deltas, await final(cancelled)

    deltas, cancelled = asyncio.run(main())
    assert all(delta.outputs for delta in deltas)
    assert sum(len(delta.outputs) for delta in deltas) == 3 * 6
    assert len(deltas) < 3 * 6, "those of one step come together"
    assert [delta.finished for delta in deltas[:-1]] == [False] * (len(deltas) - 1)
    assert [completion.finish_reason for completion in cancelled.outputs] == ["cancelled"] * 4


def test_a_score_is_that_of_llm(llm, make_llm, tiny):
    expected = make_llm(tiny).score(["One", "Two"], [" the", "hello"])

    async def main():
        return await llm.score(["One", "Two"], [" the", "hello"]), await llm.score("One", " the")

    several, single = asyncio.run(main())
    for score, other in zip([*several, single], [*expected, expected[0]], strict=True):
        assert score.token_ids == other.token_ids
        assert score.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-4)
    for pair, message in ((("a", ""), "continuation is empty"), (([1] * 300, [1] * 300), "512")):
        with pytest.raises(InvalidRequestError, match=message):
            asyncio.run(llm.score(*pair))


def test_a_score_that_a_pause_cancels_says_so(make_async_llm):
    llm = make_async_llm("null:0.02", max_num_batched_tokens=16)

    async def main():
        task = asyncio.create_task(llm.score([1] * 300, [2] * 100))
        await until(lambda: llm.stats()["num_running"] == 1)
        await llm.pause("cancel")
        with pytest.raises(CbrsError, match="not scored: it was cancelled; score it again"):
            await task
        await llm.resume()

    asyncio.run(main())
    assert live_ids(llm) == 0


def test_a_pause_waits_for_what_has_started_and_starts_nothing(make_async_llm):
    llm = make_async_llm("null:0.002", max_num_seqs=2, max_model_len=4096)
    params = SamplingParams(max_tokens=100, output_kind="final_only")

    async def main():
        tasks = [asyncio.create_task(final(llm.generate([1], params))) for _ in range(4)]
        await until(lambda: llm.stats()["num_running"] == 2)
        await llm.pause()
        stats = llm.stats()
        assert (stats["is_paused"], stats["num_running"], stats["num_waiting"]) == (1, 0, 2)
        tasks.append(asyncio.create_task(final(llm.generate([1], params))))
        await asyncio.sleep(0.05)
        assert llm.stats()["num_length_requests"] == 2
        await llm.resume()
        return [output.outputs[0].finish_reason for output in await asyncio.gather(*tasks)]

    assert asyncio.run(main()) == ["length"] * 5


def test_a_cancelling_pause_ends_everything(make_async_llm):
    llm = make_async_llm("null:0.002", max_num_seqs=2, max_model_len=4096)

    async def main():
        tasks = [asyncio.create_task(final(llm.generate([1], ENDLESS))) for _ in range(4)]
        await until(lambda: llm.stats()["num_waiting"] == 2)
        await llm.pause("cancel")
        outputs = await asyncio.gather(*tasks)
        assert [output.outputs[0].finish_reason for output in outputs] == ["cancelled"] * 4
        await llm.resume()
        assert (await final(llm.generate([1], GREEDY))).finished
        with pytest.raises(ValueError, match="mode is 'now'"):
            await llm.pause("now")

    asyncio.run(main())


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
    "cancel": lambda llm: llm.cancel("x"),
    "config": lambda llm: llm.config(),
    "stats": lambda llm: llm.stats(),
    "encode": lambda llm: llm.encode("a"),
    "decode": lambda llm: llm.decode([1]),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
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
