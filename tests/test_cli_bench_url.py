"""`cbrs bench --url` against a small server: what it sends, prints and refuses."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cbrs._core import run_load
from cbrs.cli import main

NUM_TOKENS = 3


class Stub(ThreadingHTTPServer):
    """Answers every request with three tokens, the first `num_refused` with 429."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.seen: list[Any] = []
        self.num_refused = 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, "application/json", json.dumps({"data": [{"id": "listed"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.seen.append((self.path, self.headers.get("authorization"), body))
            is_refused = len(self.server.seen) <= self.server.num_refused
        if is_refused:
            self._answer(429, "application/json", '{"error": {"message": "busy"}}')
            return
        usage = {"prompt_tokens": 5, "completion_tokens": NUM_TOKENS}
        if not body["stream"]:
            self._answer(200, "application/json", json.dumps({"usage": usage}))
            return
        choice = {"text": "x"} if "prompt" in body else {"delta": {"content": "x"}}
        events = [{"choices": [choice]}] * NUM_TOKENS + [{"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self._answer(200, "text/event-stream", text + "data: [DONE]\n\n")

    def _answer(self, status: int, content_type: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(data)))
        self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def bench(capsys: Any) -> Callable[..., tuple[int, list[str], str]]:
    """Runs the command; returns exit code, the lines of stdout, and stderr."""

    def run(*arguments: object) -> tuple[int, list[str], str]:
        try:
            exit_code = main(["bench", *map(str, arguments)])
        except SystemExit as error:
            exit_code = int(error.code or 0)
        captured = capsys.readouterr()
        return exit_code, captured.out.splitlines(), captured.err

    return run


def test_measures_a_level_for_each_concurrency(stub: Stub, bench: Any) -> None:
    exit_code, lines, err = bench(
        "--url", stub.url, "--concurrency", "1,3", "--num-requests", 6, "--prompt-tokens", 5,
        "--output-tokens", NUM_TOKENS, "--warmup", 2, "--json",
    )  # fmt: skip
    assert exit_code == 0, err
    result = json.loads(lines[-1])
    assert [level["concurrency"] for level in result["levels"]] == [1, 3]
    for level in result["levels"]:
        assert level["num_requests"] == 6
        assert level["num_failed"] == 0
        assert level["statuses"] == {"200": 6}
        assert level["num_output_tokens"] == 6 * NUM_TOKENS
        assert level["num_prompt_tokens"] == 30
        assert level["requests_per_s"] * level["duration_s"] == pytest.approx(6)
        for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
            latency = level[name]
            assert 0 <= latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]
        assert level["client"]["total_cpu"] > 0
    assert result["model"] == "listed"
    table = {line.split("  ")[0]: line.split()[-2:] for line in lines[:-1]}
    assert table["requests"] == ["6", "6"]
    assert "time to first token p99, ms" in table
    assert "concurrency 3: 6 requests in" in err
    # Two levels of two warm-up requests and six others; no prompt comes twice.
    prompts = [body["prompt"] for _, _, body in stub.seen]
    assert len(prompts) == 16
    assert len({tuple(prompt) for prompt in prompts}) == 16
    assert all(len(prompt) == 5 for prompt in prompts)


def test_sends_chat_prompts_of_a_file(stub: Stub, bench: Any, tmp_path: Path) -> None:
    prompts, key = tmp_path / "prompts.jsonl", tmp_path / "key"
    prompts.write_text('{"id": 1, "turns": ["one", "two"]}\n{"question": "three"}\n')
    key.write_text("sesame\n")
    exit_code, lines, err = bench(
        "--url", stub.url + "/v1", "--model", "named", "--endpoint", "chat", "--no-stream",
        "--concurrency", 1, "--num-requests", 2, "--prompts", prompts, "--api-key-file", key,
        "--extra-body", '{"priority": "high"}', "--json",
    )  # fmt: skip
    assert exit_code == 0, err
    assert "sesame" not in "".join(lines) + err
    texts = []
    for path, authorization, body in stub.seen:
        assert path == "/v1/chat/completions"
        assert authorization == "Bearer sesame"
        assert (body["model"], body["priority"], body["stream"]) == ("named", "high", False)
        texts.append(body["messages"][0]["content"])
    assert texts == ["one", "three"]
    assert json.loads(lines[-1])["levels"][0]["ttft_ms"] is None


def test_replays_a_trace_at_a_rate(stub: Stub, bench: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp_ms": 9000.0 * i, "input_length": 4 + i, "output_length": 9} for i in (0, 1)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    exit_code, lines, err = bench("--url", stub.url, "--trace", trace, "--rate", 20, "--json")
    assert exit_code == 0, err
    (level,) = json.loads(lines[-1])["levels"]
    assert (level["concurrency"], level["num_requests"]) == (None, 2)
    assert level["lag_ms"] is not None
    assert sorted(len(body["prompt"]) for _, _, body in stub.seen) == [4, 5]


def test_counts_refusals_and_fails(stub: Stub, bench: Any) -> None:
    stub.num_refused = 2
    arguments = ("--url", stub.url, "--concurrency", 1, "--num-requests", 4, "--json")
    exit_code, lines, err = bench(*arguments)
    assert exit_code == 1
    assert "2 requests failed with: 429: busy" in err
    assert json.loads(lines[-1])["levels"][0]["statuses"] == {"200": 2, "429": 2}


def test_retries_refusals(stub: Stub, bench: Any) -> None:
    stub.num_refused = 2
    exit_code, lines, err = bench(
        "--url", stub.url, "--concurrency", 1, "--num-requests", 4, "--retries", 2, "--json"
    )
    assert exit_code == 0, err
    assert json.loads(lines[-1])["levels"][0]["num_retries"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "https://h", "--model", "m"], "TLS is not supported"),
        (["--url", "http://127.0.0.1:9", "--model", "m", "--rate", "0"], "rate is 0"),
        (["--url", "http://127.0.0.1:9", "--trace", "no-such-file", "--model", "m"], "cannot read"),
        (["--url", "http://127.0.0.1:9", "--dtype", "float32"], "--dtype is for an engine"),
        (["--url", "http://127.0.0.1:9", "a", "--model", "b"], "twice"),
        (["--url", "http://127.0.0.1:9", "--extra-body", "[]"], "it must be a JSON object"),
        (["--url", "http://127.0.0.1:9", "--api-key-file", "no-such-file"], "cannot read"),
        (["null", "--rate", "3"], "--rate is for a server"),
        (["null", "--model", "x"], "--model is for a server"),
        ([], "give a MODEL, or the --url of a server"),
    ],
)
def test_refuses_what_does_not_fit(bench: Any, arguments: list[str], message: str) -> None:
    exit_code, lines, err = bench(*arguments)
    assert (exit_code, lines) == (2, [])
    assert message in err
    assert len(err.splitlines()) == 1


def test_says_when_no_server_is_there(bench: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    exit_code, _, err = bench("--url", url)
    assert exit_code == 2
    assert "cannot ask" in err
    exit_code, _, err = bench("--url", url, "--model", "m", "--concurrency", 1)
    assert exit_code == 1
    assert "8 requests failed with: cannot connect" in err


def test_an_exception_of_the_callback_ends_the_run(stub: Stub) -> None:
    config = {"url": stub.url, "model": "m", "concurrency": 1, "duration_s": 60.0}

    def stop(progress: dict[str, Any]) -> None:
        assert progress["num_started"] > 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_load(config, stop)
    with pytest.raises(ValueError, match="unknown field `endpiont`"):
        run_load({**config, "endpiont": "chat"})
