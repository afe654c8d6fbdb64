"""Every sampling parameter changes something: none is accepted and ignored.

Each test shows the effect of one parameter and is named after it; the first test holds the list of
tests against the fields of `SamplingParams`.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import kit
import pytest
from scheduler_kit import make_scheduler

from cbrs import LLM, AsyncLLM, SamplingParams, StepResult

PROMPT = [11, 60, 7, 132, 90, 45, 201, 18]

Generate = Callable[..., Any]


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, dtype="float32", num_threads=1, max_model_len=512, num_blocks=256) as llm:
        yield llm


@pytest.fixture
def generate(llm: LLM) -> Generate:
    """Answer `PROMPT` greedily, 10 tokens long unless told otherwise."""

    def run(prompt: Any = PROMPT, **arguments: Any) -> Any:
        defaults = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
        params = SamplingParams(**{**defaults, **arguments})
        return llm.generate([prompt], params, use_tqdm=False)[0]

    return run


def ids(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def draws(generate: Generate, count: int = 24, **arguments: Any) -> list[list[int]]:
    return [ids(generate(temperature=1.5, seed=seed, **arguments)) for seed in range(count)]


def test_every_field_has_a_test_of_its_effect() -> None:
    tested = {name.removeprefix("test_effect_of_") for name in globals() if "effect_of" in name}
    assert tested == {field.name for field in fields(SamplingParams)}


def test_effect_of_n(generate: Generate) -> None:
    outputs = generate(n=3, temperature=1.5, seed=1).outputs
    assert [output.index for output in outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in outputs}) == 3


def test_effect_of_max_tokens(generate: Generate) -> None:
    assert [len(ids(generate(max_tokens=count))) for count in (1, 3, 10)] == [1, 3, 10]


def test_effect_of_min_tokens(generate: Generate) -> None:
    second = ids(generate())[1]
    assert len(ids(generate(stop_token_ids=[second]))) <= 2
    longer = ids(generate(stop_token_ids=[second], min_tokens=5))
    assert len(longer) >= 5
    assert second not in longer[:5]


def test_effect_of_temperature(generate: Generate) -> None:
    cold = {tuple(ids(generate(temperature=0.05, seed=seed))) for seed in range(12)}
    hot = {tuple(ids(generate(temperature=3.0, seed=seed))) for seed in range(12)}
    assert len(cold) < len(hot) == 12


def test_effect_of_top_k(generate: Generate) -> None:
    assert set(map(tuple, draws(generate, top_k=1))) == {tuple(ids(generate()))}
    first = {answer[0] for answer in draws(generate, count=60, top_k=3, max_tokens=1)}
    assert len(first) == 3


def test_effect_of_top_p(generate: Generate) -> None:
    assert set(map(tuple, draws(generate, top_p=1e-6))) == {tuple(ids(generate()))}


def test_effect_of_min_p(generate: Generate) -> None:
    assert set(map(tuple, draws(generate, min_p=1.0))) == {tuple(ids(generate()))}


def test_effect_of_seed(generate: Generate) -> None:
    same = [ids(generate(temperature=1.5, seed=4)) for _ in range(3)]
    assert same[0] == same[1] == same[2]
    assert ids(generate(temperature=1.5, seed=5)) != same[0]
    assert len({tuple(ids(generate(temperature=1.5))) for _ in range(3)}) == 3


def test_effect_of_presence_penalty(generate: Generate) -> None:
    bias = {50: 30.0, 51: 29.5, 52: 29.0, 53: 28.5}
    assert ids(generate(logit_bias=bias, max_tokens=4)) == [50] * 4
    found = ids(generate(logit_bias=bias, presence_penalty=2.0, max_tokens=8))
    assert set(found[:4]) == {50, 51, 52, 53}, "each costs 2 once it was there"


def test_effect_of_frequency_penalty(generate: Generate) -> None:
    bias = {50: 34.0, 51: 28.0}
    found = ids(generate(logit_bias=bias, frequency_penalty=2.0, max_tokens=10))
    assert Counter(found)[51] > 0
    assert found[0] == 50, "the more often a token came, the more it costs"
    assert ids(generate(logit_bias=bias, presence_penalty=2.0, max_tokens=10)) == [50] * 10


def test_effect_of_repetition_penalty(generate: Generate) -> None:
    bias = {50: 30.0, 51: 29.0}
    assert ids(generate(logit_bias=bias, max_tokens=3)) == [50] * 3
    assert ids(generate(logit_bias=bias, repetition_penalty=1.5, max_tokens=2)) == [50, 51]
    in_prompt = generate([*PROMPT, 50], logit_bias=bias, repetition_penalty=1.5, max_tokens=1)
    assert ids(in_prompt) == [51]


def test_effect_of_logit_bias(generate: Generate) -> None:
    assert ids(generate(logit_bias={77: 100.0})) == [77] * 10
    first = ids(generate())[0]
    assert first not in ids(generate(logit_bias={first: -100.0}))


def test_effect_of_bad_words(generate: Generate, llm: LLM) -> None:
    assert llm.decode(ids(generate(logit_bias={40: 100.0}))) == "&" * 10
    assert "&" not in generate(logit_bias={40: 100.0}, bad_words=["&"]).outputs[0].text
    twice = generate(logit_bias={40: 100.0}, bad_words=["&&"]).outputs[0].text
    assert "&" in twice
    assert "&&" not in twice


def test_effect_of_logprobs(generate: Generate) -> None:
    assert generate().outputs[0].logprobs is None
    entries = generate(logprobs=3).outputs[0].logprobs
    assert [len(entry) for entry in entries] == [3] * 10, "the greedy token is the best of the 3"
    assert [len(entry) for entry in generate(logprobs=0).outputs[0].logprobs] == [1] * 10


def test_effect_of_prompt_logprobs(generate: Generate) -> None:
    assert generate().prompt_logprobs is None
    found = generate(prompt_logprobs=2).prompt_logprobs
    assert found[0] is None
    assert [next(iter(entry)) for entry in found[1:]] == PROMPT[1:]
    assert all(len(entry) in (2, 3) for entry in found[1:])


def letters(llm: LLM, text: str) -> dict[int, float]:
    """A bias towards the letters of `text`, from the first on."""
    return {token: 60.0 - place for place, token in enumerate(llm.encode(text))}


def test_effect_of_stop(generate: Generate, llm: LLM) -> None:
    bias = letters(llm, "xy")
    repeated = generate(logit_bias=bias, frequency_penalty=2.0)
    assert "y" in repeated.outputs[0].text
    stopped = generate(logit_bias=bias, frequency_penalty=2.0, stop="y").outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "y")
    assert "y" not in stopped.text


def test_effect_of_include_stop_str_in_output(generate: Generate, llm: LLM) -> None:
    common = {"logit_bias": letters(llm, "xy"), "frequency_penalty": 2.0, "stop": ["y"]}
    without = generate(**common).outputs[0]
    included = generate(**common, include_stop_str_in_output=True).outputs[0]
    assert included.text == without.text + "y"


def test_effect_of_stop_token_ids(generate: Generate) -> None:
    third = ids(generate())[2]
    output = generate(stop_token_ids=[third]).outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", third)
    assert output.token_ids[-1] == third


def test_effect_of_ignore_eos(generate: Generate) -> None:
    bias = {kit.EOS: 100.0}
    assert ids(generate(logit_bias=bias, ignore_eos=False)) == [kit.EOS]
    assert ids(generate(logit_bias=bias)) == [kit.EOS] * 10


def test_effect_of_skip_special_tokens(generate: Generate) -> None:
    bias = {kit.EOS: 100.0}
    assert generate(logit_bias=bias).outputs[0].text == ""
    shown = generate(logit_bias=bias, skip_special_tokens=False).outputs[0].text
    assert shown == "</s>" * 10


def test_effect_of_detokenize(generate: Generate) -> None:
    assert generate().outputs[0].text != ""
    silent = generate(detokenize=False).outputs[0]
    assert (silent.text, len(silent.token_ids)) == ("", 10)


def test_effect_of_truncate_prompt_tokens(generate: Generate) -> None:
    assert generate(truncate_prompt_tokens=3).prompt_token_ids == PROMPT[-3:]
    assert ids(generate(truncate_prompt_tokens=3)) == ids(generate(PROMPT[-3:]))
    too_long = generate([5] * 600, truncate_prompt_tokens=-1)
    assert len(too_long.prompt_token_ids) == 502, "512 less the 10 tokens of the output"


def test_effect_of_tenant(generate: Generate, llm: LLM) -> None:
    cached(generate, llm, "tenant")


def test_effect_of_cache_salt(generate: Generate, llm: LLM) -> None:
    cached(generate, llm, "cache_salt")


def cached(generate: Generate, llm: LLM, name: str) -> None:
    """Prompts share cached blocks with the same value of parameter `name` only."""
    llm.reset_prefix_cache()
    prompt = PROMPT * 6
    hits = [
        generate(prompt, **{name: value}).num_cached_tokens for value in (None, None, "a", "a", "b")
    ]
    assert hits == [0, 32, 0, 32, 0]


@pytest.fixture
def slow() -> Iterator[LLM]:
    """One request at a time, 10 ms a token."""
    with LLM("null:0.01", max_num_seqs=1, max_model_len=4096) as llm:
        yield llm


def test_effect_of_priority(slow: LLM) -> None:
    params = [SamplingParams(max_tokens=3, priority=name) for name in ("batch", "interactive")]
    late, first = slow.generate([PROMPT, PROMPT], params, use_tqdm=False)
    assert first.metrics.queue_time_s < late.metrics.queue_time_s


def test_effect_of_ttft_deadline_ms(slow: LLM) -> None:
    params = [
        SamplingParams(max_tokens=30, priority="interactive"),
        SamplingParams(max_tokens=30, ttft_deadline_ms=100),
    ]
    running, waiting = slow.generate([PROMPT, PROMPT], params, use_tqdm=False)
    assert running.error is None
    assert "still waited" in waiting.error
    assert ids(waiting) == []


def test_effect_of_deadline_ms(slow: LLM) -> None:
    params = SamplingParams(deadline_ms=200)
    (output,) = slow.generate([PROMPT], params, use_tqdm=False)
    assert "still ran" in output.error
    assert 1 <= len(ids(output)) < 1000


def test_effect_of_target_itl_ms() -> None:
    """A step takes 5 ms and 0.1 ms a token: a target leaves less of it to other prompts."""

    def longest_chunk(**parameters: Any) -> int:
        limits = {"max_num_batched_tokens": 256, "max_model_len": 2048, "num_blocks": 1024}
        scheduler = make_scheduler(clock="manual", policy="fair", **limits)
        arguments = SamplingParams(max_tokens=300, **parameters).to_submit_arguments()
        scheduler.submit([1] * 5, **arguments)
        batch, longest = scheduler.step(), 0
        for step in range(200):
            if step < 150 and step % 3 == 0:
                scheduler.submit([step % 90 + 1] * (5 + step), max_tokens=1)
            if step == 180:
                scheduler.submit([9] * 1000, max_tokens=1)
            tokens = [7] * len(batch.sample_index)
            time_ns = 5_000_000 + 100_000 * batch.num_tokens
            batch = scheduler.step(StepResult(batch.step_id, tokens, step_time_ns=time_ns))
            longest = max(longest, batch.max_query_len) if step >= 180 else 0
        return longest

    assert longest_chunk() == 255
    assert 50 <= longest_chunk(target_itl_ms=15) <= 100


def test_effect_of_output_kind(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def collect() -> dict[str, list[list[int]]]:
        found: dict[str, list[list[int]]] = {}
        async with AsyncLLM(tiny, dtype="float32", num_threads=1, max_model_len=512) as llm:
            runner, has_read = llm.engine._runner, threading.Event()
            forward = runner.forward

            def forward_after_a_read(batch: Any) -> Any:
                # A reader that is late finds several tokens in one output, or all of them.
                if batch.num_decodes > 0:
                    assert has_read.wait(60.0)
                return forward(batch)

            monkeypatch.setattr(runner, "forward", forward_after_a_read)
            for kind in ("cumulative", "delta", "final_only"):
                params = SamplingParams(temperature=0.0, max_tokens=6, output_kind=kind)
                found[kind] = []
                if kind == "final_only":
                    has_read.set()
                else:
                    has_read.clear()
                async for output in llm.generate(PROMPT, params):
                    found[kind].append(list(output.outputs[0].token_ids))
                    has_read.set()
        return found

    found = asyncio.run(collect())
    final = found["final_only"]
    assert len(final) == 1
    assert found["cumulative"][-1] == final[0]
    assert [token for delta in found["delta"] for token in delta] == final[0]
    assert len(found["cumulative"][0]) < len(final[0])
