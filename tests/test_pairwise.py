"""All sampling parameters against each other and against the engine's modes.

About 500 combinations in which every pair of values occurs. None may kill the engine or be answered
wrongly: a combination that contradicts itself is refused naming a parameter, every other one has an
answer that obeys all its parameters at once.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import kit
import pytest
from asked import assert_same_answer
from async_kit import collect
from pairwise import covering, pairs_of

from cbrs import SamplingParams
from cbrs.errors import InvalidRequestError

BAD_ID = 40
"""A token of one letter, whose text is a bad word."""

PROMPTS = {
    "short": [5, 6, 7],
    "one token": [9],
    "long": [2 + (7 * i) % 290 for i in range(70)],
    "repetitive": [BAD_ID] * 12,
}

VALUES: dict[str, list[Any]] = {
    "n": [1, 2, 3],
    "max_tokens": [1, 4, 9],
    "min_tokens": [0, 1, 5],
    "temperature": [0.0, 0.7, 2.0],
    "top_k": [0, 1, 5],
    "top_p": [1.0, 0.3],
    "min_p": [0.0, 0.2],
    "seed": [None, 0, -3],
    "presence_penalty": [0.0, 1.5, -2.0],
    "frequency_penalty": [0.0, 2.0, -0.5],
    "repetition_penalty": [1.0, 1.8, 0.6],
    "logit_bias": [None, {77: 100.0, 78: -100.0}, {1: 3.0}],
    "bad_words": [None, ["&", "hello"]],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 3],
    "stop": [None, "e", ["th", "é"]],
    "include_stop_str_in_output": [False, True],
    "stop_token_ids": [None, [77, 50]],
    "ignore_eos": [False, True],
    "skip_special_tokens": [True, False],
    "detokenize": [True, False],
    "truncate_prompt_tokens": [None, 2, -1],
    "tenant": [None, "somebody"],
    "cache_salt": [None, "salt"],
    "priority": [None, "interactive", "batch"],
    # So late that they never pass; what an earlier one does is tested elsewhere.
    "ttft_deadline_ms": [None, 1e8],
    "deadline_ms": [None, 1e8],
    "target_itl_ms": [None, 0.5, 1e6],
    "output_kind": ["cumulative", "delta", "final_only"],
}
"""Of every parameter: its default and values that matter."""

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 24, "max_prefill_chunk_tokens": 5},
    "no cache": {"enable_prefix_caching": False},
    "static": {"policy": "static", "max_num_seqs": 4},
    "tight": {"num_blocks": 24, "block_size": 4, "max_num_seqs": 6},
}

NUM_COMBINATIONS = 500

DIMENSIONS = {**VALUES, "mode": list(MODES), "prompt": list(PROMPTS)}


@pytest.fixture(scope="module")
def combinations() -> list[dict[str, Any]]:
    return covering(DIMENSIONS, NUM_COMBINATIONS, seed=20)


def is_contradiction(asked: Mapping[str, Any]) -> bool:
    """Whether the parameters cannot hold together: a refusal is the right answer."""
    return asked["min_tokens"] > asked["max_tokens"] or (
        asked["stop"] is not None and not asked["detokenize"]
    )


def test_every_parameter_takes_part() -> None:
    assert set(VALUES) == {field.name for field in fields(SamplingParams)}


def test_every_pair_of_values_occurs(combinations: list[dict[str, Any]]) -> None:
    covered = set()
    for asked in combinations:
        covered |= pairs_of({name: DIMENSIONS[name].index(value) for name, value in asked.items()})
    sizes = [len(values) for values in DIMENSIONS.values()]
    wanted = (sum(sizes) ** 2 - sum(size**2 for size in sizes)) // 2
    assert len(covered) == wanted


@pytest.mark.parametrize("mode", MODES)
def test_combinations_are_obeyed_or_refused(
    mode: str,
    combinations: list[dict[str, Any]],
    make_llm: Callable[..., Any],
    make_async_llm: Callable[..., Any],
    tiny: Path,
) -> None:
    """By `LLM`, and streamed by `AsyncLLM`, with the same answers wherever chance has no part."""
    chosen = [asked for asked in combinations if asked["mode"] == mode]
    refused = [asked_of(asked) for asked in chosen if is_contradiction(asked)]
    accepted = [asked_of(asked) for asked in chosen if not is_contradiction(asked)]
    assert len(accepted) > 30
    assert {params.output_kind for _, params in accepted} == set(VALUES["output_kind"])
    llm, streaming = make_llm(tiny, **MODES[mode]), make_async_llm(tiny, **MODES[mode])
    for prompt, params in refused:
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate([prompt], params, use_tqdm=False)
        assert caught.value.param in ("min_tokens", "stop")

    async def stream_all() -> list[list[Any]]:
        for prompt, params in refused:
            with pytest.raises(InvalidRequestError) as caught:
                await anext(streaming.generate(prompt, params))
            assert caught.value.param in ("min_tokens", "stop")
        streams = [streaming.generate(prompt, params) for prompt, params in accepted]
        return await asyncio.gather(*map(collect, streams))

    answers = llm.generate(*map(list, zip(*accepted, strict=True)), use_tqdm=False)
    streamed = asyncio.run(stream_all())
    num_compared = 0
    for (prompt, params), answer, outputs in zip(accepted, answers, streamed, strict=True):
        check_answer(llm.tokenizer, prompt, params, answer)
        check_stream(params, outputs)
        merged = joined(outputs) if params.output_kind == "delta" else outputs[-1]
        check_answer(llm.tokenizer, prompt, params, merged)
        if is_greedy(params) or params.seed is not None:
            assert_same_answer(merged, answer)
            num_compared += 1
    assert num_compared > 20


def asked_of(asked: Mapping[str, Any]) -> tuple[list[int], SamplingParams]:
    """The prompt and the parameters of a combination."""
    return PROMPTS[asked["prompt"]], SamplingParams(**{name: asked[name] for name in VALUES})


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0.0 or params.top_k == 1


def check_stream(params: SamplingParams, outputs: list[Any]) -> None:
    """Hold the outputs of a stream to its kind; what they add up to, `check_answer` checks."""
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if params.output_kind == "final_only":
        assert len(outputs) == 1
    elif params.output_kind == "delta":
        for output in outputs:
            assert output.outputs
            for piece in output.outputs:
                # The text of a token may be held back, and what was held back come without one.
                assert piece.token_ids or piece.text or piece.finish_reason
        assert all(output.prompt_logprobs is None for output in outputs[1:])
    else:
        for before, after in pairwise(outputs):
            for old, new in zip(before.outputs, after.outputs, strict=True):
                assert new.token_ids[: len(old.token_ids)] == old.token_ids
                assert new.text.startswith(old.text)
                assert (new.logprobs or [])[: len(old.logprobs or [])] == (old.logprobs or [])
                assert old.finish_reason in (None, new.finish_reason)


def joined(deltas: list[Any]) -> Any:
    """The answer that deltas add up to."""
    pieces: dict[int, list[Any]] = {}
    for delta in deltas:
        for piece in delta.outputs:
            pieces.setdefault(piece.index, []).append(piece)
    choices = []
    for index in sorted(pieces):
        every = pieces[index]
        assert [piece.finish_reason is None for piece in every[:-1]] == [True] * (len(every) - 1)
        rows = [row for piece in every for row in piece.logprobs or []]
        choices.append(
            replace(
                every[-1],
                text="".join(piece.text for piece in every),
                token_ids=[token for piece in every for token in piece.token_ids],
                logprobs=rows if any(piece.logprobs is not None for piece in every) else None,
            )
        )
    return replace(deltas[-1], outputs=choices, prompt_logprobs=deltas[0].prompt_logprobs)


def check_answer(tokenizer: Any, prompt: list[int], params: SamplingParams, output: Any) -> None:
    """Hold one answer to every one of its parameters."""
    assert output.error is None, (params, output)
    kept = params.truncate_prompt_tokens
    expected_prompt = prompt[-kept:] if kept is not None and kept > 0 else prompt
    assert output.prompt_token_ids == expected_prompt
    check_prompt_logprobs(params, output)
    assert [choice.index for choice in output.outputs] == list(range(params.n))
    for choice in output.outputs:
        check_choice(tokenizer, params, choice)
    if is_greedy(params):
        assert len({tuple(choice.token_ids) for choice in output.outputs}) == 1


def check_choice(tokenizer: Any, params: SamplingParams, choice: Any) -> None:
    ids = choice.token_ids
    assert 1 <= len(ids) <= params.max_tokens
    assert all(0 <= token < kit.NUM_TOKENS for token in ids)
    assert len(ids) >= params.min_tokens
    ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else {kit.EOS})
    assert not ends & set(ids[: max(params.min_tokens, len(ids) - 1)])
    if params.bad_words:
        assert BAD_ID not in ids
    if params.logit_bias and 78 in params.logit_bias and params.repetition_penalty == 1.0:
        assert 78 not in ids
    check_end(params, choice, ends)
    check_text(tokenizer, params, choice)
    check_logprobs(params, choice)


def check_end(params: SamplingParams, choice: Any, ends: set[int]) -> None:
    last = choice.token_ids[-1]
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    if choice.finish_reason == "length":
        assert len(choice.token_ids) == params.max_tokens
        assert choice.stop_reason is None
    else:
        assert choice.finish_reason == "stop"
        if isinstance(choice.stop_reason, str):
            assert choice.stop_reason in stops
            assert choice.text.endswith(choice.stop_reason) or not params.include_stop_str_in_output
        else:
            assert last in ends
            assert choice.stop_reason == (None if last == kit.EOS else last)


def check_text(tokenizer: Any, params: SamplingParams, choice: Any) -> None:
    if not params.detokenize:
        assert choice.text == ""
        return
    is_id_end = choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str)
    shown = choice.token_ids[:-1] if is_id_end else choice.token_ids
    whole = tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
    if isinstance(choice.stop_reason, str):
        assert whole.startswith(choice.text)
        cut = len(choice.text)
        if not params.include_stop_str_in_output:
            assert whole[cut:].startswith(choice.stop_reason)
        return
    assert choice.text == whole


def check_logprobs(params: SamplingParams, choice: Any) -> None:
    if params.logprobs is None:
        assert choice.logprobs is None
        assert choice.cumulative_logprob is None
        return
    assert len(choice.logprobs) == len(choice.token_ids)
    total = 0.0
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        check_entry(entry, token, params.logprobs)
        total += entry[token].logprob
    assert choice.cumulative_logprob == pytest.approx(total, abs=1e-4)


def check_prompt_logprobs(params: SamplingParams, output: Any) -> None:
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    rest = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    for token, entry in rest:
        check_entry(entry, token, params.prompt_logprobs)


def check_entry(entry: Mapping[int, Any], token: int, count: int) -> None:
    """The token itself and the `count` most likely ids, by rank."""
    assert next(iter(entry)) == token
    assert len(entry) in (count, count + 1) if count else len(entry) == 1
    assert all(-9999.0 <= item.logprob <= 0.0 for item in entry.values())
    best = sorted(entry.values(), key=lambda item: item.rank)
    assert [item.logprob for item in best] == sorted((i.logprob for i in best), reverse=True)
    assert {item.rank for item in best} >= set(range(1, count + 1))
