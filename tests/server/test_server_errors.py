"""What the server refuses, and how it says so."""

import json
from typing import Any

import pytest
from server_kit import MESSAGES, Client, error_of

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": "One", "max_tokens": 1, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "null", "messages": MESSAGES, "max_tokens": 1, **fields}


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_not_found(client: Client, stream: bool) -> None:
    body = completion(model="gpt-4", stream=stream)
    error = client.error(COMPLETIONS, body, 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "gpt-4" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1e400}, "max_tokens"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [10_000_000]}, "stop_token_ids"),
        ({"logit_bias": {"99999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"x": 5}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"tenant": "x" * 257}, "tenant"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"ttft_deadline_ms": -1}, "ttft_deadline_ms"),
        ({"target_itl_ms": 1e10}, "target_itl_ms"),
        ({"priority": "urgent"}, "priority"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": ["One", ""]}, "prompt[1]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [0, -1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": [2**63]}, "prompt[0]"),
        ({"stream_options": {}}, "stream_options"),
        ({"internal_flag": True}, "internal_flag"),
    ],
)
def test_a_refused_parameter_is_named(client: Client, fields: dict[str, Any], param: str) -> None:
    response = client.http.post(
        COMPLETIONS,
        content=json.dumps(completion(**fields)).replace("Infinity", "1e400"),
        headers={"content-type": "application/json"},
    )
    error = error_of(response, 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert client.complete(prompt="One", max_tokens=1)["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"prompt": "One"}, "prompt"),
        ({"echo": True}, "echo"),
    ],
)
def test_a_refused_field_of_a_chat_is_named(
    client: Client, fields: dict[str, Any], param: str
) -> None:
    error = client.error(CHATS, chat(**fields))
    assert error["param"] == param
    assert client.chat(max_tokens=1)["choices"]


def test_an_image_is_refused_and_not_fetched(client: Client) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/picture.png"}}
    error = client.error(CHATS, chat(messages=[{"role": "user", "content": [image]}]))
    assert error["param"] == "messages[0].content[0]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "param"), [(COMPLETIONS, "prompt"), (CHATS, "messages")])
def test_what_can_never_fit_is_the_clients_mistake(
    client: Client, path: str, param: str, stream: bool
) -> None:
    text = "word " * 2000
    body = completion(prompt=text) if path == COMPLETIONS else chat()
    if path == CHATS:
        body["messages"] = [{"role": "user", "content": text}]
    error = client.error(path, {**body, "stream": stream})
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == param
    assert "512" in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{} {}", b'"text"', b"\xff\xfe", b'{"n": NaN}']
)
def test_a_body_that_is_no_object_is_refused(client: Client, body: bytes) -> None:
    error_of(client.http.post(COMPLETIONS, content=body), 400)


def test_a_deeply_nested_body_is_refused(client: Client) -> None:
    depth = 100_000
    body = b'{"model": "null", "prompt": ' + b"[" * depth + b"]" * depth + b"}"
    error_of(client.http.post(COMPLETIONS, content=body), 400)


def test_a_body_above_the_limit_is_refused(client: Client) -> None:
    body = json.dumps(completion(user="x" * (4 << 20)))
    error_of(client.http.post(COMPLETIONS, content=body), 413)
    assert client.complete(prompt="One", max_tokens=1)["choices"]


def test_unknown_paths_and_methods_are_told_apart(client: Client) -> None:
    assert error_of(client.get("/v1/nothing"), 404)["code"] == "unknown_path"
    error_of(client.get(COMPLETIONS), 405)
    error_of(client.post("/v1/models", {}), 405)


@pytest.mark.parametrize("id", ["%ff", "a%C3", "%80/x", "%ED%A0%80"])
def test_a_path_that_is_no_text_is_refused(client: Client, id: str) -> None:
    for method, path in (
        ("GET", "/v1/models/{id}"),
        ("GET", "/v1/requests/{id}"),
        ("POST", "/v1/requests/{id}/cancel"),
        ("GET", "/{id}"),
        ("GET", "/v1/requests/{id}/nothing"),
    ):
        response = client.http.request(method, path.format(id=id))
        error_of(response, response.status_code)
        is_route = path.startswith("/v1") and "nothing" not in path and "/" not in id
        assert response.status_code == 400 if is_route else response.status_code in (400, 404)


@pytest.mark.parametrize("id", ["%zz", "%", "%4", "%00", "%2e%2e%2f", "%252F", "+"])
def test_an_odd_path_names_nothing(client: Client, id: str) -> None:
    assert error_of(client.get(f"/v1/models/{id}"), 404)["code"] == "model_not_found"
    assert error_of(client.get(f"/v1/requests/{id}"), 404)["code"] == "request_not_found"


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"])
def test_another_method_is_refused_and_told_the_right_one(client: Client, method: str) -> None:
    response = client.http.request(method, COMPLETIONS)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    assert error_of(client.http.request(method, "/v1/nothing"), 404)["code"] == "unknown_path"


def test_a_bias_for_one_token_comes_once(client: Client) -> None:
    for bias in ('{"5": 1, "05": 2}', '{"5": 1, "5": 1}', '{"+5": 1, "5": 2}'):
        text = f'{{"model": "null", "prompt": "One", "max_tokens": 1, "logit_bias": {bias}}}'
        error = error_of(client.http.post(COMPLETIONS, content=text), 400)
        assert error["param"] == "logit_bias"
        assert "token 5 comes twice" in error["message"]


def test_a_request_id_comes_back_at_once(client: Client) -> None:
    response = client.post(COMPLETIONS, completion(), **{"x-request-id": "mine-7"})
    assert response.headers["x-request-id"] == "mine-7"
    refused = client.post(COMPLETIONS, completion(n=0), **{"x-request-id": "mine-8"})
    assert refused.headers["x-request-id"] == "mine-8"
    for unusable in ("two words", "x" * 129):
        response = client.post(COMPLETIONS, completion(), **{"x-request-id": unusable})
        assert response.headers["x-request-id"] == response.json()["id"]
