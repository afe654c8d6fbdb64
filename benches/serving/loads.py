"""The loads on the null model: throughput, latency, idle connections, long texts."""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import resource
import socket
import statistics
import string
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

from policies.output import Figures, rounded

from .server import Inside, Served, serving

WARM_UP_S = 0.5
STEP_S = 0.005
# Between two long texts, so that the pool is not all that runs.
TEXT_PAUSE_S = 0.01
NUM_TEXTS = 8


def median(values: list[float]) -> float:
    """The middle one, to four digits."""
    return rounded(statistics.median(values))


def raise_file_limit() -> None:
    """Each connection is a file, here and in the servers that are started."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def throughput(
    options: argparse.Namespace, rows: int, connections: list[int], load: dict[str, Any]
) -> dict[int, Figures]:
    """Closed loops of so many connections, which take turns; the server has `rows`."""
    raise_file_limit()
    with serving("null", options.server_cores, "--max-num-seqs", str(rows)) as server:
        runs: dict[int, list[Figures]] = {number: [] for number in connections}
        for number in connections:
            server.load(**load, concurrency=number, duration_s=WARM_UP_S)
        for seed in range(options.runs):
            for number in connections:
                runs[number].append(_run(server, load, number, options.seconds, seed))
    return {number: _medians(of_number) for number, of_number in runs.items()}


def _run(
    server: Served, load: dict[str, Any], concurrency: int, seconds: float, seed: int
) -> Figures:
    used_s, steps = server.cpu_s(), server.num_steps()
    report = server.load(**load, concurrency=concurrency, duration_s=seconds, seed=seed)
    used_s = server.cpu_s() - used_s
    num_tokens = max(1, report["num_output_tokens"])
    return {
        "requests_per_s": report["requests_per_s"],
        "tokens_per_s": report["output_tokens_per_s"],
        "p50_ms": report["e2e_ms"]["p50"],
        "p99_ms": report["e2e_ms"]["p99"],
        "events_per_token": report["num_events"] / num_tokens,
        "events_per_read": report["events_per_read"] or 0.0,
        "tokens_per_step": num_tokens / max(1, server.num_steps() - steps),
        "server_us_per_request": 1e6 * used_s / max(1, report["num_requests"]),
        "server_cores": used_s / report["duration_s"],
        "client_cores": report["client"]["total_cpu"],
        "num_failed": report["num_failed"],
    }


def _medians(runs: list[Figures]) -> Figures:
    """Of failures all, of other figures the median."""
    figures = {name: median([run[name] for run in runs]) for name in runs[0]}
    return {**figures, "num_failed": sum(run["num_failed"] for run in runs)}


def latency(options: argparse.Namespace, load: dict[str, Any], rate: float) -> Figures:
    """Milliseconds of requests that come at random, over HTTP and in an engine alone, in turn."""
    cores = options.server_cores
    runs = []
    with serving("null", cores) as server, Inside("null", 64, cores) as engine:
        server.load(**load, concurrency=8, duration_s=WARM_UP_S)
        for seed in range(options.runs):
            report = server.load(**load, rate=rate, duration_s=options.seconds, seed=seed)
            alone = engine.run(
                rate=rate,
                duration_s=options.seconds,
                prompt_tokens=round(report["num_prompt_tokens"] / report["num_requests"]),
                output_tokens=load["output_tokens"],
                seed=seed,
            )
            over_http = {f"{name}_ms": report["e2e_ms"][name] for name in ("p50", "p99")}
            engine_ms = {f"engine_{name}": value for name, value in alone.items()}
            lag = {"client_lag_p99_ms": report["lag_ms"]["p99"]}
            runs.append({**over_http, **engine_ms, **lag, "num_failed": report["num_failed"]})
    return {"rate": rounded(rate), **_medians(runs)}


def idle(options: argparse.Namespace, num_connections: int) -> Figures:
    """Memory of connections that had one answer each."""
    raise_file_limit()
    with serving("null", options.server_cores) as server, ExitStack() as stack:
        message = {"role": "user", "content": "How are you?"}
        body = json.dumps({"model": server.model, "messages": [message], "max_tokens": 2})
        ask(server, body)
        before = server.rss_mib()
        for _ in range(num_connections):
            stack.enter_context(ask(server, body))
        after = server.rss_mib()
        grown = after - before
    return {
        "num_connections": num_connections,
        "before_mib": rounded(before),
        "grown_mib": rounded(grown),
        "kib_per_connection": rounded(1024 * grown / num_connections),
    }


def ask(server: Served, body: str) -> socket.socket:
    """A connection that has had the answer to a chat."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    response = connection.getresponse()
    text = response.read()
    if response.status != http.client.OK:
        raise RuntimeError(f"status {response.status}: {text!r}")
    assert isinstance(connection.sock, socket.socket), "it is kept alive"
    return connection.sock


def long_texts(options: argparse.Namespace, num_characters: int) -> Figures:
    """Longest gaps of a stream with and without long texts beside it, in turn."""
    load = {"concurrency": 1, "output_tokens": int(options.seconds / STEP_S), "num_requests": 1}
    runs = []
    # More words than the tokenizer remembers; made beforehand, as it takes the client's time.
    source = random.Random(0)
    texts = [noise(num_characters, source) for _ in range(NUM_TEXTS)]
    with serving(f"null:{STEP_S}", options.server_cores) as server:
        server.load(**{**load, "output_tokens": 8})
        for seed in range(options.runs):
            alone = server.load(**load, seed=seed)["itl_ms"]
            with tokenizing(server, texts) as times:
                beside = server.load(**load, seed=seed)["itl_ms"]
            runs.append(
                {
                    "alone_p99_ms": alone["p99"],
                    "alone_max_ms": alone["max"],
                    "beside_p99_ms": beside["p99"],
                    "beside_max_ms": beside["max"],
                    "added_ms": beside["max"] - alone["max"],
                    "num_texts": len(times),
                    "text_ms": 1e3 * statistics.median(times),
                    "num_failed": 0,
                }
            )
    return _medians(runs)


@contextmanager
def tokenizing(server: Served, texts: list[str]) -> Iterator[list[float]]:
    """Has texts tokenized, one after the other, again and again; the seconds of each."""
    is_over = threading.Event()
    times: list[float] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for text in itertools.cycle(texts):
                if is_over.wait(TEXT_PAUSE_S):
                    return
                times.append(server.tokenize_s(text))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield times
    finally:
        is_over.set()
        thread.join()
    if failures:
        raise failures[0]


def noise(num_characters: int, source: random.Random) -> str:
    """A text of words that nobody knows."""
    letters = string.ascii_lowercase + "äéß  " + " " * 4
    return "".join(source.choices(letters, k=num_characters))
