"""Signals to `cbrs serve`: while it loads, while nobody reads its log, while it writes answers."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from server_kit import Client, wait_until
from server_process import START_TIMEOUT_S, server_process

import cbrs.__main__
import cbrs.cli

PATH = "/v1/completions"
PROGRAM = Path(__file__).parent / "programs" / "loading.py"


def test_sighup_before_the_command_can_reload_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["cbrs", "serve", "null"])
    monkeypatch.setattr(cbrs.cli, "main", lambda: signal.getsignal(signal.SIGHUP))
    before = signal.getsignal(signal.SIGHUP)
    try:
        assert cbrs.__main__.main() == signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end_of_loading_is_not_waited_for(number: signal.Signals) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CBRS_")}
    pipe = subprocess.PIPE
    command = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "loading\n"
            process.send_signal(signal.SIGHUP)
            time.sleep(0.2)
            assert process.poll() is None, "what SIGHUP asks for comes later"
            process.send_signal(number)
            told = process.stderr.read()
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert told == f"cbrs: {number.name} while loading: nothing was served\n"


def test_a_log_that_nobody_reads_holds_nothing_up(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("target_itl_ms = 500\n")
    command = [sys.executable, "-m", "cbrs", "serve", "null:0.01", "--port", "0"]
    command += ["--served-model-name", "null", "--policy", str(policy)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, bufsize=1) as process:
        try:
            assert process.stderr is not None
            # From here on the log is larger than what the system holds.
            fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
            url = next(
                line.rsplit(" ", 1)[1].strip() for line in process.stderr if "serving null" in line
            )
            client = Client(url)
            for _ in range(100):
                assert client.get("/health").status_code == 200
            body = {"model": "null", "prompt": "One", "max_tokens": 150, "stream": True}
            with client.http.stream("POST", PATH, json=body) as stream:
                other = Client(url)
                wait_until(lambda: other.get("/stats").json()["num_running"] == 1)
                policy.write_text("target_itl_ms = 400\n")
                process.send_signal(signal.SIGHUP)

                def target() -> object:
                    return other.get("/version").json()["server"]["target_itl_ms"]["value"]

                wait_until(lambda: target() == 400)
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: other.get("/ready").status_code == 503)
                assert stream.read().count(b"data: {") == 150
            started = time.monotonic()
            assert process.wait(20) == 0
            assert time.monotonic() - started < 10.0
        finally:
            process.kill()
    Client.close_all()


@pytest.mark.parametrize(("is_read", "code"), [(True, 0), (False, 1)])
def test_an_answer_is_written_to_its_end_or_the_exit_code_says_so(is_read: bool, code: int) -> None:
    # The answer has some megabytes, more than the system ever buffers.
    body = {"model": "null", "prompt": [list(range(3000))] * 8, "max_tokens": 1, "echo": True}
    payload = json.dumps({**body, "logprobs": 5}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    options = ("--max-model-len", "8192", "--drain-timeout", "30" if is_read else "0.3")
    with server_process("null", "--port", "0", *options) as server, socket.socket() as connection:
        connection.settimeout(START_TIMEOUT_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        connection.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)

        def is_produced() -> bool:
            stats = httpx2.get(f"{server.url}/stats").json()
            return bool(stats["num_accepted_requests"] == 8 and stats["num_used_blocks"] == 0)

        wait_until(is_produced)
        server.signal(signal.SIGTERM)
        if is_read:
            time.sleep(1.5)
            with connection.makefile("rb") as answer:
                text = answer.read()
            assert text.endswith(b"}")
            assert len(text) > 2_000_000
        assert server.end() == code
