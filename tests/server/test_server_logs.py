"""The access log: one line a request, without a word of what it says."""

import argparse
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from http_kit import send
from raw_kit import Raw, get, post
from server_kit import Client, wait_until

from cbrs import AsyncLLM
from cbrs.cli.logs import add_log_options, set_up_logs
from cbrs.cli.settings import Settings, Value
from cbrs.serving import RunningServer

PATH = "/v1/completions"
MARKER = "Zanzibar"

Lines = Callable[[], list[dict[str, Any]]]


@contextmanager
def logging_server(
    capfd: pytest.CaptureFixture[str],
    model: str = "null",
    log_format: Any = "json",
    limits: Any = None,
    **options: Any,
) -> Iterator[tuple[Client, RunningServer, Lines]]:
    """A server, and what it has logged since the last look, once it has written `number` lines."""
    import asyncio

    llm = AsyncLLM(model, **{"max_model_len": 512, **options})
    names = ["null"]
    server = RunningServer(llm, served_model_names=names, access_log=log_format, limits=limits)
    seen: list[str] = []

    def lines() -> list[dict[str, Any]]:
        seen.extend(capfd.readouterr().err.splitlines())
        return [json.loads(line) for line in seen]

    try:
        yield Client(server.url), server, lines
    finally:
        server.close()
        asyncio.run(llm.aclose())


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": MARKER, "max_tokens": 3, **fields}


def test_each_request_has_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    with logging_server(capfd) as (client, _, lines):
        fields = body(prompt=[5] * 40, tenant="acme", priority="batch")
        first = client.post(PATH, fields, **{"x-request-id": "mine"})
        streamed = client.post(PATH, {**fields, "stream": True, "n": 2})
        client.post(PATH, body(temperature=-1))
        client.get("/health")
        client.get(f"/{MARKER}?{MARKER}")
        wait_until(lambda: len(lines()) == 5)
        whole, stream, refused, health, unknown = lines()
    assert whole == {
        "time": whole["time"],
        "level": "info",
        "logger": "cbrs.access",
        "method": "POST",
        "route": PATH,
        "status": 200,
        "duration_s": whole["duration_s"],
        "id": first.json()["id"],
        "client_id": "mine",
        "tenant": "acme",
        "class": "batch",
        "prompt_tokens": 40,
        "cached_tokens": 0,
        "output_tokens": 3,
        "ttft_s": whole["ttft_s"],
        "finish_reason": "length",
    }
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d\d\dZ", whole["time"])
    assert 0 < whole["ttft_s"] <= whole["duration_s"] < 30
    assert stream["id"] == streamed.headers["x-request-id"]
    assert "client_id" not in stream
    assert (stream["prompt_tokens"], stream["cached_tokens"], stream["output_tokens"]) == (
        40,
        32,
        6,
    )
    assert 0 < stream["ttft_s"] <= stream["duration_s"] < 30
    assert (refused["status"], refused["error"]) == (400, "invalid_request_error")
    assert "output_tokens" not in refused
    assert (health["method"], health["route"], health["status"]) == ("GET", "/health", 200)
    assert (unknown["route"], unknown["status"], unknown["error"]) == (
        "unknown",
        404,
        "unknown_path",
    )


def test_text_lines_say_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    with logging_server(capfd, log_format="text") as (client, server, _):
        client.post(PATH, body(tenant='a "b"=c\\'), **{"x-request-id": "mine"})
        server.close()
        (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("cbrs: access time=20")
    assert f" method=POST route={PATH} status=200 " in line
    assert r' client_id=mine tenant="a \"b\"=c\\" class=standard ' in line
    assert line.endswith(" finish_reason=length")


def test_a_client_that_goes_away_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with logging_server(capfd, "null:0.01") as (client, server, lines):
        for stream in (True, False):
            payload = json.dumps(body(max_tokens=400, stream=stream)).encode()
            head = (
                f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(payload)}\r\n\r\n"
            )
            with socket.create_connection((server.host, server.port)) as connection:
                connection.sendall(head.encode() + payload)
                wait_until(lambda: server.num_active == 1)
            wait_until(lambda: server.num_active == 0)
        wait_until(lambda: len(lines()) == 2)
        stream_line, whole_line = lines()
        assert stream_line["status"] == whole_line["status"] == 499
        assert stream_line["finish_reason"] == whole_line["finish_reason"] == "cancelled"
        assert stream_line["error"] == whole_line["error"] == "client_closed"
        metrics = client.get("/metrics").text
        assert re.search(r'http_responses_total\{[^}]*status="499"\} 1\n', metrics)


