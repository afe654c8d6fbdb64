"""Every answer fits OpenAI's schemas, and every field of the two request schemas is known."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_schema import CHATS, COMPLETIONS, NULLS, Schemas, check_answer, check_event
from server_kit import MESSAGES, Client


@pytest.fixture(scope="module")
def schemas(cbrs_data: Path) -> Schemas:
    return Schemas(cbrs_data / "conformance" / "openai_schema_facts.json")


def test_the_checker_finds_what_is_wrong(schemas: Schemas) -> None:
    model = {"id": "m", "object": "model", "created": 1, "owned_by": "x"}
    assert schemas.errors("Model", model) == []
    for wrong in ({**model, "created": "1"}, {**model, "object": "list"}, {"id": "m"}, []):
        assert schemas.errors("Model", wrong)


def test_what_clients_read_is_held_to_the_schemas(client: Client, schemas: Schemas) -> None:
    chat = client.chat(max_tokens=1)
    for path, wrong in ((CHATS, {**chat, "object": "text_completion"}), ("/v1/models", {})):
        with pytest.raises(AssertionError):
            check_answer(path, {}, wrong)
    *_, chunk = client.chunks(COMPLETIONS, prompt="One", max_tokens=1)
    for path, event in ((COMPLETIONS, {**chunk, "created": None}), (CHATS, chunk)):
        with pytest.raises(AssertionError):
            check_event(path, event)
    with pytest.raises(AssertionError):
        check_event(CHATS, {"error": {"message": "x", "type": "y", "code": 500, "param": None}})


def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    usage = {"include_usage": True}
    for extra in ({}, {"n": 2}, {"stop": " fox"}, {"return_token_ids": True}):
        yield COMPLETIONS, {"prompt": "One", "max_tokens": 9, **extra}
        yield CHATS, {"messages": MESSAGES, "max_tokens": 9, **extra}
    yield COMPLETIONS, {"prompt": ["One", "Two"], "max_tokens": 2, "logprobs": 2, "echo": True}
    yield CHATS, {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    yield CHATS, {"messages": MESSAGES, "max_tokens": 3, "stream_options": usage}
    yield COMPLETIONS, {"prompt": "One", "max_tokens": 3, "stream_options": usage}
    many = {"max_tokens": 3, "n": 3, "return_token_ids": True, "stream_options": usage}
    yield CHATS, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, **many}
    yield CHATS, {"messages": MESSAGES, "logprobs": True, "prompt_logprobs": 2, **many}
    yield COMPLETIONS, {"prompt": [[5, 6], [7]], "logprobs": 5, "echo": True, **many}
    yield COMPLETIONS, {"prompt": "One", "logprobs": 0, "prompt_logprobs": 2, **many}


@pytest.mark.parametrize(("path", "body"), list(bodies()))
def test_answers_and_chunks_fit(
    client: Client, schemas: Schemas, path: str, body: dict[str, Any]
) -> None:
    whole, chunk = (
        ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse")
        if path == CHATS
        else ("CreateCompletionResponse", "CreateCompletionResponse")
    )
    if "stream_options" not in body:
        nulls = NULLS if body.get("echo") else frozenset[str]()
        assert schemas.errors(whole, client.ok(path, **body), nulls) == []
    for event in client.chunks(path, **body):
        assert schemas.errors(chunk, event, NULLS) == []


def test_other_answers_fit(client: Client, schemas: Schemas) -> None:
    assert schemas.errors("ListModelsResponse", client.get("/v1/models").json()) == []
    assert schemas.errors("Model", client.get("/v1/models/null").json()) == []
    refused = client.post(COMPLETIONS, {"model": "null"})
    assert schemas.errors("ErrorResponse", refused.json()) == []


@pytest.mark.parametrize(
    ("path", "name"),
    [(COMPLETIONS, "CreateCompletionRequest"), (CHATS, "CreateChatCompletionRequest")],
)
def test_every_field_of_the_request_schema_is_known(
    client: Client, schemas: Schemas, path: str, name: str
) -> None:
    base = {"model": "null", "max_tokens": 1}
    base |= {"messages": MESSAGES} if path == CHATS else {"prompt": "One"}
    for field in schemas.by_name[name]["properties"]:
        # What every field takes is null, but for those that a request must have.
        response = client.post(path, {**base, field: None})
        if response.status_code != 200:
            assert response.json()["error"]["param"] == field
            assert field in schemas.by_name[name]["required"], response.text
        # No field takes this. One that is not known would be called unknown.
        error = client.error(path, {**base, field: [{"no": ["such", "value"]}]})
        assert error["param"].split("[")[0].split(".")[0] == field
        assert f"unknown field `{field}`" not in error["message"]
