"""The official client of OpenAI gets along with the server."""

import asyncio

import pytest
from server_kit import MESSAGES, Client

openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed")


@pytest.fixture
def base_url(client: Client) -> str:
    return f"{client.http.base_url}/v1".replace("//v1", "/v1")


def test_the_client_completes_chats_and_lists(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key="none") as api:
        completion = api.completions.create(model="null", prompt="One", max_tokens=5)
        assert completion.usage.completion_tokens == 5
        chat = api.chat.completions.create(model="null", messages=MESSAGES, max_tokens=5, seed=1)
        assert chat.choices[0].message.role == "assistant"
        assert [model.id for model in api.models.list()] == ["null"]
        assert api.models.retrieve("null").id == "null"


def test_the_client_streams(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key="none") as api:
        whole = api.chat.completions.create(model="null", messages=MESSAGES, max_tokens=9)
        options = {"include_usage": True}
        stream = api.chat.completions.create(
            model="null", messages=MESSAGES, max_tokens=9, stream=True, stream_options=options
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == 9


def test_the_async_client_streams(base_url: str) -> None:
    async def run() -> int:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as api:
            stream = await api.completions.create(
                model="null", prompt="One", max_tokens=7, stream=True
            )
            return len([chunk async for chunk in stream])

    assert asyncio.run(run()) == 7


def test_errors_are_the_clients_exceptions(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as api:
        with pytest.raises(openai.BadRequestError) as refused:
            api.completions.create(model="null", prompt="One", temperature=3)
        assert refused.value.param == "temperature"
        assert refused.value.request_id
        with pytest.raises(openai.NotFoundError):
            api.completions.create(model="other", prompt="One")
        with pytest.raises(openai.APIError) as failed:
            list(
                api.completions.create(
                    model="null",
                    prompt="One",
                    max_tokens=400,
                    stream=True,
                    extra_body={"deadline_ms": 0.01},
                )
            )
        assert failed.value.code in ("deadline_exceeded", "deadline_unattainable")
