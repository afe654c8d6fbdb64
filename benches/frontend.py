"""What the HTTP server costs: the null model on one core, its clients on another.

    python benches/frontend.py --json
    python benches/frontend.py --only chat stream

`cbrs serve null` with SmolLM2's tokenizer and template (`cbrs pull smollm2-135m-instruct` first):
everything but the model is there. Prompts of chats are 32 words, of which the template makes 62
tokens. Each figure is the median of `--runs` runs.

  chat        64 connections, chats of 16 tokens in one piece: requests per second
  stream      64 connections, chats of 64 tokens, each token an event: tokens per second; events
              that came with one read of the client
  wide        the same at 32 and at 1,024 connections, with as many rows
  latency     chats come at random, at half of what `chat` came to: p99 of their latency over HTTP
              above the median time of the same load in an engine without HTTP
  idle        memory of 1,000 connections that have had an answer and are kept alive
  long        a stream with a token every 5 ms, while texts of 100,000 characters are tokenized: its
              longest gap above that of a stream alone
  real        SmolLM2 at 32 connections: output tokens per second over HTTP to those in process, in
              pairs that take turns, on all cores; takes minutes

Build with PROFILE=release, and leave the machine alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from hardware import describe_run
from policies.output import Check, Figures, at_least, at_most, rounded
from serving import loads, pairs
from serving.server import on_cores

CHAT = {"endpoint": "chat", "stream": False, "prompt_tokens": 32, "output_tokens": 16}
STREAM = {"endpoint": "chat", "prompt_tokens": 32, "output_tokens": 64}


# What a part measured that another needs.
_measured: dict[str, Figures] = {}


def chat(options: argparse.Namespace) -> tuple[Figures, list[Check]]:
    """Requests per second of chats in one piece."""
    figures = _measured["chat"] = loads.throughput(options, 64, [64], CHAT)[64]
    goal = at_least("chats, 64 connections", figures["requests_per_s"], "requests/s", 6000)
    return figures, [goal]


def stream(options: argparse.Namespace) -> tuple[Figures, list[Check]]:
    """Tokens per second of streams."""
    figures = loads.throughput(options, 64, [64], STREAM)[64]
    rate = figures["tokens_per_s"]
    goals = [
        at_least("streams, 64 connections", rate, "tokens/s", 250_000),
        at_least("events for each token", figures["events_per_token"], "", 1.0),
    ]
    return figures, goals


def wide(options: argparse.Namespace) -> tuple[Figures, list[Check]]:
    """Streams over many connections beside those over few."""
    few, many = 32, options.connections
    results = loads.throughput(options, many, [few, many], STREAM)
    ratio = results[many]["tokens_per_s"] / results[few]["tokens_per_s"]
    figures = {str(number): result for number, result in results.items()}
    lost = results[many]["num_failed"]
    goals = [
        at_least(f"streams, {many} to {few} connections", ratio, "", 0.95),
        at_most(f"requests lost, {many} connections", lost, "", 0),
    ]
    return {**figures, "ratio": rounded(ratio)}, goals


def latency(options: argparse.Namespace) -> tuple[Figures, list[Check]]:
    """Latency at half load above the engine's own."""
    if options.rate is None and "chat" not in _measured:
        chat(options)
    rate = options.rate or 0.5 * _measured["chat"]["requests_per_s"]
    figures = loads.latency(options, CHAT, rate)
    added_ms = figures["p99_ms"] - figures["engine_p50_ms"]
    goal = at_most("p99 of the added latency, half load", added_ms, "ms", 2.0)
    return {**figures, "added_p99_ms": rounded(added_ms)}, [goal]


def idle(options: argparse.Namespace) -> tuple[Figures, list[Check]]:
    """Memory of idle connections."""
    figures = loads.idle(options, min(1000, options.connections))
    name = f"{figures['num_connections']} idle connections"
    return figures, [at_most(name, figures["grown_mib"], "MiB", 40.0)]


def long(options: argparse.Namespace) -> tuple[Figures, list[Check]]:
    """Gaps of a stream beside long texts."""
    figures = loads.long_texts(options, options.characters)
    name = f"longest gap beside texts of {options.characters} characters"
    return figures, [at_most(name, figures["added_ms"], "ms", 5.0)]


def real(options: argparse.Namespace) -> tuple[Figures, list[Check]]:
    """A real model over HTTP and in process."""
    figures = pairs.compare(options)
    name = f"{options.model}, {pairs.CONCURRENCY} connections, HTTP to in process"
    return figures, [at_least(name, figures["ratio"], "", 0.95)]


PARTS: dict[str, Callable[[argparse.Namespace], tuple[Figures, list[Check]]]] = {
    "chat": chat,
    "stream": stream,
    "wide": wide,
    "latency": latency,
    "idle": idle,
    "long": long,
    "real": real,
}


def parse() -> argparse.Namespace:
    """The options; the first core is the server's, the last the client's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help="default: all")
    parser.add_argument("--runs", type=int, default=5, help="runs of each load (default: 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run (default: 3)")
    parser.add_argument("--connections", type=int, default=1024, help="many (default: 1024)")
    parser.add_argument("--characters", type=int, default=100_000, help="of a long text")
    parser.add_argument("--rate", type=float, help="of `latency`, in requests/s")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="of `real`")
    parser.add_argument("--json", action="store_true", help="print only the JSON line to stdout")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    options.server_cores, options.client_cores = cores[:1], cores[-1:]
    return options


def main() -> None:
    """Runs the parts and prints what came."""
    options = parse()
    progress = sys.stderr if options.json else sys.stdout
    results: Figures = {}
    checks: list[Check] = []
    for part in options.only or PARTS:
        with on_cores(options.client_cores if part != "real" else os.sched_getaffinity(0)):
            figures, goals = PARTS[part](options)
        results[part] = figures
        checks += goals
        print(f"{part}: {json.dumps(figures)}", file=progress)
        for goal in goals:
            verdict = "ok" if goal["ok"] else "MISSED"
            text = f"{goal['name']}: {goal['value']} {goal['unit']} ({goal['goal']})"
            print(f"{verdict:>6}  {text}", file=progress, flush=True)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    document: dict[str, Any] = {
        "bench": "frontend",
        **describe_run(**settings),
        "results": results,
        "checks": checks,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
