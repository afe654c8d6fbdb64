"""Requests that end early, servers that end, engines that die."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from server_kit import MESSAGES, Client, error_of, is_idle, parse_events, serving, wait_until

import cbrs
from cbrs import LLM, AsyncLLM
from cbrs.serving import RunningServer

PATH = "/v1/completions"
# A token takes this long, so that a request is still under way when something happens to it.
SLOW = "null:0.01"
ENDLESS: dict[str, Any] = {"model": "null", "prompt": "One", "max_tokens": 400}


@pytest.fixture
def slow() -> Iterator[tuple[AsyncLLM, RunningServer, Client]]:
    with serving(SLOW) as (llm, server):
        yield llm, server, Client(server.url)


def send(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    """Sends a request over a connection of its own."""
    connection = socket.create_connection((server.host, server.port))
    payload = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(payload)}\r\n\r\n"
    connection.sendall(head.encode() + payload)
    return connection


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(
    slow: tuple[AsyncLLM, RunningServer, Client], stream: bool, n: int
) -> None:
    llm, server, _ = slow
    with send(server, {**ENDLESS, "stream": stream, "n": n}):
        wait_until(lambda: llm.stats()["num_running"] == n)
    wait_until(lambda: is_idle(llm) and server.num_active == 0)
    assert llm.stats()["num_cancelled_requests"] == n


@pytest.mark.parametrize("by", ["id", "header"])
def test_a_stream_is_cancelled_by_its_names(
    slow: tuple[AsyncLLM, RunningServer, Client], by: str
) -> None:
    _, server, client = slow
    headers = {"x-request-id": "mine"}
    body = {**ENDLESS, "stream": True}
    with client.http.stream("POST", PATH, json=body, headers=headers) as response:
        lines = response.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        name = first["id"] if by == "id" else "mine"
        cancelled = httpx2.post(f"{server.url}/v1/requests/{name}/cancel")
        assert cancelled.json() == {"cancelled": [first["id"]]}
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "cancelled"
    again = httpx2.post(f"{server.url}/v1/requests/{name}/cancel")
    assert error_of(again, 404)["code"] == "request_not_found"


def test_a_whole_answer_that_is_cancelled_is_499(
    slow: tuple[AsyncLLM, RunningServer, Client],
) -> None:
    llm, server, client = slow
    responses: list[httpx2.Response] = []
    headers = {"x-request-id": "mine"}
    ask = threading.Thread(
        target=lambda: responses.append(client.http.post(PATH, json=ENDLESS, headers=headers))
    )
    ask.start()
    wait_until(lambda: llm.stats()["num_running"] == 1)
    assert httpx2.post(f"{server.url}/v1/requests/mine/cancel").status_code == 200
    ask.join()
    assert error_of(responses[0], 499)["code"] == "cancelled"


def test_a_deadline_is_504_or_an_error_event(
    slow: tuple[AsyncLLM, RunningServer, Client],
) -> None:
    _, _, client = slow
    late = {**ENDLESS, "deadline_ms": 1000}
    assert client.error(PATH, late, 504)["code"] == "deadline_exceeded"
    events = client.chunks(PATH, **{**late, "prompt": "Two"})
    assert events[-1]["error"]["code"] == "deadline_exceeded"


def test_draining_refuses_new_requests_and_finishes_others(
    slow: tuple[AsyncLLM, RunningServer, Client],
) -> None:
    llm, server, client = slow
    assert client.get("/ready").status_code == 200
    with client.http.stream(
        "POST", PATH, json={**ENDLESS, "max_tokens": 50, "stream": True}
    ) as response:
        wait_until(lambda: llm.stats()["num_running"] == 1)
        drained: list[bool] = []
        drain = threading.Thread(target=lambda: drained.append(server.drain(30.0)))
        drain.start()
        other = Client(server.url)
        wait_until(lambda: other.get("/ready").status_code == 503)
        refused = other.post(PATH, ENDLESS)
        assert error_of(refused, 503)["type"] == "service_unavailable"
        assert int(refused.headers["retry-after"]) >= 1
        assert other.get("/health").status_code == 200
        assert len(parse_events(response.read().decode())) == 50
    drain.join()
    assert drained == [True]


def test_what_is_not_finished_in_time_ends_with_an_error_event(
    slow: tuple[AsyncLLM, RunningServer, Client],
) -> None:
    llm, server, client = slow
    with client.http.stream("POST", PATH, json={**ENDLESS, "stream": True}) as response:
        wait_until(lambda: llm.stats()["num_running"] == 1)
        assert not server.drain(0.05)
        events = parse_events(response.read().decode())
    assert events[-1]["error"]["type"] == "service_unavailable"


def test_a_closed_engine_is_told_to_all() -> None:
    with serving(SLOW) as (llm, server):
        client = Client(server.url)
        with client.http.stream("POST", PATH, json={**ENDLESS, "stream": True}) as response:
            wait_until(lambda: llm.stats()["num_running"] == 1)
            asyncio.run(llm.aclose())
            events = parse_events(response.read().decode())
        assert events[-1]["error"]["type"] == "service_unavailable"
        assert error_of(client.get("/health"), 503)
        assert error_of(client.get("/ready"), 503)
        assert error_of(client.post(PATH, ENDLESS), 503)
        assert client.get("/version").status_code == 200


def test_a_closed_server_lets_go_of_its_port_and_its_requests() -> None:
    with serving(SLOW) as (llm, server):
        connection = send(server, {**ENDLESS, "stream": True})
        wait_until(lambda: llm.stats()["num_running"] == 1)
        server.close()
        server.close()
        wait_until(lambda: is_idle(llm))
        connection.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((server.host, server.port))


def test_overload_is_429_with_whole_seconds_before_any_event() -> None:
    with serving(SLOW, max_num_seqs=1, queue_capacity=1) as (llm, server):
        client, body = Client(server.url), {**ENDLESS, "stream": True}
        with send(server, body):
            wait_until(lambda: llm.stats()["num_running"] == 1)
            with send(server, body):
                wait_until(lambda: llm.stats()["num_waiting"] == 1)
                refused = client.post(PATH, body)
        error = error_of(refused, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        wait_until(lambda: is_idle(llm))


def test_the_address_must_be_loopback_or_allowed() -> None:
    with LLM("null") as llm, pytest.raises(ValueError, match="loopback"):
        llm.serve_in_background(host="0.0.0.0", port=0)


def test_a_taken_port_is_an_os_error() -> None:
    with (
        LLM("null") as llm,
        llm.serve_in_background(port=0) as server,
        pytest.raises(OSError, match="in use"),
    ):
        llm.serve_in_background(port=server.port)


def test_an_llm_serves_beside_its_own_calls() -> None:
    with LLM("null", max_model_len=512) as llm:
        with llm.serve_in_background(port=0, served_model_name="mine") as server:
            client = Client(server.url)
            answer = client.complete(model="mine", prompt="One", max_tokens=5)
            (output,) = llm.generate("One", cbrs.SamplingParams(max_tokens=5), use_tqdm=False)
            assert answer["choices"][0]["text"] == output.outputs[0].text
        (output,) = llm.generate("Two", cbrs.SamplingParams(max_tokens=2), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 2


def test_serve_is_an_async_context_manager() -> None:
    async def run() -> None:
        async with AsyncLLM("null") as llm, cbrs.serve(llm, port=0) as server:
            body = {"model": "null", "messages": MESSAGES, "max_tokens": 3}
            async with httpx2.AsyncClient() as http:
                response = await http.post(f"{server.url}/v1/chat/completions", json=body)
            assert response.json()["usage"]["completion_tokens"] == 3

    asyncio.run(run())
