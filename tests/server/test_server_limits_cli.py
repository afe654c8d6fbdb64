"""Limits as options of `cbrs serve`, and the files that connections need."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_kit import Client, wait_until

from cbrs.cli import main


@contextmanager
def process(*options: str, soft: int, hard: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process with limits of open files, once it listens, and what it has logged."""
    limited = f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"'
    command = [sys.executable, "-m", "cbrs", "serve", "null", "--port", "0", *options]
    command = ["sh", "-c", limited, "sh", *command]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            logged = ""
            while "serving null at" not in logged:
                line = server.stderr.readline()
                assert line, logged
                logged += line
            yield server, logged
        finally:
            server.kill()


def url_of(logged: str) -> str:
    found = re.search(r"serving \S+ at (http://\S+)", logged)
    assert found is not None
    return found[1]


def test_limits_are_options_and_open_files_are_raised() -> None:
    options = ["--max-connections", "1", "--max-stop-strings", "5"]
    with process(*options, soft=200, hard=5000) as (server, logged):
        limits = Path(f"/proc/{server.pid}/limits").read_text()
        (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
        assert line.split()[3:5] == ["5000", "5000"]
        assert "may open" not in logged
        client, other = Client(url_of(logged)), Client(url_of(logged))
        assert client.complete(prompt="One", max_tokens=1, stop=["a"] * 5)["choices"]
        refused = other.post("/v1/completions", {"model": "null", "prompt": "One"})
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert other.get("/health").status_code == 200
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0


def test_a_server_without_files_goes_on_when_some_are_free() -> None:
    with process(soft=80, hard=80) as (server, logged):
        assert "this process may open 80 files, but 4096 connections need" in logged
        client = Client(url_of(logged))
        port = client.http.base_url.port
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            wait_until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) == 80)
        assert client.complete(prompt="One", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_an_unusable_limit_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "null", "--port", "0", "--max-connections", "0"]) == 2
    assert "max_connections is 0" in capsys.readouterr().err.splitlines()[-1]
