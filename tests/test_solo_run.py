"""A request's answer is its own: the same alone and among any neighbours.

Each of some hundred random requests runs alone on an engine without prefix cache, whole prompt in
one step, in a large pool. Then they run together: in random order, arriving at random steps, in
chunks, with cached prefixes, in pools that are too small for them. Ids, texts and ends have to be
equal (float32), log-probabilities within 1e-4.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kit
import pytest
from asked import Asked, RequestMaker, assert_same_answer

from cbrs.logprobs import TokenTexts
from cbrs.outputs import RequestOutput

MAX_PROMPT = 96
MAX_TOKENS = 14
LARGE = {"enable_prefix_caching": False, "num_blocks": 512, "max_num_batched_tokens": 2048}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "cached": {"num_blocks": 512, "max_num_batched_tokens": 512},
    "chunks of 7": {"num_blocks": 512, "max_num_batched_tokens": 40, "max_prefill_chunk_tokens": 7},
    "no cache": {"num_blocks": 512, "max_num_batched_tokens": 24, "enable_prefix_caching": False},
    "tight": {"num_blocks": 130, "block_size": 2, "max_num_batched_tokens": 64, "max_num_seqs": 8},
    "tight, small blocks": {"num_blocks": 44, "block_size": 4, "max_num_batched_tokens": 17},
    "few rows": {"num_blocks": 64, "max_num_seqs": 2, "max_num_batched_tokens": 128},
    "static": {"num_blocks": 512, "policy": "static", "max_num_seqs": 5},
}

MakeLLM = Callable[..., Any]


def alone(make_llm: MakeLLM, model: Path, asked: Asked, **options: Any) -> RequestOutput:
    """The answer of a fresh engine that runs nothing else."""
    llm = make_llm(model, **LARGE, **options)
    (output,) = llm.generate([asked.prompt], asked.params, use_tqdm=False)
    llm.close()
    return output


def together(llm: Any, requests: Sequence[Asked], seed: int) -> list[RequestOutput]:
    """The answers of one engine to which the requests come at random steps, in random order."""
    choose = random.Random(seed)
    engine, texts = llm.engine, TokenTexts(llm.tokenizer)
    waiting = choose.sample(range(len(requests)), len(requests))
    answers: dict[int, RequestOutput] = {}
    while len(answers) < len(requests):
        for _ in range(choose.choice([0, 0, 0, 1, 2, 6])):
            if waiting:
                index = waiting.pop()
                arguments = requests[index].params.to_submit_arguments()
                engine.processor.submit(requests[index].prompt, index=index, **arguments)
        engine.step()
        for finished in engine.processor.take_finished():
            answers[finished.index] = RequestOutput.from_finished(finished, None, texts)
    return [answers[index] for index in range(len(requests))]


def check(
    make_llm: MakeLLM, model: Path, name: str, count: int, seed: int, **options: Any
) -> dict[str, int]:
    """Holds `count` random requests to their solo answers; returns the engine's statistics.

    `options` are for all engines.
    """
    maker = RequestMaker(
        seed, num_token_ids=kit.NUM_TOKENS, max_prompt=MAX_PROMPT, max_tokens=MAX_TOKENS
    )
    requests, expected = [], []
    for _ in range(count):
        asked = maker.request()
        answer = alone(make_llm, model, asked, **options)
        stop = maker.stop_in(answer.outputs[0].text) if maker.choose.random() < 0.3 else None
        if stop is not None:
            include = maker.choose.random() < 0.5
            asked = asked.but(stop=[stop, "never \x00"], include_stop_str_in_output=include)
            answer = alone(make_llm, model, asked, **options)
        requests.append(asked)
        expected.append(answer)
    llm = make_llm(model, **CONFIGURATIONS[name], **options)
    found = together(llm, requests, seed)
    for asked, own, other in zip(requests, found, expected, strict=True):
        try:
            assert_same_answer(own, other)
        except AssertionError as error:
            raise AssertionError(f"{name}: {asked}\n{own}\n{other}") from error
    return llm.stats()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_answer_is_that_of_the_request_alone(
    name: str, make_llm: MakeLLM, tiny: Path
) -> None:
    stats = check(make_llm, tiny, name, count=72, seed=len(name))
    if name.startswith("tight"):
        assert stats["num_preemptions"] > 0, "a tight pool displaces somebody"
    if name == "cached":
        assert stats["num_cached_prompt_tokens"] > 0, "heads are shared"


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("name", ["cached", "chunks of 7", "tight"])
def test_so_it_is_with_keys_values_and_weights_in_int8(
    name: str, weights: str | None, make_llm: MakeLLM, tiny: Path
) -> None:
    narrow: dict[str, Any] = {"kv_cache_dtype": "int8", "quantization": weights}
    stats = check(make_llm, tiny, name, 72, len(name), **narrow)
    if name.startswith("tight"):
        assert stats["num_preemptions"] > 0, "a tight pool displaces somebody"
    if name == "cached":
        assert stats["num_cached_prompt_tokens"] > 0, "heads are shared"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1002))
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_answer_is_that_of_the_request_alone_for_long(
    name: str, seed: int, make_llm: MakeLLM, tiny: Path
) -> None:
    check(make_llm, tiny, name, count=100, seed=seed)