def test_a_line_comes_when_the_answer_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    """The answer has some megabytes, more than the system ever buffers."""
    large = post(body(prompt=[list(range(3000))] * 8, echo=True, logprobs=5))
    limits = {"write_timeout_s": 0.8}
    with logging_server(capfd, max_model_len=8192, limits=limits) as (_, server, lines):
        with Raw(server, receive_buffer=4096) as raw:
            raw.send(large)
            time.sleep(0.4)
            assert lines() == []
            assert raw.answer().status == 200
            wait_until(lambda: len(lines()) == 1)
        with Raw(server, receive_buffer=4096) as raw:
            raw.send(large)
            # Produced, and so far only written in part.
            assert raw.socket.recv(1)
        wait_until(lambda: len(lines()) == 2)
        with Raw(server, receive_buffer=4096) as raw:
            raw.send(large)
            wait_until(lambda: len(lines()) == 3)
        read, gone, stalled = lines()
    assert (read["status"], gone["status"], stalled["status"]) == (200, 499, 499)
    assert {line["output_tokens"] for line in (read, gone, stalled)} == {24}
    assert min(read["duration_s"], stalled["duration_s"]) > 0.3


def test_refusals_of_the_connection_are_counted_and_logged(
    capfd: pytest.CaptureFixture[str],
) -> None:
    limits = {"head_timeout_s": 0.2, "max_connections": 3}
    with (
        logging_server(capfd, limits=limits) as (client, server, lines),
        Raw(server) as first,
        Raw(server) as second,
    ):
        assert client.get("/ready").status_code == 200
        for raw, sent, status in (
            (first, get("/health", "transfer-encoding: x"), 400),
            (second, get("/hea")[:9], 408),
        ):
            assert raw.send(sent).answer().status == status
            assert raw.is_closed()
            raw.socket.close()
        for sent, status in (
            (get("/" + "a" * (8 << 10)), 414),
            (get("/health", *["a: b"] * 100), 431),
        ):
            with Raw(server) as raw:
                assert raw.send(sent).answer().status == status
        with Raw(server) as first, Raw(server) as second, Raw(server) as third:
            for raw in (first, second):
                assert raw.send(get("/ready")).answer().status == 200
            assert third.send(post(body())).answer().status == 503
        wait_until(lambda: len(lines()) == 8)
        refused = [line for line in lines() if line["route"] != "/ready"]
        metrics = client.get("/metrics").text
    told = [(line["status"], line["method"], line["error"]) for line in refused]
    kind = "invalid_request_error"
    assert told == [
        (400, "-", kind),
        (408, "-", kind),
        (414, "-", kind),
        (431, "-", kind),
        (503, "POST", "too_many_connections"),
    ]
    assert {(line["route"], line["id"]) for line in refused} == {("-", "-")}
    for status in (400, 408, 414, 431, 503):
        assert re.search(rf'http_responses_total\{{[^}}]*status="{status}"\}} 1\n', metrics)


