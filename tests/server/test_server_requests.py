"""`GET /v1/requests/{id}`: what happened to a request."""

import json
import time
from typing import Any

import pytest
from metrics_kit import short_of_memory
from server_kit import Client, error_of, serving, wait_until

PATH = "/v1/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "null", "max_tokens": 3, **fields}


def look_up(client: Client, name: str) -> list[dict[str, Any]]:
    response = client.get(f"/v1/requests/{name}")
    assert response.status_code == 200, response.text
    requests: list[dict[str, Any]] = response.json()["requests"]
    return requests


def events(request: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The events of all prompts: prompt, name, choice and everything that is not a time."""
    found = []
    for prompt in request["prompts"]:
        times = [event["time_s"] for event in prompt["events"]]
        assert times[0] == 0
        assert times == sorted(times)
        unix = [event["unix_time"] for event in prompt["events"]]
        first = unix[0]
        assert unix == pytest.approx([first + at for at in times], abs=1e-5)
        for event in prompt["events"]:
            rest = {k: v for k, v in event.items() if k not in ("event", "time_s", "unix_time")}
            found.append((prompt["index"], event["event"], *rest.values()))
    return found


def test_a_whole_answer_is_told_from_submission_to_end(client: Client) -> None:
    before = time.time()
    answer = client.complete(prompt=[5] * 40, max_tokens=4, cache_salt="whole")
    (request,) = look_up(client, answer["id"])
    assert request["id"] == answer["id"]
    assert request["x_request_id"] is None
    assert request["is_live"] is False
    assert request["num_omitted_events"] == 0
    assert request["prompts"][0]["prompt_tokens"] == 40
    assert events(request) == [
        (0, "submitted"),
        (0, "admitted", 0, 0),
        (0, "chunk", 0, 40),
        (0, "first_token", 0),
        (0, "end", 0, 4, "length"),
    ]
    assert before <= request["prompts"][0]["events"][0]["unix_time"] <= time.time()


def test_a_stream_with_a_cached_prompt_is_found_by_the_name_that_was_sent(client: Client) -> None:
    fields = body(prompt=[6] * 50, cache_salt="stream", stream=True)
    for name in ("cold", "warm"):
        response = client.post(PATH, fields, **{"x-request-id": name})
        assert response.headers["x-request-id"] == name
    (request,) = look_up(client, "warm")
    assert request["x_request_id"] == "warm"
    first = json.loads(response.text.split("\n\n")[0].removeprefix("data: "))
    assert request["id"] == first["id"]
    assert events(request) == [
        (0, "submitted"),
        (0, "admitted", 0, 48),
        (0, "chunk", 0, 2),
        (0, "first_token", 0),
        (0, "end", 0, 3, "length"),
    ]


def test_chunks_are_told_one_by_one() -> None:
    with serving(max_num_batched_tokens=32) as (_, server):
        client = Client(server.url)
        answer = client.complete(prompt=[5] * 80, max_tokens=1)
        (request,) = look_up(client, answer["id"])
        chunks = [event[-1] for event in events(request) if event[1] == "chunk"]
        assert chunks == [32, 32, 16]


def test_prompts_and_choices_are_told_apart(client: Client) -> None:
    answer = client.complete(prompt=[[5] * 20, [6] * 17], n=2, max_tokens=2, cache_salt="apart")
    (request,) = look_up(client, answer["id"])
    assert [prompt["prompt_tokens"] for prompt in request["prompts"]] == [20, 17]
    found = events(request)
    for prompt, num_tokens in ((0, 20), (1, 17)):
        own = [event[1:] for event in found if event[0] == prompt]
        assert own[0] == ("submitted",)
        assert sorted(own[1:]) == sorted(
            [
                ("admitted", 0, 0),
                ("chunk", 0, num_tokens),
                # The second choice shares the full blocks of the prompt and computes the rest.
                ("admitted", 1, 16),
                ("chunk", 1, num_tokens - 16),
                ("first_token", 0),
                ("first_token", 1),
                ("end", 0, 2, "length"),
                ("end", 1, 2, "length"),
            ]
        )


def test_a_live_request_is_told_so_far() -> None:
    with serving("null:0.01") as (llm, server):
        client = Client(server.url)
        fields = body(prompt="One", max_tokens=400, stream=True)
        headers = {"x-request-id": "live"}
        with client.http.stream("POST", PATH, json=fields, headers=headers) as response:
            lines = response.iter_lines()  # dropping it would close the connection
            next(lines)
            (request,) = look_up(Client(server.url), "live")
            assert request["is_live"] is True
            names = [event[1] for event in events(request)]
            assert names == ["submitted", "admitted", "chunk", "first_token"]
        wait_until(lambda: look_up(client, "live")[0]["is_live"] is False)
        *_, last = events(look_up(client, "live")[0])
        assert (last[1], last[-1]) == ("end", "cancelled")
        assert last[3] == llm.stats()["num_output_tokens"]


def test_preemptions_are_told_with_what_they_cost() -> None:
    with short_of_memory() as (llm, client, answer):
        (request,) = look_up(client, answer["id"])
        found = events(request)
        preempted = [event for event in found if event[1] == "preempted"]
        stats = llm.stats()
        assert len(preempted) == stats["num_preemptions"]
        resumed = [event for event in found if event[1] == "resumed"]
        assert len(resumed) == len(preempted)
        lost = sum(event[-1] for event in preempted) - sum(event[-1] for event in resumed)
        assert lost == stats["num_recomputed_tokens"]
        # Each of the two is in its row or not, until it ends.
        for prompt in (0, 1):
            names = [event[1] for event in found if event[0] == prompt][1:]
            names = [name for name in names if name not in ("chunk", "first_token")]
            inner = names[1:-1]
            assert (names[0], names[-1]) == ("admitted", "end")
            assert inner == ["preempted", "resumed"] * (len(inner) // 2)


def test_a_name_may_stand_for_several(client: Client) -> None:
    for _ in range(2):
        client.post(PATH, body(prompt="One"), **{"x-request-id": "twice"})
    first, second = look_up(client, "twice")
    assert first["id"] != second["id"]
    times = [request["prompts"][0]["events"][0]["unix_time"] for request in (first, second)]
    assert times[0] < times[1], "the oldest comes first"


def test_nothing_is_told_of_what_was_not_let_in(client: Client) -> None:
    headers = {"x-request-id": "refused"}
    assert client.post(PATH, body(prompt="One", temperature=-1), **headers).status_code == 400
    for name in ("refused", "nobody", "x" * 500):
        error = error_of(client.get(f"/v1/requests/{name}"), 404)
        assert error["code"] == "request_not_found"


def test_of_a_name_that_many_have_the_last_are_told(client: Client) -> None:
    headers = {"x-request-id": "popular"}
    bodies = [body(prompt=[1], max_tokens=1 + number) for number in range(20)]
    ids = [client.post(PATH, one, **headers).json()["id"] for one in bodies]
    assert [request["id"] for request in look_up(client, "popular")] == ids[-16:]
    assert [request["id"] for request in look_up(client, ids[0])] == [ids[0]]


def test_the_last_thousand_are_remembered() -> None:
    with serving() as (_, server):
        client = Client(server.url)
        # One with many prompts is one request.
        first = client.complete(prompt=[[number] for number in range(100)], max_tokens=1)["id"]
        second = client.complete(prompt="One", max_tokens=1)["id"]
        for _ in range(998):
            assert client.post(PATH, body(prompt=[1], max_tokens=1)).status_code == 200
        assert len(look_up(client, first)[0]["prompts"]) == 100
        last = client.complete(prompt=[1], max_tokens=1)["id"]
        error_of(client.get(f"/v1/requests/{first}"), 404)
        assert look_up(client, second)
        assert look_up(client, last)


def test_events_of_one_request_are_bounded(client: Client) -> None:
    answer = client.complete(prompt=[[number] for number in range(128)], max_tokens=1)
    (request,) = look_up(client, answer["id"])
    assert request["num_omitted_events"] == 0
    answer = client.complete(prompt=[5] * 20, n=128, max_tokens=1)
    (request,) = look_up(client, answer["id"])
    num_events = sum(len(prompt["events"]) for prompt in request["prompts"])
    assert num_events + request["num_omitted_events"] == 1 + 4 * 128
