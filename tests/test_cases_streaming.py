"""Faults that other engines had, seen through `AsyncLLM`; each test is named after its report."""

import asyncio
import random

import kit
import pytest
from async_kit import GREEDY, collect, final, is_idle, live_ids, started, until

from cbrs import SamplingParams


def byte_ids(text):
    return [2 + byte for byte in text.encode()]


def deltas(**parameters):
    defaults = {"temperature": 0.0, "max_tokens": 64, "output_kind": "delta"}
    return SamplingParams(**(defaults | parameters))


@pytest.fixture
def spell(make_llm, make_async_llm, tmp_path):
    """Answers `<s>` with the characters of a text, one token each; returns stream and result."""

    def run(text, **parameters):
        ids = [kit.BOS, *byte_ids(text)]
        assert len(set(ids)) == len(ids), "each byte can be emitted once"
        folder = kit.chain(tmp_path / "chain", dict(zip(ids, [*ids[1:], kit.EOS], strict=True)))
        llm = make_async_llm(folder)
        outputs = asyncio.run(collect(llm.generate([kit.BOS], deltas(**parameters))))
        (whole,) = make_llm(folder).generate([[kit.BOS]], deltas(**parameters))
        return [output.outputs[0] for output in outputs], whole.outputs[0]

    return run


def test_c03_the_first_event_of_a_chunked_prompt_brings_a_token(make_async_llm, tiny):
    llm = make_async_llm(tiny, max_prefill_chunk_tokens=16)
    prompt = [1 + number for number in range(80)]
    outputs = asyncio.run(collect(llm.generate(prompt, deltas(max_tokens=5, ignore_eos=True))))
    assert llm.stats()["num_steps"] == 5 + 4
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1] * 5
    assert all(output.outputs[0].token_ids[0] >= 0 for output in outputs)
    first = outputs[0].metrics
    assert first.time_to_first_token_s == first.total_time_s > first.queue_time_s


def test_e06_a_cancel_that_races_with_the_stop_token_gives_one_end(make_async_llm):
    race_cancel_against_stop(make_async_llm("null", max_num_seqs=4), 500)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_e06_a_cancel_that_races_with_the_stop_token_gives_one_end_10000(make_async_llm):
    race_cancel_against_stop(make_async_llm("null", max_num_seqs=4), 10_000)


def race_cancel_against_stop(llm, count):
    stop_id = llm.encode(" The quick brown fox")[3]
    params = deltas(stop_token_ids=[stop_id])
    choose = random.Random(4)
    seen = set()

    async def one(number):
        stream = llm.generate([1 + number % 4], params, "x" + str(number % 4))
        num_before = choose.randrange(4)
        reasons = []
        async for output in stream:
            reasons += [output.outputs[0].finish_reason] if output.finished else []
            if output.metrics and len(reasons) == 0 and (num_before := num_before - 1) == 0:
                llm.cancel(stream.request_id)
        assert len(reasons) == 1
        assert reasons[0] in ("stop", "cancelled")
        seen.add(reasons[0])

    async def main():
        for start in range(0, count, 4):
            await asyncio.gather(*(one(start + offset) for offset in range(4)))

    asyncio.run(main())
    assert seen == {"stop", "cancelled"}, "both outcomes occurred"
    stats = llm.stats()
    assert stats["num_stop_requests"] + stats["num_cancelled_requests"] == count
    assert live_ids(llm) == 0


def test_e07_a_failure_whose_receiver_has_gone_hurts_nobody(make_async_llm, tiny, monkeypatch):
    llm = make_async_llm(tiny)
    kept = list(range(1, 50))
    runner = llm.engine._runner
    forward = runner.forward
    failures = []

    async def main():
        expected = await final(llm.generate(kept, GREEDY))
        num_cached = llm.stats()["num_cached_blocks"]
        dropped = await started(llm.generate([200, 201], deltas(max_tokens=400, ignore_eos=True)))
        loop = asyncio.get_running_loop()
        is_failing = asyncio.Event()

        def fail_once(batch):
            if not failures:
                failures.append(batch.step_id)
                # The receiver goes while the step that is about to fail runs.
                asyncio.run_coroutine_threadsafe(dropped.aclose(), loop).result()
                loop.call_soon_threadsafe(is_failing.set)
                raise RuntimeError("once")
            return forward(batch)

        monkeypatch.setattr(runner, "forward", fail_once)
        await is_failing.wait()
        again = await final(llm.generate(kept, GREEDY))
        assert again.outputs == expected.outputs
        assert again.num_cached_tokens == 48, "the cache was not flushed"
        assert llm.stats()["num_cached_blocks"] >= num_cached
        await until(lambda: is_idle(llm))

    asyncio.run(main())
    assert len(failures) == 1
    assert llm.stats()["num_error_requests"] == 1


def test_e19_two_rounds_on_one_engine_both_give_their_results_in_order(make_async_llm, tiny):
    llm = make_async_llm(tiny)
    prompts = [[10 * number, 10 * number + 1] for number in range(1, 6)]

    async def results(given):
        streams = [llm.generate(prompt, GREEDY) for prompt in given]
        return await asyncio.gather(*map(final, streams))

    async def main():
        return await results(prompts), await results(prompts[::-1])

    first, second = asyncio.run(main())
    assert [output.prompt_token_ids for output in first] == prompts
    assert [output.outputs for output in second] == [output.outputs for output in first][::-1]


def test_f01_nothing_of_a_stop_string_is_streamed(spell):
    streamed, whole = spell("ABCDEFGH", stop="DEFG")
    assert "".join(delta.text for delta in streamed) == whole.text == "ABC"
    assert streamed[-1].finish_reason == "stop"
    assert streamed[-1].stop_reason == "DEFG"
    texts = ["".join(delta.text for delta in streamed[:count]) for count in range(len(streamed))]
    assert all("ABC".startswith(text) for text in texts), "not even its beginning"


def test_f01_what_only_began_like_a_stop_string_is_streamed_after_all(spell):
    streamed, whole = spell("ABCDEFGH", stop="DEFX")
    assert "".join(delta.text for delta in streamed) == whole.text == "ABCDEFGH"


def test_f08_every_token_of_plain_text_brings_its_character_at_once(spell):
    text = "".join(map(chr, range(0x30, 0x30 + 50)))
    streamed, whole = spell(text)
    # The end token comes last and has no text.
    assert [delta.text for delta in streamed] == [*text, ""]
    assert whole.text == text
