"""Limits on what a request may ask for: at the limit it is served, beyond it is refused by name.

What is refused never becomes a request of the engine.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_kit import MESSAGES, Client, error_of, serving

from cbrs import AsyncLLM
from cbrs.serving import ServerLimits

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
MAX_MODEL_LEN = 512
MAX_INT64 = 2**63 - 1


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": [1], "max_tokens": 1, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "null", "messages": MESSAGES, "max_tokens": 1, **fields}


def raw(client: Client, body: str, path: str = COMPLETIONS) -> Any:
    """Sends a body that need not be JSON."""
    return client.http.post(path, content=body, headers={"content-type": "application/json"})


@pytest.fixture
def refused(client: Client, llm: AsyncLLM) -> Callable[..., dict[str, Any]]:
    """Sends what must be refused; returns the error object."""

    def refused(body: Any, path: str = COMPLETIONS) -> dict[str, Any]:
        before = llm.stats()["num_accepted_requests"]
        text = body if isinstance(body, str) else json.dumps(body)
        error = error_of(raw(client, text, path), 400)
        assert error["type"] == "invalid_request_error"
        assert llm.stats()["num_accepted_requests"] == before
        return error

    return refused


Refused = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("param", "last", "beyond"),
    [
        ("n", 128, 129),
        ("n", 1, 0),
        ("logprobs", 5, 6),
        ("prompt_logprobs", 20, 21),
        ("max_tokens", MAX_MODEL_LEN - 1, MAX_MODEL_LEN),
        ("max_tokens", 1, 0),
        ("min_tokens", 1, 2),
        ("stop", ["a", "b", "c", "d"], ["a", "b", "c", "d", "e"]),
        ("stop", "é" * 256, "é" * 257),
        ("stop", ["x"], [""]),
        ("stop_token_ids", list(range(128)), list(range(129))),
        ("logit_bias", {"1": 100}, {"1": 100.01}),
        ("logit_bias", {"1": -100}, {"1": -100.01}),
        ("temperature", 2, 2.001),
        ("temperature", 0, -0.001),
        ("top_p", 1, 1.001),
        ("top_p", 0.001, 0),
        ("min_p", 1, 1.001),
        ("min_p", 0, -0.001),
        ("presence_penalty", 2, 2.001),
        ("presence_penalty", -2, -2.001),
        ("frequency_penalty", 2, 2.001),
        ("frequency_penalty", -2, -2.001),
        ("repetition_penalty", 0.001, 0),
        ("top_k", -1, -2),
        ("seed", MAX_INT64, MAX_INT64 + 1),
        ("seed", -MAX_INT64 - 1, -MAX_INT64 - 2),
        ("cache_salt", "s" * 256, "s" * 257),
        ("cache_salt", "s", "two\nlines"),
        ("tenant", "t" * 256, "t" * 257),
        ("tenant", "t", "\0"),
        ("truncate_prompt_tokens", 1, 0),
        ("truncate_prompt_tokens", -1, -2),
        ("deadline_ms", 60_000, 0),
    ],
)
def test_a_completion_has_limits(
    client: Client, refused: Refused, param: str, last: Any, beyond: Any
) -> None:
    assert client.complete(**completion(**{param: last}))["choices"]
    error = refused(completion(**{param: beyond}))
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("param", "last", "beyond", "others"),
    [
        ("top_logprobs", 20, 21, {"logprobs": True}),
        ("max_completion_tokens", 1, 0, {"max_tokens": None}),
        ("safety_identifier", "x" * 64, "x" * 65, {}),
        ("metadata", {"k" * 64: "v" * 512}, {"k" * 65: "v"}, {}),
        ("metadata", {str(i): "" for i in range(16)}, {str(i): "" for i in range(17)}, {}),
    ],
)
def test_a_chat_has_limits(
    client: Client, refused: Refused, param: str, last: Any, beyond: Any, others: dict[str, Any]
) -> None:
    assert client.chat(**chat(**others, **{param: last}))["choices"]
    assert refused(chat(**others, **{param: beyond}), CHATS)["param"] == param


@pytest.mark.parametrize("number", [str(2**63), str(2**64), "1e400", "-1", '"5"', "1.5", "1e3"])
@pytest.mark.parametrize(
    ("path", "name"),
    [
        (COMPLETIONS, "max_tokens"),
        (COMPLETIONS, "min_tokens"),
        (CHATS, "max_tokens"),
        (CHATS, "max_completion_tokens"),
    ],
)
def test_an_absurd_count_is_refused_by_name(
    refused: Refused, path: str, name: str, number: str
) -> None:
    body = completion() if path == COMPLETIONS else chat()
    del body["max_tokens"]
    body[name] = "NUMBER"
    assert refused(json.dumps(body).replace('"NUMBER"', number), path)["param"] == name


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "nan", "1e999", "0x10"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "logit_bias", "deadline_ms"])
def test_what_is_no_finite_number_is_refused(refused: Refused, name: str, literal: str) -> None:
    value = {"1": "NUMBER"} if name == "logit_bias" else "NUMBER"
    refused(json.dumps(completion(**{name: value})).replace('"NUMBER"', literal))


def test_min_tokens_is_compared_after_the_defaults(client: Client, refused: Refused) -> None:
    room = MAX_MODEL_LEN - 1
    body = completion(max_tokens=None, min_tokens=room)
    assert client.complete(**body)["usage"]["completion_tokens"] == room
    assert refused({**body, "min_tokens": room + 1})["param"] == "min_tokens"


def test_prompts_and_their_choices_have_a_limit(client: Client, refused: Refused) -> None:
    assert len(client.complete(**completion(prompt=["One"] * 128))["choices"]) == 128
    assert refused(completion(prompt=["One"] * 129))["param"] == "prompt"
    assert refused(completion(prompt=[[1]] * 129))["param"] == "prompt"
    assert len(client.complete(**completion(prompt=[[1]] * 64, n=2))["choices"]) == 128
    assert refused(completion(prompt=[[1]] * 43, n=3))["param"] == "n"
    assert refused(completion(prompt=[[1]] * 2, n=2**32 - 1))["param"] == "n"


def test_token_ids_are_those_of_the_tokenizer(
    client: Client, llm: AsyncLLM, refused: Refused
) -> None:
    last = llm.tokenizer.vocab_size - 1
    for name, ids in (
        ("prompt", lambda token: [1, 2, token]),
        ("stop_token_ids", lambda token: [token]),
        ("logit_bias", lambda token: {str(token): 1}),
    ):
        assert client.complete(**completion(**{name: ids(last)}))["choices"]
        for token in (last + 1, 2**31, 2**62, -1):
            error = refused(completion(**{name: ids(token)}))
            assert error["param"] == name
            assert str(token) in error["message"]
    assert "prompt[2]" in refused(completion(prompt=[1, 2, last + 1]))["message"]
    several = client.error(COMPLETIONS, completion(prompt=[[1], [2, last + 1]]))
    assert several["param"] == "prompt[1]"
    assert "[1]" in several["message"]


def test_padding_of_the_vocabulary_is_no_token(tiny: Path) -> None:
    import kit

    with serving(str(tiny), served_model_names=("null",), num_threads=1) as (_, server):
        client = Client(server.url)
        assert client.complete(**completion(prompt=[kit.NUM_TOKENS - 1]))["choices"]
        error = client.error(COMPLETIONS, completion(prompt=[1, kit.NUM_TOKENS]))
        assert error["param"] == "prompt"
        assert f"0..{kit.NUM_TOKENS}" in error["message"]


def test_a_logit_bias_has_a_limit_of_entries(
    client: Client, llm: AsyncLLM, refused: Refused
) -> None:
    if llm.tokenizer.vocab_size <= 1024:
        pytest.skip("the small model is not in the cache: this vocabulary has too few tokens")
    bias = {str(token): 0.5 for token in range(1024)}
    assert client.complete(**completion(logit_bias=bias))["choices"]
    assert refused(completion(logit_bias={**bias, "1024": 0.5}))["param"] == "logit_bias"


def test_a_body_has_a_limit_of_depth(refused: Refused) -> None:
    # This field is refused whatever it is, once the body was read.
    body = json.dumps(chat(prediction="NESTED"))

    def nested(depth: int) -> str:
        return body.replace('"NESTED"', "[" * (depth - 1) + "]" * (depth - 1))

    assert refused(nested(64), CHATS)["param"] == "prediction"
    for depth in (65, 129, 1_000_000):
        error = refused(nested(depth), CHATS)
        assert error["param"] is None
        assert "64" in error["message"]
    assert refused(body.replace('"NESTED"', '"' + "[" * 100 + '"'), CHATS)["param"] == "prediction"


def test_a_body_has_a_limit_of_bytes(client: Client, llm: AsyncLLM) -> None:
    body = json.dumps(completion())
    assert raw(client, body.ljust(4 << 20)).status_code == 200
    before = llm.stats()["num_accepted_requests"]
    error_of(raw(client, body.ljust((4 << 20) + 1)), 413)
    assert llm.stats()["num_accepted_requests"] == before


def test_a_name_has_a_limit(client: Client) -> None:
    for name in ("x", "x" * 128, "!~", "a b"[:1]):
        response = client.post(COMPLETIONS, completion(), **{"x-request-id": name})
        assert response.headers["x-request-id"] == name
    for name in ("x" * 129, "", "two words", "tab\tbed"):
        response = client.post(COMPLETIONS, completion(), **{"x-request-id": name})
        assert response.headers["x-request-id"] == response.json()["id"]
    latin = {"x-request-id": "n\u00e4me".encode("latin-1")}
    response = client.http.post(COMPLETIONS, json=completion(), headers=latin)
    assert response.headers["x-request-id"] == response.json()["id"]


def test_limits_are_an_option() -> None:
    limits: ServerLimits = {
        "max_stop_strings": 16,
        "max_completion_logprobs": 20,
        "max_choices": 3,
        "max_body_bytes": 1000,
        "max_body_depth": 3,
        "max_head_bytes": 500,
        "max_header_fields": 10,
        "max_request_line_bytes": 64,
    }
    with serving(limits=limits) as (llm, server):
        client = Client(server.url)
        body = completion(stop=[str(i) for i in range(16)], logprobs=20, n=3, max_tokens=2)
        assert len(client.complete(**body)["choices"]) == 3
        assert client.error(COMPLETIONS, {**body, "stop": ["a"] * 17})["param"] == "stop"
        assert client.error(COMPLETIONS, {**body, "logprobs": 21})["param"] == "logprobs"
        assert client.error(COMPLETIONS, {**body, "prompt": [[1]] * 4})["param"] == "prompt"
        assert client.error(COMPLETIONS, {**body, "prompt": [[1]] * 2})["param"] == "n"
        assert "than 3 " in client.error(COMPLETIONS, {**body, "prompt": [[[1]]]})["message"]
        assert raw(client, json.dumps(completion()).ljust(1000)).status_code == 200
        error_of(raw(client, json.dumps(completion()).ljust(1001)), 413)
        assert client.http.get("/health", headers={"a": "b" * 500}).status_code == 431
        fields = {f"a{i}": "" for i in range(8)}
        assert client.http.get("/health", headers=fields).status_code == 431
        assert client.http.get("/health?" + "a" * 60).status_code == 414
        assert llm.stats()["num_accepted_requests"] == 1 + 1


@pytest.mark.parametrize(
    ("limits", "part"),
    [
        ({"max_connection": 1}, "max_connection"),
        ({"max_connections": 0}, "max_connections is 0"),
        ({"max_connections": -1}, "max_connections"),
        ({"max_stop_strings": 17}, "max_stop_strings is 17"),
        ({"max_completion_logprobs": 21}, "max_completion_logprobs is 21"),
        ({"max_choices": 129}, "max_choices is 129"),
        ({"idle_timeout_s": 0}, "idle_timeout_s"),
        ({"head_timeout_s": float("nan")}, "limits"),
        ({"body_timeout_s": float("inf")}, "limits"),
        ({"write_timeout_s": "1"}, "write_timeout_s"),
    ],
)
def test_an_unusable_limit_is_refused_by_name(llm: AsyncLLM, limits: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        llm.serve_in_background(port=0, limits=limits)


def test_a_row_of_nan_is_an_error_of_its_request_only(tiny: Path) -> None:
    options: dict[str, Any] = {"num_threads": 1, "dtype": "float32"}
    with serving(str(tiny), **options) as (llm, server):
        client = Client(server.url)
        good = completion(prompt=[7, 8, 9], max_tokens=8, temperature=0, logprobs=5)
        expected = client.complete(**good)["choices"]
        runner = llm.engine._runner

        class OneBadRow:
            """Spoils the rows of requests that want no log-probabilities."""

            def forward(self, batch: Any) -> Any:
                logits = runner.forward(batch).clone()
                logits[np.flatnonzero(batch.num_logprobs[batch.sample_rows] != 5)] = float("nan")
                return logits

            def __getattr__(self, name: str) -> Any:
                return getattr(runner, name)

        llm.engine._runner = OneBadRow()
        error = client.error(COMPLETIONS, completion(prompt=[1, 2]), 500)
        assert error["code"] == "engine_error"
        events = client.chunks(COMPLETIONS, **completion(prompt=[1, 2]))
        assert events[-1]["error"]["code"] == "engine_error"
        answer = client.http.post(COMPLETIONS, json=good)
        assert answer.json()["choices"] == expected
        assert "NaN" not in answer.text
        assert llm.stats()["num_error_requests"] == 2
