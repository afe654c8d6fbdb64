"""Connections: how many, how long, what is read as a request, and what becomes of slow clients."""

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from raw_kit import COMPLETIONS, Raw, get, post
from server_kit import Client, is_idle, serving, wait_until

from cbrs import AsyncLLM
from cbrs.serving import RunningServer, ServerLimits

ONE: dict[str, Any] = {"model": "null", "prompt": "One", "max_tokens": 1}
ENDLESS: dict[str, Any] = {**ONE, "max_tokens": 400}
QUICK: ServerLimits = {"head_timeout_s": 0.3, "body_timeout_s": 0.3}


@pytest.fixture(scope="module")
def quick() -> Iterator[tuple[AsyncLLM, RunningServer]]:
    """A server that gives up early on heads and bodies."""
    with serving(limits=QUICK) as served:
        yield served


@pytest.fixture
def server(quick: tuple[AsyncLLM, RunningServer]) -> Iterator[RunningServer]:
    """The server; what a test sends must not have become a request."""
    llm, server = quick
    before = llm.stats()["num_accepted_requests"]
    yield server
    assert llm.stats()["num_accepted_requests"] == before


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1])


# What is read as a request.


@pytest.mark.parametrize(
    "head",
    [
        "POST /v1/completions HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 3\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\ncontent-length: -3\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n",
        "GET /health HTTP/1.1\nhost: localhost\n\n",
        "GET /health HTTP/1.1\r\nhost: localhost\n\r\n",
        "GET /health HTTP/1.1\r\nhost: a\0b\r\n\r\n",
        "GET /health HTTP/1.1\r\na: b\r\n c: d\r\n\r\n",
        "GET /health HTTP/3\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n",
    ],
)
def test_doubtful_framing_is_refused_and_the_connection_closed(
    server: RunningServer, head: str
) -> None:
    with Raw(server) as raw:
        answer = raw.send(head + "abc").answer()
        assert answer.status == 400
        assert answer.error()["type"] == "invalid_request_error"
        assert answer.headers["connection"] == "close"
        assert raw.is_closed()
    with Raw(server) as raw:
        assert raw.send(get("/health")).answer().status == 200


def test_a_refusal_waits_for_its_turn(server: RunningServer) -> None:
    bad = "GET /health HTTP/1.1\ncontent-length: 30\n\n"
    with Raw(server) as raw:
        raw.send(get("/health") + get("/nothing") + bad + get("/health"))
        with raw.socket.makefile("rb") as stream:
            text = stream.read().decode()
    statuses = re.findall(r"HTTP/1\.1 (\d+)", text)
    assert statuses == ["200", "404", "400"], "nothing behind a doubtful head is a request"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (get("/health", f"a: {'b' * ((16 << 10) - len(get('/health', 'a: ')))}"), 200),
        (get("/health", f"a: {'b' * ((16 << 10) + 1 - len(get('/health', 'a: ')))}"), 431),
        (get("/health", *["a: b"] * 99), 200),
        (get("/health", *["a: b"] * 100), 431),
        (get("/health?" + "a" * ((8 << 10) - len("GET /health? HTTP/1.1"))), 200),
        (get("/health?" + "a" * ((8 << 10) + 1 - len("GET /health? HTTP/1.1"))), 414),
    ],
)
def test_a_head_has_limits(server: RunningServer, head: str, status: int) -> None:
    with Raw(server) as raw:
        answer = raw.send(head).answer()
        assert answer.status == status
        if status != 200:
            answer.error()
            assert raw.is_closed()


def test_a_chunked_body_is_read_and_ends_the_connection(client: Client, llm: AsyncLLM) -> None:
    data = json.dumps(ONE).encode()
    with client.http.stream("POST", COMPLETIONS, content=iter([data[:9], data[9:]])) as response:
        assert response.status_code == 200
        assert response.headers["connection"] == "close"
        assert json.loads(response.read())["choices"]


# How long it may take.


def test_a_head_has_a_time(server: RunningServer) -> None:
    with Raw(server) as raw:
        answer = raw.send("GET /health HTTP/1.1\r\nhos").answer()
        assert answer.status == 408
        assert "0.3 s" in answer.error()["message"]
        assert raw.is_closed()


def test_a_body_has_a_time(server: RunningServer) -> None:
    with Raw(server) as raw:
        answer = raw.send(post(ONE)[:-1]).answer()
        assert answer.status == 408
        assert "0.3 s" in answer.error()["message"]
        assert raw.is_closed()


def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    with serving("null:0.02", limits={"idle_timeout_s": 0.2}) as (_, server), Raw(server) as raw:
        # It takes longer than the time without a request.
        assert raw.send(post({**ONE, "max_tokens": 20})).answer().status == 200
        assert raw.is_closed()


# How much a body may have.


