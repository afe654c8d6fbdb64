"""`AsyncLLM`: what a stream gives, and many loops at once."""

import asyncio
import itertools
import threading

import pytest
from async_kit import GREEDY, collect, final, is_idle, live_ids, started, until

from cbrs import SamplingParams
from cbrs.errors import (
    CbrsError,
    DeadlineExceededError,
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
        with pytest.raises(OverloadedError) as caught:
            await anext(llm.generate([3], ENDLESS))
        assert (caught.value.reason, caught.value.retry_after_s >= 0.001) == ("queue", True)
        waiting.cancel()
        await running.aclose()

    asyncio.run(main())


def test_a_waiting_request_ends_at_its_deadline_though_the_engine_sleeps(make_async_llm):
    llm = make_async_llm("null")

    async def main():
        await llm.pause()
        params = SamplingParams(ttft_deadline_ms=20, priority="interactive", tenant="a")
        output = await final(llm.generate([1, 2], params))
        await llm.resume()
        assert output.outputs[0].finish_reason == "error"
        assert output.metrics.queue_time_s is None
        with pytest.raises(DeadlineExceededError, match="still waited"):
            output.raise_for_error()

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
