"""When an answer is written, whose turn it is on a connection, and when nobody waits any more."""

import asyncio
import re
import threading
import time
from typing import Any

import pytest
from raw_kit import COMPLETIONS, Raw, get, post
from server_kit import Client, is_idle, serving, wait_until

from cbrs import AsyncLLM
from cbrs.cli import serve
from cbrs.errors import EngineDeadError
from cbrs.serving import ServerLimits

ONE: dict[str, Any] = {"model": "null", "prompt": "One", "max_tokens": 1}
# Its whole answer has some megabytes, more than the system ever buffers.
NUM_PROMPTS = 8
LARGE = {**ONE, "prompt": [list(range(3000))] * NUM_PROMPTS, "echo": True, "logprobs": 5}
SMALL_BUFFER = 4096


def is_produced(llm: AsyncLLM) -> bool:
    """Whether all prompts of the only request have come and all of its tokens are there."""
    return llm.stats()["num_accepted_requests"] == NUM_PROMPTS and is_idle(llm)


# When an answer is written.


@pytest.mark.parametrize("stream", [False, True])
def test_draining_waits_for_the_last_byte(stream: bool) -> None:
    with (
        serving(max_model_len=8192) as (llm, server),
        Raw(server, receive_buffer=SMALL_BUFFER) as raw,
    ):
        raw.send(post({**LARGE, "stream": stream}))
        wait_until(lambda: is_produced(llm))
        drained: list[bool] = []
        drain = threading.Thread(target=lambda: drained.append(server.drain(60.0)))
        drain.start()
        time.sleep(0.3)
        assert server.num_active == 1
        answer = raw.answer()
        drain.join()
        assert drained == [True]
        assert answer.status == 200
        assert answer.body.count(b'"finish_reason":"length"') == NUM_PROMPTS
        assert len(answer.body) > 2_000_000


def test_what_nobody_reads_is_not_waited_for_without_end() -> None:
    with (
        serving(max_model_len=8192, limits={"write_timeout_s": 0.3}) as (llm, server),
        Raw(server, receive_buffer=SMALL_BUFFER) as raw,
    ):
        raw.send(post(LARGE))
        wait_until(lambda: is_produced(llm))
        assert server.drain(60.0), "a reader that takes nothing has gone, as others have"
    with (
        serving(max_model_len=8192) as (llm, server),
        Raw(server, receive_buffer=SMALL_BUFFER) as raw,
    ):
        raw.send(post(LARGE))
        wait_until(lambda: is_produced(llm))
        assert not server.drain(0.0), "an answer was cut"


def test_answers_of_other_routes_are_waited_for() -> None:
    body = {"tokens": [5] * 400_000}
    with (
        serving() as (_, server),
        Raw(server, receive_buffer=SMALL_BUFFER) as raw,
    ):
        raw.send(post(body, path="/detokenize"))
        wait_until(lambda: server.num_active == 1)
        time.sleep(0.2)
        assert server.num_active == 1
        assert raw.answer().status == 200
        wait_until(lambda: server.num_active == 0)


# Whose turn it is.


def chunked(body: bytes) -> bytes:
    """A body in chunks."""
    return f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"


ENDLESS = post({**ONE, "max_tokens": 400})
_, _, BODY = ENDLESS.partition(b"\r\n\r\n")
CHUNKED_HEAD = "\r\n".join(
    [f"POST {COMPLETIONS} HTTP/1.1", "host: localhost", "transfer-encoding: chunked", "", ""]
)


@pytest.mark.parametrize(
    "sent",
    [
        ENDLESS + get("/health").encode(),
        ENDLESS + ENDLESS + b"\r\n\r\nno request",
        # More than is taken while an answer is under way.
        ENDLESS + b"x" * 60_000,
        CHUNKED_HEAD.encode() + chunked(BODY) + ENDLESS,
    ],
    ids=["pipelined", "several", "much", "chunked"],
)
def test_a_client_that_goes_away_is_noticed_whatever_it_had_sent(sent: bytes) -> None:
    with serving("null:0.2") as (llm, server):
        with Raw(server) as raw:
            raw.send(sent)
            wait_until(lambda: llm.stats()["num_running"] == 1)
        last_step = llm.stats()["num_steps"] + 2
        wait_until(lambda: is_idle(llm) and server.num_active == 0)
        stats = llm.stats()
        assert stats["num_steps"] <= last_step
        assert (stats["num_accepted_requests"], stats["num_cancelled_requests"]) == (1, 1)


def test_pipelined_requests_are_answered_in_their_order() -> None:
    with serving() as (llm, server), Raw(server) as raw:
        paths = ["/health", "/nothing", "/ready"] * 10
        sent = b"".join(get(path).encode() + post({**ONE, "max_tokens": 3}) for path in paths)
        raw.send(sent + get("/health", "connection: close").encode())
        with raw.socket.makefile("rb") as stream:
            text = stream.read().decode()
        assert llm.stats()["num_accepted_requests"] == len(paths)
    expected = [status for _ in range(10) for status in ("200", "200", "404", "200", "200", "200")]
    assert re.findall(r"HTTP/1\.1 (\d+)", text) == [*expected, "200"]


def test_empty_lines_behind_a_body_are_no_request() -> None:
    limits: ServerLimits = {"head_timeout_s": 0.2}
    with serving(limits=limits) as (_, server), Raw(server) as raw:
        for lines in (b"\r\n", b"\r\n\r\n\r\n", b"\r"):
            assert raw.send(post(ONE) + lines).answer().status == 200
            time.sleep(0.4)
            if lines == b"\r":
                raw.send(b"\n")
        assert raw.send(get("/health")).answer().status == 200


# When nobody waits any more.


def test_the_head_of_a_further_request_has_its_own_time() -> None:
    limits: ServerLimits = {"idle_timeout_s": 0.3, "head_timeout_s": 30.0}
    with serving(limits=limits) as (_, server), Raw(server) as raw:
        assert raw.send(get("/health")).answer().status == 200
        raw.send(get("/health")[:9])
        time.sleep(0.6)
        assert raw.send(get("/health")[9:]).answer().status == 200
        assert raw.is_closed(), "without a byte"
    limits = {"idle_timeout_s": 30.0, "head_timeout_s": 0.3}
    with serving(limits=limits) as (_, server), Raw(server) as raw:
        assert raw.send(get("/health")).answer().status == 200
        time.sleep(0.6)
        answer = raw.send(get("/health")[:9]).answer()
        assert (answer.status, raw.is_closed()) == (408, True)


# An engine that dies while the server ends.


def test_an_engine_that_dies_while_requests_finish_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(block: bool = False) -> None:
        raise RuntimeError("invariant broken")

    with serving("null:0.01") as (llm, server):
        client, engine = Client(server.url), llm.engine
        signals = serve._Signals()
        signals.count = 1

        def kill() -> None:
            wait_until(lambda: client.get("/ready").status_code == 503)
            monkeypatch.setattr(engine, "_schedule", break_down)

        with Raw(server) as raw:
            raw.send(post({**ONE, "max_tokens": 400}))
            wait_until(lambda: llm.stats()["num_running"] == 1)
            killer = threading.Thread(target=kill)
            killer.start()
            with pytest.raises(EngineDeadError, match="invariant broken"):
                serve._end(llm, server, signals, 60.0)
            killer.join()
            assert raw.answer().status == 503
        asyncio.run(llm.aclose())
