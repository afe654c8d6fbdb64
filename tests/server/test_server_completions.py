"""`/v1/completions` says what the engine says offline."""

import asyncio
from typing import Any

import pytest
from server_kit import Client

from cbrs import AsyncLLM, SamplingParams

PATH = "/v1/completions"
PROMPT = "One, two, three"


def offline(llm: AsyncLLM, prompt: str | list[int], **params: Any) -> Any:
    """What the engine says without the server."""

    async def generate() -> Any:
        async for output in llm.generate(prompt, SamplingParams(**params)):
            last = output
        return last

    return asyncio.run(generate())


def test_a_completion_is_the_offline_text(client: Client, llm: AsyncLLM) -> None:
    expected = offline(llm, PROMPT, max_tokens=12)
    answer = client.complete(prompt=PROMPT, max_tokens=12)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "null"
    assert answer["id"].startswith("cmpl-")
    assert answer["created"] > 1_600_000_000
    assert answer["choices"] == [
        {
            "index": 0,
            "text": expected.outputs[0].text,
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    num_prompt_tokens = len(expected.prompt_token_ids)
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] <= num_prompt_tokens
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt_tokens, 12)
    assert usage["total_tokens"] == num_prompt_tokens + 12


def test_streamed_pieces_concatenate_to_the_offline_text(client: Client, llm: AsyncLLM) -> None:
    expected = offline(llm, PROMPT, max_tokens=40)
    chunks = client.chunks(PATH, prompt=PROMPT, max_tokens=40)
    assert len(chunks) == 40, "each token is an event of its own"
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(pieces) == expected.outputs[0].text
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * 39 + ["length"]
    assert not any("usage" in chunk for chunk in chunks)


def test_the_usage_comes_in_a_chunk_of_its_own(client: Client) -> None:
    options = {"include_usage": True}
    chunks = client.chunks(PATH, prompt=PROMPT, max_tokens=3, stream_options=options)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 3
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_an_absent_max_tokens_is_what_fits(client: Client) -> None:
    answer = client.complete(prompt=[1] * 500)
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_never_leaks(client: Client, llm: AsyncLLM, stream: bool) -> None:
    whole = offline(llm, PROMPT, max_tokens=60).outputs[0].text
    stop = " fox jumps"
    assert stop in whole
    body = {"prompt": PROMPT, "max_tokens": 60, "stop": ["nowhere", stop]}
    if stream:
        chunks = client.chunks(PATH, **body)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert [reason for reason in reasons if reason] == ["stop"]
    else:
        choice = client.complete(**body)["choices"][0]
        text = choice["text"]
        assert choice["finish_reason"] == "stop"
    assert text == whole[: whole.index(stop)]


def test_several_prompts_and_choices_are_numbered_in_order(client: Client) -> None:
    prompts = ["One", "Two", "Three"]
    answer = client.complete(prompt=prompts, n=2, max_tokens=5, echo=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    starts = [prompt for prompt in prompts for _ in range(2)]
    assert all(
        choice["text"].startswith(start)
        for choice, start in zip(answer["choices"], starts, strict=True)
    )
    assert answer["usage"]["completion_tokens"] == 30
    chunks = client.chunks(PATH, prompt=prompts, n=2, max_tokens=5, echo=True)
    texts = [""] * 6
    ends = [0] * 6
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] is not None
    assert texts == [choice["text"] for choice in answer["choices"]]
    assert ends == [1] * 6


def test_token_ids_go_in_and_come_out(client: Client, llm: AsyncLLM) -> None:
    ids = llm.encode(PROMPT)
    expected = offline(llm, ids, max_tokens=4)
    answer = client.complete(prompt=ids, max_tokens=4, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == ids
    assert answer["choices"][0]["token_ids"] == list(expected.outputs[0].token_ids)
    lists = client.complete(prompt=[ids, ids[:2]], max_tokens=1, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in lists["choices"]] == [ids, ids[:2]]
    chunks = client.chunks(PATH, prompt=ids, max_tokens=4, return_token_ids=True)
    assert "prompt_token_ids" in chunks[0]["choices"][0]
    assert not any("prompt_token_ids" in chunk["choices"][0] for chunk in chunks[1:])
    joined = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert joined == answer["choices"][0]["token_ids"]


def test_logprobs_are_parallel_arrays(client: Client) -> None:
    answer = client.complete(prompt=PROMPT, max_tokens=6, logprobs=2)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert {name: len(array) for name, array in logprobs.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 6
    )
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"] == [0.0] * 6, "the null model is certain"
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    chunks = client.chunks(PATH, prompt=PROMPT, max_tokens=6, logprobs=2)
    for name, array in logprobs.items():
        parts = [chunk["choices"][0]["logprobs"][name] for chunk in chunks]
        assert [item for part in parts for item in part] == array


def test_an_echo_with_logprobs_begins_with_the_prompt(client: Client, llm: AsyncLLM) -> None:
    num_prompt_tokens = len(llm.encode(PROMPT))
    answer = client.complete(prompt=PROMPT, max_tokens=3, echo=True, logprobs=1)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert len(logprobs["tokens"]) == num_prompt_tokens + 3
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    values = logprobs["token_logprobs"][1:]
    assert all(isinstance(value, int | float) and -9999.0 <= value <= 0.0 for value in values)
    assert "prompt_logprobs" not in choice


def test_prompt_logprobs_have_a_row_for_each_token(client: Client, llm: AsyncLLM) -> None:
    ids = llm.encode(PROMPT)
    choice = client.complete(prompt=ids, max_tokens=1, prompt_logprobs=0)["choices"][0]
    rows = choice["prompt_logprobs"]
    assert rows[0] is None
    assert [list(row) for row in rows[1:]] == [[str(token)] for token in ids[1:]]
    entry = next(iter(rows[1].values()))
    assert sorted(entry) == ["decoded_token", "logprob", "rank"]


def test_a_seen_prefix_is_reported_as_cached(client: Client) -> None:
    ids = list(range(100, 164))
    first = client.complete(prompt=ids, max_tokens=1, cache_salt="fresh")
    second = client.complete(prompt=ids, max_tokens=1, cache_salt="fresh")
    cached = [
        answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)
    ]
    assert cached[0] == 0
    assert 0 < cached[1] < len(ids)


def test_the_last_tokens_of_a_long_prompt_are_kept(client: Client) -> None:
    answer = client.complete(prompt=list(range(30)), max_tokens=1, truncate_prompt_tokens=5)
    assert answer["usage"]["prompt_tokens"] == 5


def test_what_has_much_to_tell_is_told_whole_and_streamed(client: Client) -> None:
    # More values than are written where connections are served.
    body = {"prompt": list(range(1, 101)), "max_tokens": 30, "n": 8, "logprobs": 5}
    whole = client.complete(**body, prompt_logprobs=20)["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in whole] == [100] * 8
    assert all(len(row) >= 20 for row in whole[0]["prompt_logprobs"][1:])
    chunks = client.chunks(PATH, **body, prompt_logprobs=20)
    for index, choice in enumerate(whole):
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, array in choice["logprobs"].items():
            assert [entry for part in parts for entry in part["logprobs"][name]] == array
    assert client.complete(prompt=PROMPT, max_tokens=1)["choices"]
