"""`cbrs serve` as a process."""

import shlex
import signal

import httpx2
import pytest
from server_kit import Client, parse_events, wait_until
from server_process import server_process

from cbrs.cli import main


def test_sigterm_lets_streams_finish() -> None:
    with server_process("null:0.01", "--port", "0", "--served-model-name", "mine") as server:
        client = Client(server.url)
        body = {"model": "mine", "prompt": "One", "max_tokens": 60, "stream": True}
        with client.http.stream("POST", "/v1/completions", json=body) as response:
            other = Client(str(client.http.base_url))
            wait_until(lambda: other.get("/stats").json()["num_running"] == 1)
            server.signal(signal.SIGTERM)
            wait_until(lambda: other.get("/ready").status_code == 503)
            assert len(parse_events(response.read().decode())) == 60
        assert server.end() == 0


def test_a_second_signal_cuts_streams() -> None:
    with server_process("null:0.01", "--port", "0") as server:
        client = Client(server.url)
        body = {"model": "null:0.01", "prompt": "One", "max_tokens": 4000, "stream": True}
        with client.http.stream("POST", "/v1/completions", json=body) as response:
            other = Client(str(client.http.base_url))
            wait_until(lambda: other.get("/stats").json()["num_running"] == 1)
            server.signal(signal.SIGTERM)
            wait_until(lambda: other.get("/ready").status_code == 503)
            server.signal(signal.SIGTERM)
            assert "error" in parse_events(response.read().decode())[-1]
        assert server.end() == 1
        with pytest.raises(httpx2.ConnectError):
            other.get("/ready")


def test_the_example_of_the_help_works(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    example = capsys.readouterr().out.rstrip().splitlines()[-1]
    arguments = shlex.split(example.replace("--port 8000", "--port 0"))
    assert arguments[:2] == ["cbrs", "serve"]
    with server_process(*arguments[2:]) as server:
        client = Client(server.url)
        assert client.complete(prompt="One", max_tokens=2)["usage"]["completion_tokens"] == 2
        server.signal(signal.SIGINT)
        assert server.end() == 0


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--port", "70000"], "65535"),
        (["--drain-timeout", "-1"], "seconds"),
        (["--host", "0.0.0.0", "--port", "0"], "loopback"),
        (["--host", "example.org", "--port", "0"], "IP address"),
        (["--api-keys", "", "--port", "0"], "names no file"),
    ],
)
def test_unusable_options_end_with_2(
    options: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        exit_code = main(["serve", "null", *options])
    except SystemExit as error:
        exit_code = error.code
    assert exit_code == 2
    assert part in capsys.readouterr().err.splitlines()[-1]