def test_the_line_of_what_ended_early_has_all_that_was_computed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with logging_server(capfd, "null:0.01") as (client, server, lines):

        def stat(name: str) -> int:
            return int(client.get("/stats").json()[name])

        def lines_of_route() -> list[dict[str, Any]]:
            return [line for line in lines() if line["route"] == PATH]

        for number, is_cancelled in enumerate((True, False), 1):
            fields = body(prompt=[5] * 40, max_tokens=400, n=2, cache_salt=str(number))
            before = stat("num_output_tokens")
            with send((server.host, server.port), fields, x_request_id="mine") as connection:
                wait_until(lambda least=before + 6: stat("num_output_tokens") >= least)
                if is_cancelled:
                    client.http.post("/v1/requests/mine/cancel")
                    assert b" 499 " in connection.recv(100)
            wait_until(lambda: stat("num_running") == 0)
            wait_until(lambda number=number: len(lines_of_route()) == number)
            line = lines_of_route()[-1]
            assert line["status"] == 499
            assert line["error"] == ("cancelled" if is_cancelled else "client_closed")
            assert line["finish_reason"] == "cancelled"
            computed = stat("num_output_tokens") - before
            assert (line["prompt_tokens"], line["output_tokens"]) == (40, computed)
            assert 0 < line["ttft_s"] < line["duration_s"]


def test_nothing_of_a_prompt_or_an_answer_is_logged(capfd: pytest.CaptureFixture[str]) -> None:
    with logging_server(capfd) as (client, server, _):
        said = {"role": "user", "content": MARKER}
        for stream in (False, True):
            client.post(PATH, body(stream=stream, echo=True, stop=[MARKER]))
            chat = {"model": "null", "messages": [said], "max_tokens": 3, "stream": stream}
            client.post("/v1/chat/completions", chat)
        client.post("/tokenize", {"prompt": MARKER})
        client.post("/detokenize", {"tokens": [1, 2], MARKER: 1})
        client.post(PATH, body(prompt=MARKER * 1000))
        client.post(PATH, body(user=MARKER, metadata={MARKER: MARKER}, cache_salt=MARKER))
        client.post(PATH, body(**{MARKER: 1}))
        client.http.post(PATH, content=f'{{"{MARKER}": "{MARKER}'.encode())
        client.post(PATH, body(tenant=MARKER * 100))
        client.http.request(MARKER, PATH)
        client.get(f"/v1/models/{MARKER}")
        client.get(f"/v1/requests/{MARKER}")
        server.close()
        log = capfd.readouterr().err
    assert len(log.splitlines()) == 14
    assert MARKER not in log
    assert "quick" not in log, "what the model says"


def parsed(*arguments: str) -> dict[str, Value]:
    parser = argparse.ArgumentParser()
    add_log_options(parser.add_argument_group())
    settings = Settings(parser)
    return settings.resolve(parser.parse_args(arguments), {})[0]


@pytest.mark.parametrize(
    ("arguments", "level", "access_log"),
    [
        ((), logging.INFO, "text"),
        (("--log-format", "json"), logging.INFO, "json"),
        (("--no-access-log",), logging.INFO, None),
        (("--log-level", "warning"), logging.WARNING, None),
        (("--log-level", "debug", "--log-format", "json"), logging.DEBUG, "json"),
    ],
)
def test_options_choose_what_is_logged(
    arguments: tuple[str, ...], level: int, access_log: str | None
) -> None:
    logger = logging.getLogger("cbrs")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        assert set_up_logs(parsed(*arguments)) == access_log
        assert logger.level == level
    finally:
        logger.setLevel(before)


def test_a_server_logs_json_and_nothing_else() -> None:
    command = [sys.executable, "-m", "cbrs", "serve", "null", "--port", "0", "--log-format", "json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(json.loads(line))
                if found := re.search(r"serving null at (http://\S+)", lines[-1]["message"]):
                    break
            answer = Client(found[1]).complete(prompt=MARKER, max_tokens=2)
            process.send_signal(signal.SIGTERM)
            lines += [json.loads(line) for line in process.stderr]
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert all({"time", "level", "logger"} <= line.keys() for line in lines)
    (access,) = (line for line in lines if line["logger"] == "cbrs.access")
    assert access["id"] == answer["id"]
    assert MARKER not in json.dumps(lines)


def test_a_wrong_format_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="access_log"), logging_server(capfd, log_format="xml"):
        pass
