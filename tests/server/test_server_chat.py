"""`/v1/chat/completions` goes through the model's template."""

import asyncio
from typing import Any

from server_kit import MESSAGES, Client

from cbrs import AsyncLLM, SamplingParams

PATH = "/v1/chat/completions"


def offline(llm: AsyncLLM, **params: Any) -> Any:
    async def generate() -> Any:
        async for output in llm.chat(MESSAGES, SamplingParams(**params)):
            last = output
        return last

    return asyncio.run(generate())


def test_a_chat_is_the_offline_answer(client: Client, llm: AsyncLLM) -> None:
    expected = offline(llm, max_tokens=9)
    answer = client.chat(max_tokens=9, return_token_ids=True)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["prompt_token_ids"] == list(expected.prompt_token_ids)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": expected.outputs[0].text,
                "refusal": None,
            },
            "logprobs": None,
            "token_ids": list(expected.outputs[0].token_ids),
            "finish_reason": "length",
        }
    ]
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


def test_streamed_deltas_concatenate_to_the_offline_answer(client: Client, llm: AsyncLLM) -> None:
    expected = offline(llm, max_tokens=20)
    chunks = client.chunks(PATH, messages=MESSAGES, max_tokens=20)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert choices[-1]["finish_reason"] == "length"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert len(choices) == 1 + 20 + 1, "each token is an event of its own"
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == expected.outputs[0].text


def test_each_choice_has_a_beginning_and_an_end(client: Client) -> None:
    options = {"include_usage": True}
    body = {"messages": MESSAGES, "n": 3, "max_tokens": 4, "stream_options": options}
    chunks = client.chunks(PATH, **body)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for index in range(3):
        mine = [
            choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index
        ]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]


def test_logprobs_come_with_each_token(client: Client) -> None:
    answer = client.chat(max_tokens=5, logprobs=True, top_logprobs=2)
    choice = answer["choices"][0]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] == 0.0
        assert len(entry["top_logprobs"]) == 2
        assert sorted(entry["top_logprobs"][0]) == ["bytes", "logprob", "token"]
    body = {"messages": MESSAGES, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    streamed = [
        entry
        for chunk in client.chunks(PATH, **body)
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == entries


def test_a_stop_string_ends_a_chat(client: Client) -> None:
    choice = client.chat(stop=" fox", max_tokens=60)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert " fox" not in choice["message"]["content"]


def test_parts_of_text_are_joined(client: Client) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    in_parts = [{"role": "user", "content": parts}]
    in_one = [{"role": "user", "content": "one\ntwo"}]
    answers = [
        client.chat(messages=messages, max_tokens=1, return_token_ids=True)
        for messages in (in_parts, in_one)
    ]
    assert answers[0]["prompt_token_ids"] == answers[1]["prompt_token_ids"]
