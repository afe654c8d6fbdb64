"""Faults that other engines had when requests, clients or engines end; named after the reports."""

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from http_kit import (
    COMPLETIONS,
    fail_at_token,
    read_chunked,
    reader_process,
    request_bytes,
    resident_kib,
    send,
    server_program,
)
from server_kit import MESSAGES, Client, error_of, is_idle, parse_events, serving, wait_until

from cbrs import AsyncLLM
from cbrs._core import run_load
from cbrs.serving import RunningServer

CHATS = "/v1/chat/completions"
ENDLESS: dict[str, Any] = {
    "model": "null",
    "prompt": "One",
    "max_tokens": 8_000,
    "ignore_eos": True,
}


@pytest.fixture
def slow() -> Iterator[tuple[AsyncLLM, RunningServer, Client]]:
    """Ten milliseconds for each token: an endless request takes far longer than any test waits."""
    with serving("null:0.01", max_model_len=8_192, num_blocks=4_096) as (llm, server):
        yield llm, server, Client(server.url)


def test_e01_a_whole_answer_ends_when_its_client_is_killed(
    slow: tuple[AsyncLLM, RunningServer, Client],
) -> None:
    llm, server, client = slow
    with reader_process((server.host, server.port), ENDLESS) as process:
        wait_until(lambda: llm.stats()["num_output_tokens"] >= 5)
        process.kill()
    wait_until(lambda: is_idle(llm) and server.num_active == 0)
    stats = llm.stats()
    assert stats["num_cancelled_requests"] == 1
    assert stats["num_output_tokens"] < 5_000
    assert client.complete(prompt="One", max_tokens=1)["choices"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("n", [1, 3])
def test_e09_nothing_follows_an_error_event_but_done(
    monkeypatch: pytest.MonkeyPatch, path: str, n: int
) -> None:
    with serving("null:0.005") as (llm, server):
        fail_at_token(monkeypatch, llm, 5)
        fields = {"messages": MESSAGES} if path == CHATS else {"prompt": "One"}
        body = {"model": "null", "stream": True, "max_tokens": 50, "n": n, **fields}
        with socket.create_connection((server.host, server.port), timeout=30) as connection:
            connection.sendall(request_bytes(body, path))
            *tokens, last = parse_events(read_chunked(connection).decode())
            assert last["error"]["type"] == "server_error"
            assert last["error"]["code"] == "engine_error"
            assert "out of memory in this step" in last["error"]["message"]
            first = [
                choice
                for chunk in tokens
                for choice in chunk["choices"]
                if choice["index"] == 0 and (path == COMPLETIONS or choice["delta"].get("content"))
            ]
            assert len(first) == 5
            assert not any(choice["finish_reason"] for choice in first)
            # Not a byte is left, and the connection serves the next request.
            connection.sendall(request_bytes({**body, "max_tokens": 3}, path))
            assert "error" not in parse_events(read_chunked(connection).decode())[-1]
        wait_until(lambda: is_idle(llm))


def test_e11_a_client_that_leaves_takes_all_its_choices_with_it(
    slow: tuple[AsyncLLM, RunningServer, Client],
) -> None:
    llm, server, client = slow
    body = {**ENDLESS, "n": 4, "stream": True}
    with send((server.host, server.port), body, x_request_id="four") as connection:
        wait_until(lambda: llm.stats()["num_running"] == 4)
        received = b""
        # The head may come alone.
        while (found := re.search(rb'"id":"(cmpl-[0-9a-f]+)"', received)) is None:
            more = connection.recv(1 << 16)
            assert more, "it goes on"
            received += more
    wait_until(lambda: is_idle(llm) and server.num_active == 0)
    assert llm.stats()["num_cancelled_requests"] == 4
    for name in ("four", found[1].decode()):
        client.error(f"/v1/requests/{name}/cancel", None, 404)


def test_e16_a_dead_engine_is_told_by_its_health_and_to_all_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def break_down(block: bool = False) -> None:
        raise RuntimeError("invariant broken")

    with serving("null:0.01", max_num_seqs=2) as (llm, server):
        client = Client(server.url)
        whole: list[httpx2.Response] = []
        body = {**ENDLESS, "max_tokens": 400}

        def ask() -> None:
            whole.append(httpx2.post(server.url + COMPLETIONS, json=body, timeout=30))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        with client.http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
            for thread in threads:
                thread.start()
            wait_until(lambda: llm.stats()["num_waiting"] == 1)
            monkeypatch.setattr(llm.engine, "_schedule", break_down)
            last = parse_events(response.read().decode())[-1]
        assert last["error"]["type"] == "service_unavailable"
        for thread in threads:
            thread.join(30)
        assert [error_of(response, 503)["type"] for response in whole] == [
            "service_unavailable"
        ] * 2
        for path in ("/health", "/ready"):
            assert error_of(client.get(path), 503)["message"] == "the engine has stopped"
        for path in (COMPLETIONS, CHATS):
            fields = {"messages": MESSAGES} if path == CHATS else {"prompt": "One"}
            assert client.error(path, {"model": "null", **fields}, 503)
        assert server.num_active == 0
        asyncio.run(llm.aclose())


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_h09_an_error_in_mid_stream_is_openais_error_object(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    with serving("null:0.005") as (llm, server):
        fail_at_token(monkeypatch, llm, 3)
        fields = {"messages": MESSAGES} if path == CHATS else {"prompt": "One"}
        *_, last = Client(server.url).chunks(path, max_tokens=9, **fields)
        assert list(last) == ["error"]
        assert last["error"].pop("message").endswith("out of memory in this step")
        assert last["error"] == {"type": "server_error", "param": None, "code": "engine_error"}


def overload(server: RunningServer, duration_s: float, num_waiting: int) -> dict[str, Any]:
    """About ten times what the server can do: it is a closed loop of ten times its places."""
    return run_load(
        {
            "url": server.url,
            "model": "null",
            "concurrency": 10 * num_waiting,
            "duration_s": duration_s,
            "prompt_tokens": 8,
            "output_tokens": 16,
            "vocab_size": 200,
        }
    )


def test_h27_the_queue_is_bounded_and_the_rest_is_told_when_to_come_back() -> None:
    with serving("null:0.002", max_num_seqs=4, queue_capacity=8) as (llm, server):
        longest = 0
        is_over = threading.Event()

        def watch() -> None:
            nonlocal longest
            while not is_over.wait(0.001):
                longest = max(longest, llm.stats()["num_waiting"])

        watcher = threading.Thread(target=watch)
        watcher.start()
        report = overload(server, 2.0, 12)
        is_over.set()
        watcher.join()
        assert 0 < longest <= 8
        assert set(report["statuses"]) == {"200", "429"}
        assert report["statuses"]["429"] > 0
        # Accepted requests are finished, not dropped for newer ones.
        wait_until(lambda: is_idle(llm))
        assert llm.stats()["num_accepted_requests"] == report["statuses"]["200"]
        assert llm.stats()["num_length_requests"] == report["statuses"]["200"]


def series(metrics: str) -> set[str]:
    """The names and labels in a text of metrics, without the values."""
    lines = [line for line in metrics.splitlines() if line and not line.startswith("#")]
    return {line.rsplit(" ", 1)[0] for line in lines}


def ask_many(client: Client, count: int) -> None:
    """Requests that succeed, and some that are refused, under names of their own."""
    report = run_load(
        {
            "url": str(client.http.base_url),
            "model": "null",
            "concurrency": 32,
            "num_requests": count,
            "prompt_tokens": 8,
            "output_tokens": 2,
            "vocab_size": 200,
            "extra_body": {"user": "somebody"},
        }
    )
    assert report["statuses"] == {"200": count}
    for number in range(20):
        client.post(COMPLETIONS, {"model": "null", "n": 0}, x_request_id=f"own-{number}-{count}")


def check_metrics(client: Client, count: int) -> None:
    """The metrics after `count` requests have the series that they had after 1,000."""
    ask_many(client, 1_000)
    before = client.get("/metrics")
    assert before.status_code == 200
    ask_many(client, count)
    after = client.get("/metrics")
    assert series(after.text) == series(before.text)
    # The numbers have become longer, and nothing else.
    assert len(after.text) < len(before.text) + 8 * len(series(after.text))
    assert not re.search(r"own-|cmpl-|somebody", after.text)


def test_h29_metrics_do_not_grow_with_the_number_of_requests() -> None:
    with serving() as (_, server):
        check_metrics(Client(server.url), 2_000)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_h29_neither_metrics_nor_memory_grow_in_100000_requests() -> None:
    # Not in this process, whose memory the load generator uses too.
    with server_program(model="null", max_model_len=512, max_num_seqs=16) as (process, client):
        check_metrics(client, 2_000)
        start_kib = resident_kib(process.pid)
        check_metrics(client, 100_000)
        grown_kib = resident_kib(process.pid) - start_kib
        print(f"\n100,000 requests: {grown_kib} KiB more")
        assert grown_kib < 2048
