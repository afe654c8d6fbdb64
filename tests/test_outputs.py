"""Results with several choices and log-probabilities, whole and streamed."""

import asyncio
import math

import pytest
from async_kit import collect, final

from cbrs import Logprob, SamplingParams
from cbrs.logprobs import TokenTexts

WITH_LOGPROBS = {"max_tokens": 6, "ignore_eos": True, "seed": 3, "logprobs": 2}


@pytest.fixture
def llm(make_llm, tiny):
    return make_llm(tiny)


def test_each_token_has_itself_and_the_most_likely_ones(llm):
    (output,) = llm.generate("Hello", SamplingParams(**WITH_LOGPROBS))
    completion = output.outputs[0]
    assert len(completion.logprobs) == len(completion.token_ids) == 6
    for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(entries)) == token
        assert len(entries) == (2 if entries[token].rank <= 2 else 3)
        assert {entry.rank for entry in entries.values()} >= {1, 2}
        assert all(isinstance(entry, Logprob) for entry in entries.values())
        assert all(entry.logprob <= 0 for entry in entries.values())
        for other, entry in entries.items():
            assert entry.decoded_token == llm.decode([other], skip_special_tokens=False)
    chosen = sum(next(iter(row.values())).logprob for row in completion.logprobs)
    assert completion.cumulative_logprob == pytest.approx(chosen, abs=1e-4)
    assert output.prompt_logprobs is None


def test_without_logprobs_there_are_none(llm):
    (output,) = llm.generate("Hello", SamplingParams(max_tokens=3))
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_logprobs_0_gives_the_chosen_token_alone(llm):
    (output,) = llm.generate("Hello", SamplingParams(**WITH_LOGPROBS | {"logprobs": 0}))
    rows = output.outputs[0].logprobs
    assert [list(row) for row in rows] == [[token] for token in output.outputs[0].token_ids]


def test_greedy_tokens_have_rank_1(llm):
    (output,) = llm.generate("Hello", SamplingParams(**WITH_LOGPROBS, temperature=0.0))
    rows = output.outputs[0].logprobs
    assert all(next(iter(row.values())).rank == 1 for row in rows)
    assert all(len(row) == 2 for row in rows), "the chosen one is among the most likely"


def test_prompt_logprobs_have_an_entry_per_prompt_token_and_none_for_the_first(llm):
    prompt = list(range(5, 45))
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    first, second = (llm.generate([prompt], params)[0] for _ in range(2))
    assert first.prompt_logprobs[0] is None
    assert [next(iter(row)) for row in first.prompt_logprobs[1:]] == prompt[1:]
    assert len(second.prompt_logprobs) == 40, "the prefix cache takes nothing away"
    for row, same in zip(first.prompt_logprobs[1:], second.prompt_logprobs[1:], strict=True):
        assert row.keys() == same.keys()
        assert all(row[key].logprob == pytest.approx(same[key].logprob, abs=1e-4) for key in row)
    total = sum(math.exp(entry.logprob) for entry in first.prompt_logprobs[5].values())
    assert 0 < total <= 1 + 1e-6


def test_streamed_choices_and_logprobs_are_those_of_the_whole_result(llm, make_async_llm, tiny):
    parameters = WITH_LOGPROBS | {"n": 3, "prompt_logprobs": 1}
    (whole,) = llm.generate("Hello", SamplingParams(**parameters))
    streaming = make_async_llm(tiny)

    async def main():
        stream = streaming.generate("Hello", SamplingParams(**parameters, output_kind="delta"))
        return await collect(stream), await final(
            streaming.generate("Hello", SamplingParams(**parameters))
        )

    deltas, cumulative = asyncio.run(main())
    assert [completion.index for completion in cumulative.outputs] == [0, 1, 2]
    assert [delta.prompt_logprobs is None for delta in deltas] == [False] + [True] * (
        len(deltas) - 1
    )
    joined = [{"token_ids": [], "text": "", "logprobs": []} for _ in range(3)]
    for delta in deltas:
        assert len({completion.index for completion in delta.outputs}) == len(delta.outputs)
        for completion in delta.outputs:
            choice = joined[completion.index]
            choice["token_ids"] += completion.token_ids
            choice["text"] += completion.text
            choice["logprobs"] += completion.logprobs or []
            choice["last"] = completion
    for expected, last, choice in zip(whole.outputs, cumulative.outputs, joined, strict=True):
        assert choice["token_ids"] == last.token_ids == expected.token_ids
        assert choice["text"] == last.text == expected.text
        assert choice["last"].finish_reason == last.finish_reason == expected.finish_reason
        assert [list(row) for row in choice["logprobs"]] == [list(row) for row in last.logprobs]
        assert [list(row) for row in last.logprobs] == [list(row) for row in expected.logprobs]
        for output in (last, choice["last"]):
            assert output.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)
    assert deltas[0].prompt_logprobs == cumulative.prompt_logprobs
    assert len(cumulative.prompt_logprobs) == len(whole.prompt_logprobs)


def test_a_reader_of_the_end_alone_keeps_no_updates(make_async_llm, tiny):
    params = SamplingParams(**WITH_LOGPROBS | {"n": 2}, output_kind="final_only")
    llm = make_async_llm(tiny)
    queued = []

    async def main():
        stream = llm.generate("Hello", params)
        push = stream._inbox.push

        def count(update):
            push(update)
            queued.append(sum(map(len, stream._inbox._steps)))

        stream._inbox.push = count
        return await collect(stream)

    (output,) = asyncio.run(main())
    assert queued == [1] * len(queued)
    assert len(queued) > 2
    assert [len(completion.token_ids) for completion in output.outputs] == [6, 6]
    assert [len(completion.logprobs) for completion in output.outputs] == [6, 6]
    assert output.metrics.inter_token_latencies_s


def test_token_texts_are_looked_up_once(llm):
    class Counting:
        num_calls = 0

        def decode(self, ids, skip_special_tokens):
            self.num_calls += 1
            return llm.tokenizer.decode(ids, skip_special_tokens)

    tokenizer = Counting()
    texts = TokenTexts(tokenizer)
    assert [texts[token] for token in (0, 5, 0, 5)] == ["<s>", texts[5], "<s>", texts[5]]
    assert tokenizer.num_calls == 2
    assert TokenTexts(None)[7] is None
