"""The official client of OpenAI gets along with the server, and all that it is sent fits."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx2
import openai
import pytest
from http_kit import address_of, fail_at_token, send
from server_kit import MESSAGES, Client, is_idle, serving, wait_until
from wire_tap import Exchange, Tap, tapped

from cbrs import AsyncLLM

SLOW = "null:0.01"
USAGE = {"include_usage": True}


@pytest.fixture(scope="module")
def tap(served: tuple[AsyncLLM, Client]) -> Iterator[Tap]:
    """A tap in front of the server that the tests of this file share."""
    with tapped(address_of(served[1])) as tap:
        yield tap


@pytest.fixture(scope="module")
def base_url(tap: Tap) -> str:
    return f"{tap.url}/v1"


@pytest.fixture
def api(base_url: str, tap: Tap) -> Iterator[openai.OpenAI]:
    """The client; what it was sent is held to the schemas afterwards."""
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as api:
        yield api
    tap.check()


@asynccontextmanager
async def async_client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as api:
        yield api


def test_completions_chats_and_models(api: openai.OpenAI) -> None:
    completion = api.completions.create(model="null", prompt="One", max_tokens=5)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 5
    chat = api.chat.completions.create(model="null", messages=MESSAGES, max_tokens=5, seed=1)
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].finish_reason == "length"
    assert [model.id for model in api.models.list()] == ["null"]
    assert api.models.retrieve("null").id == "null"


def test_choices_echo_and_logprobs(api: openai.OpenAI) -> None:
    completion = api.completions.create(
        model="null", prompt=["One", "Two"], n=2, max_tokens=3, echo=True, logprobs=2
    )
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert completion.choices[2].text.startswith("Two")
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == completion.choices[0].text
    chat = api.chat.completions.create(
        model="null", messages=MESSAGES, n=2, max_tokens=3, logprobs=True, top_logprobs=2
    )
    for choice in chat.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or []) == 3
    ids = [5, 6, 7]
    completion = api.completions.create(
        model="null", prompt=ids, max_tokens=2, extra_body={"return_token_ids": True}
    )
    assert (completion.choices[0].model_extra or {})["prompt_token_ids"] == ids


def test_a_stream_of_a_chat_is_the_whole_answer(api: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "null", "messages": MESSAGES, "max_tokens": 9}
    whole = api.chat.completions.create(**fields)
    chunks = list(api.chat.completions.create(**fields, stream=True, stream_options=USAGE))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    # The helper of the client wants an end that is no cut.
    with api.chat.completions.stream(**{**fields, "max_tokens": 60}, stop=" fox") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds[-1] == "content.done"
    assert final.choices[0].finish_reason == "stop"
    assert text.startswith(final.choices[0].message.content or "none")


def test_a_stream_of_a_completion_is_the_whole_answer(api: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "null", "prompt": ["One", "Two"], "n": 2, "max_tokens": 9}
    whole = api.completions.create(**fields)
    texts = [""] * 4
    for chunk in api.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_many_streams_of_the_async_client_at_once(base_url: str, api: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "null", "messages": MESSAGES, "max_tokens": 12}
    expected = api.chat.completions.create(**fields).choices[0].message.content

    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(**fields, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run() -> list[str]:
        async with async_client(base_url) as client:
            chat = await client.chat.completions.create(**fields)
            assert chat.choices[0].message.content == expected
            return await asyncio.gather(*(one(client) for _ in range(24)))

    assert asyncio.run(run()) == [expected] * 24


def test_the_name_of_a_request_is_its_id(api: openai.OpenAI) -> None:
    named = {"x-request-id": "mine-1"}
    raw = api.completions.with_raw_response.create(
        model="null", prompt="One", max_tokens=1, extra_headers=named
    )
    assert raw.headers["x-request-id"] == raw.request_id == "mine-1"
    completion = raw.parse()
    assert completion.id.startswith("cmpl-")
    chat = api.chat.completions.create(model="null", messages=MESSAGES, max_tokens=1)
    assert chat._request_id == chat.id
    with api.chat.completions.with_streaming_response.create(
        model="null", messages=MESSAGES, max_tokens=1, stream=True, extra_headers=named
    ) as response:
        assert response.headers["x-request-id"] == "mine-1"
        assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"


def test_refusals_are_the_clients_exceptions(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        api.completions.create(model="null", prompt="One", temperature=3)
    assert refused.value.param == "temperature"
    assert refused.value.request_id
    with pytest.raises(openai.BadRequestError) as refused:
        api.completions.create(model="null", prompt=[1] * 600)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        api.completions.create(model="other", prompt="One")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("org/other")
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="tools") as refused:
        api.chat.completions.create(model="null", messages=MESSAGES, tools=[tool])
    assert refused.value.code == "unsupported_parameter"


def test_an_error_in_mid_stream_is_an_api_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(SLOW) as (llm, server), tapped((server.host, server.port)) as tap:
        fail_at_token(monkeypatch, llm, 3)
        with openai.OpenAI(base_url=f"{tap.url}/v1", api_key="none") as api:
            stream = api.completions.create(model="null", prompt="One", max_tokens=9, stream=True)
            assert len([next(stream) for _ in range(3)]) == 3
            with pytest.raises(openai.APIError, match="out of memory in this step") as failed:
                next(stream)
            error = failed.value
            assert (error.type, error.code, error.param) == ("server_error", "engine_error", None)
            assert api.completions.create(model="null", prompt="One", max_tokens=1).choices
        assert len(tap.check()) == 2


def test_a_deadline_is_a_server_error_or_an_api_error() -> None:
    with serving(SLOW) as (_, server):
        base_url = f"{server.url}/v1"
        late: dict[str, Any] = {"model": "null", "prompt": "One", "max_tokens": 400}
        late["extra_body"] = {"deadline_ms": 200}
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as api:
            with pytest.raises(openai.InternalServerError) as failed:
                api.completions.create(**late)
            assert (failed.value.status_code, failed.value.code) == (504, "deadline_exceeded")
            with pytest.raises(openai.APIError) as ended:
                list(api.completions.create(**late, stream=True))
            assert ended.value.code in ("deadline_exceeded", "deadline_unattainable")


def test_a_refusal_is_tried_again_after_the_time_it_told() -> None:
    """The one place is taken; it is freed once both clients have been refused."""
    body: dict[str, Any] = {"model": "null", "prompt": "One", "max_tokens": 400, "stream": True}
    ask: dict[str, Any] = {"model": "null", "prompt": "One", "max_tokens": 2}
    with (
        serving(SLOW, max_num_seqs=1, queue_capacity=1) as (llm, server),
        tapped((server.host, server.port)) as tap,
        openai.OpenAI(base_url=f"{tap.url}/v1", api_key="none", max_retries=5) as api,
        ThreadPoolExecutor() as pool,
    ):
        taken = [send((server.host, server.port), body)]
        wait_until(lambda: llm.stats()["num_running"] == 1)
        taken.append(send((server.host, server.port), body))
        wait_until(lambda: llm.stats()["num_waiting"] == 1)
        answers = [
            pool.submit(api.completions.create, **ask),
            pool.submit(asyncio.run, complete(f"{tap.url}/v1", ask)),
        ]
        wait_until(lambda: len({kind_of(exchange) for exchange in tap.exchanges}) == 2)
        for connection in taken:
            connection.close()
        for answer in answers:
            assert answer.result().choices[0].finish_reason == "length"
        exchanges = tap.settled()
        tap.check()
    for kind in {kind_of(exchange) for exchange in exchanges}:
        mine = [exchange for exchange in exchanges if kind_of(exchange) == kind]
        assert [exchange.status for exchange in mine[-2:]] == [429, 200]
        assert mine[-1].headers["x-stainless-retry-count"] == str(len(mine) - 1)
        for before, after in pairwise(mine):
            retry_after = before.answer_headers["retry-after"]
            assert retry_after.isdigit()
            assert after.sent_at - before.sent_at >= int(retry_after) >= 1


async def complete(base_url: str, ask: dict[str, Any]) -> Any:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=5) as api:
        return await api.completions.create(**ask)


def kind_of(exchange: Exchange) -> str:
    """Whether the asynchronous client has asked."""
    return exchange.headers["x-stainless-async"]


def test_a_refusal_that_is_not_tried_again_is_a_rate_limit_error() -> None:
    body: dict[str, Any] = {"model": "null", "prompt": "One", "max_tokens": 400, "stream": True}
    with serving(SLOW, max_num_seqs=1, queue_capacity=1) as (llm, server):
        address = (server.host, server.port)
        with send(address, body):
            wait_until(lambda: llm.stats()["num_running"] == 1)
            with (
                send(address, body),
                openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api,
            ):
                wait_until(lambda: llm.stats()["num_waiting"] == 1)
                with pytest.raises(openai.RateLimitError) as refused:
                    api.completions.create(**body)
        assert refused.value.code == "overloaded"
        assert int(refused.value.response.headers["retry-after"]) >= 1


def test_a_client_that_gives_up_ends_its_request() -> None:
    with serving(SLOW) as (llm, server):
        endless: dict[str, Any] = {"model": "null", "prompt": "One", "max_tokens": 400}
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
            with pytest.raises(openai.APITimeoutError):
                api.completions.create(**endless, timeout=0.2)
            wait_until(lambda: is_idle(llm))
            stream = api.completions.create(**endless, stream=True)
            next(iter(stream))
            stream.close()
            wait_until(lambda: is_idle(llm))
        assert llm.stats()["num_cancelled_requests"] == 2


def test_a_server_that_is_gone_is_a_lost_connection() -> None:
    with serving(SLOW) as (llm, server), tapped((server.host, server.port)) as tap:
        with openai.OpenAI(base_url=f"{tap.url}/v1", api_key="none", max_retries=0) as api:
            endless: dict[str, Any] = {"model": "null", "prompt": "One", "max_tokens": 400}
            stream = api.completions.create(**endless, stream=True)
            next(stream)
            tap.cut()
            # Whether the client wraps what its HTTP library says depends on its version.
            with pytest.raises((openai.APIConnectionError, httpx2.RemoteProtocolError)):
                list(stream)
            with pytest.raises(openai.APIConnectionError):
                api.completions.create(**endless)
        wait_until(lambda: is_idle(llm))
