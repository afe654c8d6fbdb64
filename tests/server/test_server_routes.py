"""The routes beside completions and chats."""

import pytest
from server_kit import MESSAGES, Client, error_of, serving

import cbrs
from cbrs import AsyncLLM


def test_the_models_are_listed(client: Client) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("null", "model", "cbrs")
    assert isinstance(model["created"], int)
    assert client.get("/v1/models/null").json() == model
    assert error_of(client.get("/v1/models/other"), 404)["code"] == "model_not_found"


def test_a_name_may_have_slashes() -> None:
    with serving(served_model_names=("org/model:8b", "second")) as (_, server):
        client = Client(server.url)
        assert client.get("/v1/models/org/model:8b").json()["id"] == "org/model:8b"
        assert client.get("/v1/models/org%2Fmodel%3A8b").json()["id"] == "org/model:8b"
        for name in ("org/model:8b", "second"):
            answer = client.complete(model=name, prompt="One", max_tokens=1)
            assert answer["model"] == "org/model:8b", "the first name stands in answers"


def test_texts_are_tokenized_and_back(client: Client, llm: AsyncLLM) -> None:
    text = "One, two."
    tokens = client.post("/tokenize", {"prompt": text}).json()
    ids = llm.encode(text)
    assert tokens == {"count": len(ids), "max_model_len": 512, "tokens": ids}
    assert client.post("/detokenize", {"tokens": ids}).json() == {"prompt": text}
    without = client.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert without["tokens"] == llm.encode(text, False)


def test_a_conversation_is_tokenized_as_a_chat_is(client: Client) -> None:
    tokens = client.post("/tokenize", {"messages": MESSAGES, "model": "null"}).json()
    answer = client.chat(max_tokens=1, return_token_ids=True)
    assert tokens["tokens"] == answer["prompt_token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "other": 1}, "other"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_a_wrong_field_is_named(client: Client, path: str, body: object, param: str) -> None:
    assert client.error(path, body)["param"] == param


def test_an_unknown_model_is_not_tokenized_for(client: Client) -> None:
    client.error("/tokenize", {"prompt": "x", "model": "other"}, 404)


def test_probes_and_figures(client: Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}
    version = client.get("/version").json()
    assert version["version"] == cbrs.__version__
    assert version["engine"]["max_model_len"] == 512
    before = client.get("/stats").json()
    client.complete(prompt="One", max_tokens=3)
    after = client.get("/stats").json()
    assert after["num_output_tokens"] - before["num_output_tokens"] == 3
    assert after["num_active_responses"] == 0
