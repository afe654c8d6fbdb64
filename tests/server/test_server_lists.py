"""Lists of prompts are let in as a whole or not at all; rates are asked before there is work."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from server_kit import Client, error_of, is_idle, serving, wait_until

from cbrs import AsyncLLM

PATH = "/v1/completions"
LONG = "w" * 20_000
CHAT = [{"role": "user", "content": LONG}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": "One", "max_tokens": 1, **fields}


@contextmanager
def limited(model: str = "null", **options: Any) -> Iterator[tuple[AsyncLLM, Client]]:
    """A server whose requests belong to no tenant, with these limits for such."""
    limits = options.pop("limits", {})
    policy = {"policy": "fair", "default_tenant": limits, **options.pop("policy", {})}
    with serving(model, policy=policy, **options) as (llm, server):
        yield llm, Client(server.url)


def num_accepted(llm: AsyncLLM) -> int:
    return int(llm.stats()["num_accepted_requests"])


def is_final(response: httpx2.Response, bound: str) -> bool:
    """Whether a list was refused for good, by the bound of this name."""
    error = error_of(response, 400)
    assert (error["code"], error["param"]) == ("too_many_prompts", "prompt")
    assert "retry-after" not in response.headers
    assert bound in error["message"], error["message"]
    return response.headers["x-should-retry"] == "false"


def test_a_list_above_the_rate_charges_nothing_and_gets_in_when_it_was_told() -> None:
    with limited(limits={"requests_per_min": 60}) as (llm, client):
        assert client.post(PATH, body(prompt=["One"] * 59)).status_code == 200
        before = num_accepted(llm)
        # 1 of the minute's 60 is left (and what some milliseconds add).
        for _ in range(3):
            refused = client.post(PATH, body(prompt=["One"] * 4))
            assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
            assert 1 <= int(refused.headers["retry-after"]) <= 3
        assert num_accepted(llm) == before
        assert client.post(PATH, body()).status_code == 200, "nothing of the list was charged"
        assert client.post(PATH, body(prompt=["One"] * 8)).status_code == 429


def test_a_list_that_never_gets_in_is_refused_for_good() -> None:
    limits = {"requests_per_min": 5, "tokens_per_min": 40}
    with limited(limits=limits) as (llm, client):
        assert is_final(client.post(PATH, body(prompt=["One"] * 6)), "requests_per_min")
        ids = [[7] * 21, [7] * 21]
        assert is_final(client.post(PATH, body(prompt=ids)), "tokens_per_min")
        assert client.post(PATH, body(prompt=ids[0])).status_code == 200
        assert num_accepted(llm) == 1
    with limited(queue_capacity=10) as (llm, client):
        assert is_final(client.post(PATH, body(prompt=["One"] * 20)), "queue_capacity")
        assert is_final(client.post(PATH, body(prompt=["One"] * 9)), "a tenant's part of queue_cap")
        assert num_accepted(llm) == 0
        assert client.post(PATH, body(prompt=["One"] * 7)).status_code == 200
    with limited(max_queued_tokens=50) as (_, client):
        assert is_final(client.post(PATH, body(prompt=[[7] * 30] * 2)), "max_queued_tokens")


@pytest.mark.parametrize("wrong", [[7] * 600, [999_999], []])
def test_a_wrong_prompt_keeps_the_others_out(
    client: Client, llm: AsyncLLM, wrong: list[int]
) -> None:
    before = num_accepted(llm)
    error = client.error(PATH, body(prompt=[[1], [2], wrong, [3]]))
    assert error["param"] == "prompt[2]"
    assert num_accepted(llm) == before


def test_a_list_and_its_choices_come_as_one(client: Client, llm: AsyncLLM) -> None:
    before = num_accepted(llm)
    answer = client.complete(prompt=["One", "Two", "Three"], n=2, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert num_accepted(llm) == before + 3


def test_a_tenant_above_its_rate_costs_no_tokenizing() -> None:
    with limited(limits={"requests_per_min": 3}) as (llm, client):
        # A text that was tokenized counts although it is refused: it is too long.
        error = client.error(PATH, body(prompt=LONG))
        assert error["code"] == "context_length_exceeded"
        assert client.post("/tokenize", {"prompt": LONG}).json()["count"] > 512
        assert client.post("/detokenize", {"tokens": [1, 2]}).status_code == 200
        for path, fields in (
            (PATH, body(prompt=LONG)),
            ("/v1/chat/completions", {"model": "null", "messages": CHAT}),
            ("/tokenize", {"prompt": LONG}),
            ("/detokenize", {"tokens": [1, 2]}),
        ):
            refused = client.post(path, fields)
            assert error_of(refused, 429)["code"] == "rate_limit_exceeded", path
            assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert num_accepted(llm) == 0
        refusals = re.findall(r'reason="tenant_rate"\} (\d+)', client.get("/metrics").text)
        assert sum(map(int, refusals)) == 4


def test_a_request_can_be_cancelled_while_its_prompt_is_prepared() -> None:
    with serving("null", max_model_len=512) as (llm, server):
        client = Client(server.url)
        text = "word " * 120_000
        answers: list[httpx2.Response] = []

        def ask() -> None:
            answers.append(
                client.post(
                    PATH,
                    body(prompt=[text] * 6, truncate_prompt_tokens=9),
                    **{"x-request-id": "mine"},
                )
            )

        asking = threading.Thread(target=ask)
        asking.start()
        other = Client(server.url)
        told: list[httpx2.Response] = []

        def is_told() -> bool:
            told[:] = [other.http.post("/v1/requests/mine/cancel")]
            return told[0].status_code == 200 or not asking.is_alive()

        wait_until(is_told)
        asking.join()
        (answer,) = answers
        assert told[0].status_code == 200, "it was still being prepared"
        assert error_of(answer, 499)["code"] == "cancelled"
        assert len(told[0].json()["cancelled"]) == 1
        assert (num_accepted(llm), is_idle(llm)) == (0, True)


def test_only_what_a_cancel_has_ended_is_listed() -> None:
    with serving("null:0.005") as (_, server):
        client, headers = Client(server.url), {"x-request-id": "mine"}
        endless = body(max_tokens=400, stream=True)
        with (
            client.http.stream("POST", PATH, json=endless, headers=headers) as first,
            Client(server.url).http.stream("POST", PATH, json=endless, headers=headers) as second,
        ):
            lines, others = first.iter_lines(), second.iter_lines()
            ids = [next(part).split('"id":"')[1].split('"')[0] for part in (lines, others)]
            canceller = Client(server.url).http
            assert canceller.post(f"/v1/requests/{ids[0]}/cancel").json() == {"cancelled": ids[:1]}
            # The first may still be known by its name, but there is nothing of it left to end.
            assert canceller.post("/v1/requests/mine/cancel").json() == {"cancelled": ids[1:]}
            assert [list(part)[-2] for part in (lines, others)]


def test_a_prompt_that_was_prepared_in_vain_counts_as_a_request() -> None:
    with limited(limits={"requests_per_min": 8}, max_model_len=512) as (llm, client):
        answers: list[httpx2.Response] = []

        def ask() -> None:
            fields = body(prompt=["word " * 120_000] * 6, truncate_prompt_tokens=9)
            answers.append(client.post(PATH, fields, **{"x-request-id": "mine"}))

        asking = threading.Thread(target=ask)
        asking.start()
        other = Client(str(client.http.base_url))
        wait_until(
            lambda: (
                other.http.post("/v1/requests/mine/cancel").status_code == 200
                or not asking.is_alive()
            )
        )
        asking.join()
        assert error_of(answers[0], 499)["code"] == "cancelled"
        # One of the minute's eight is used (and some milliseconds add nothing).
        statuses = [client.post(PATH, body()).status_code for _ in range(9)]
        assert statuses == [200] * 7 + [429] * 2
        assert (num_accepted(llm), is_idle(llm)) == (7, True)


def test_a_bad_prompt_of_a_list_is_named_whatever_comes_after_it() -> None:
    with limited(max_model_len=512) as (llm, client):
        refused = error_of(client.post(PATH, body(prompt=["One", LONG, "Two", LONG])), 400)
        assert (refused["code"], refused["param"]) == ("context_length_exceeded", "prompt[1]")
        assert client.post(PATH, body(prompt=["One", LONG], truncate_prompt_tokens=9)).is_success
        assert num_accepted(llm) == 2