@pytest.mark.parametrize("field", [(), ("expect: 100-continue",)])
def test_a_body_that_says_to_be_too_long_is_refused_unread(
    server: RunningServer, field: tuple[str, ...]
) -> None:
    for length, status in (((4 << 20) + 1, 413), (1 << 62, 413)):
        lines = [f"POST {COMPLETIONS} HTTP/1.1", f"content-length: {length}", *field, "", ""]
        with Raw(server) as raw:
            answer = raw.send("\r\n".join(lines)).answer()
            assert answer.status == status
            assert str(4 << 20) in answer.error()["message"]
            assert raw.is_closed()


def test_a_chunked_body_above_the_limit_is_refused(server: RunningServer) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with Raw(server) as raw:
        raw.send(f"POST {COMPLETIONS} HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        raw.send(chunk * 64 + b"1\r\n \r\n")
        answer = raw.answer()
        assert answer.status == 413
        answer.error()
        assert raw.is_closed()


# How many there may be.


def test_one_connection_too_many_gets_an_error_and_probes_get_answers() -> None:
    with contextlib.ExitStack() as stack:
        _, server = stack.enter_context(serving(limits={"max_connections": 2}))
        first, second = (stack.enter_context(Raw(server)) for _ in range(2))
        for raw in (first, second):
            assert raw.send(get("/health")).answer().status == 200
        with Raw(server) as raw:
            answer = raw.send(post(ONE)).answer()
            assert answer.status == 503
            assert answer.error()["code"] == "too_many_connections"
            assert int(answer.headers["retry-after"]) >= 1
            assert raw.is_closed()
        # More than the server keeps beyond the limit: none of them asks for anything.
        waiting = [stack.enter_context(Raw(server)) for _ in range(100)]
        for path in ("/health", "/ready"):
            with Raw(server) as raw:
                answer = raw.send(get(path)).answer()
                assert answer.status == 200
                assert raw.is_closed(), "a probe has no place to stay"
        assert all(raw.is_closed() for raw in waiting[:30]), "the oldest had to go"
        assert second.send(post(ONE)).answer().status == 200, "who had a place keeps it"
        first.socket.close()
        again = stack.enter_context(Raw(server))

        def is_served() -> bool:
            nonlocal again
            status = again.send(post(ONE)).answer().status
            if status == 503:
                again = stack.enter_context(Raw(server))
            return status == 200

        wait_until(is_served)


def test_an_address_has_places_of_its_own() -> None:
    limits: ServerLimits = {"max_connections_per_address": 1}
    with serving(limits=limits) as (_, server), Raw(server) as first:
        assert first.send(get("/health")).answer().status == 200
        with Raw(server) as second:
            answer = second.send(post(ONE)).answer()
            assert (answer.status, answer.error()["code"]) == (503, "too_many_connections")
        with Raw(server, "127.0.0.2") as other:
            assert other.send(post(ONE)).answer().status == 200


# Clients that go away.


def check_gone(body: dict[str, Any], n: int) -> None:
    """A request whose client goes away ends within 2 steps, which take 0.2 s each."""
    with serving("null:0.2") as (llm, server):
        with Raw(server) as raw:
            raw.send(post(body))
            wait_until(lambda: llm.stats()["num_running"] == n)
        last_step = llm.stats()["num_steps"] + 2
        wait_until(lambda: is_idle(llm) and server.num_active == 0)
        stats = llm.stats()
        assert stats["num_steps"] <= last_step
        assert stats["num_cancelled_requests"] == n


def test_e01_a_client_that_was_killed_ends_its_whole_answer() -> None:
    check_gone(ENDLESS, 1)


def test_e11_a_client_that_goes_away_ends_all_choices_of_its_stream() -> None:
    check_gone({**ENDLESS, "stream": True, "n": 4}, 4)


# Clients that are slow.


def trickle(raws: list[Raw], seconds: float) -> None:
    """Sends one byte a second over each connection, as long as the server takes them."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for raw in raws:
            with contextlib.suppress(OSError):
                raw.socket.send(b"a")
        time.sleep(min(1.0, max(0.0, end - time.monotonic())))


def check_slow(num: int, limits: ServerLimits) -> None:
    """Slow heads and bodies, `num` of each, beside a client that is served as ever."""
    with serving(limits=limits) as (llm, server), contextlib.ExitStack() as stack:
        client = Client(server.url)
        expected = client.complete(prompt="One", max_tokens=9)["choices"]
        before, accepted = num_files(), llm.stats()["num_accepted_requests"]
        heads = [stack.enter_context(Raw(server)) for _ in range(num)]
        bodies = [stack.enter_context(Raw(server)) for _ in range(num)]
        for raw in heads:
            raw.send("GET /health HTTP/1.1\r\nx: a")
        lines = [
            f"POST {COMPLETIONS} HTTP/1.1",
            "host: localhost",
            "content-length: 100000",
            "",
            "",
        ]
        for raw in bodies:
            raw.send("\r\n".join(lines))
        assert client.complete(prompt="One", max_tokens=9)["choices"] == expected
        trickle(heads + bodies, limits.get("body_timeout_s", 30.0))
        assert client.complete(prompt="One", max_tokens=9)["choices"] == expected
        for raw in heads + bodies:
            assert raw.answer().status == 408
            assert raw.is_closed()
            raw.socket.close()
        wait_until(lambda: num_files() <= before)
        assert llm.stats()["num_accepted_requests"] == accepted + 2
        print(f"{num} slow heads and {num} slow bodies refused; {num_files()} files open")


def test_slow_heads_and_bodies_are_given_up() -> None:
    check_slow(100, {"head_timeout_s": 0.3, "body_timeout_s": 0.5})


@pytest.mark.soak
def test_a_thousand_slow_heads_and_bodies_are_given_up() -> None:
    check_slow(1000, {})


# The first event of this stream has about 400 kB, more than the system buffers.
LONG = list(range(3000))
MUCH = {**ONE, "prompt": LONG, "max_tokens": 5000, "echo": True, "logprobs": 5, "stream": True}


@contextlib.contextmanager
def stalled(
    num: int, limits: ServerLimits, step_s: float = 0.005
) -> Iterator[tuple[AsyncLLM, RunningServer, Client]]:
    """`num` readers that take nothing of long streams, until the block ends."""
    options: dict[str, Any] = {"max_model_len": 8192, "max_num_seqs": num + 1}
    options["num_blocks"] = (num + 1) * 512
    with serving(f"null:{step_s}", limits=limits, **options) as (llm, server):
        client = Client(server.url)
        assert client.get("/health").status_code == 200
        files = num_files()
        with contextlib.ExitStack() as stack:
            for _ in range(num):
                stack.enter_context(Raw(server, receive_buffer=4096)).send(post(MUCH))
            wait_until(lambda: llm.stats()["num_accepted_requests"] == num)
            yield llm, server, client
        wait_until(lambda: num_files() <= files)


def wait_for_full_speed(llm: AsyncLLM, client: Client) -> None:
    """Waits until a request takes about as many steps as it has tokens."""
    expected: list[Any] = []

    def is_fast() -> bool:
        before = llm.stats()["num_steps"]
        answer = client.complete(prompt="One", max_tokens=20, ignore_eos=True)
        expected.append(answer["choices"])
        # Some steps may pass between an answer and the look at the counters.
        return bool(llm.stats()["num_steps"] - before < 20 + 40)

    wait_until(is_fast)
    assert expected[0] == expected[-1]


def test_readers_that_take_nothing_slow_nobody_down() -> None:
    with stalled(20, {}) as (llm, _, client):
        wait_until(lambda: llm.stats()["num_scheduled_tokens"] >= 20 * len(LONG))
        wait_for_full_speed(llm, client)
        assert llm.stats()["num_running"] == 20, "all of them are still there"


def test_readers_that_take_nothing_are_cancelled() -> None:
    with stalled(5, {"write_timeout_s": 0.3}) as (llm, server, client):
        wait_until(lambda: server.num_active == 0 and is_idle(llm))
        assert llm.stats()["num_cancelled_requests"] == 5
        wait_for_full_speed(llm, client)


@pytest.mark.soak
def test_two_hundred_readers_that_take_nothing() -> None:
    kib = resident_kib()
    # The streams would take 100 s, so that they are given up, after 30 s, before they have ended.
    with stalled(200, {}, step_s=0.02) as (llm, server, client):
        wait_until(lambda: llm.stats()["num_scheduled_tokens"] >= 200 * len(LONG), 60.0)
        wait_for_full_speed(llm, client)
        assert llm.stats()["num_running"] == 200, "all of them are still there"
        print(f"200 stalled readers: {(resident_kib() - kib) / 200:.0f} KiB for each")
        wait_until(lambda: server.num_active == 0 and is_idle(llm), 120.0)
        assert llm.stats()["num_cancelled_requests"] == 200
        wait_for_full_speed(llm, client)


def test_a_slow_reader_gets_everything() -> None:
    """It takes longer than the time-out altogether, but never takes nothing for so long."""
    body = {**ONE, "max_tokens": 2500, "logprobs": 5, "stream": True}
    with (
        serving(max_model_len=8192, limits={"write_timeout_s": 1.0}) as (_, server),
        Raw(server, receive_buffer=128 << 10) as raw,
        raw.send(post(body)).socket.makefile("rb", buffering=0) as stream,
    ):
        data = b""
        while not data.endswith(b"0\r\n\r\n") and (part := stream.read(64 << 10)):
            data += part
            time.sleep(0.07)
    assert data.count(b"data: ") == 2501
    assert b"data: [DONE]" in data
