"""`cbrs bench --url`: the load generator of the Rust core against an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cbrs.cli.bench.server_figures import to_table
from cbrs.cli.common import EXIT_FAILURE, InputError, positive_int
from cbrs.cli.options import given
from cbrs.config import EngineConfig
from cbrs.table import format_table

logger = logging.getLogger("cbrs")

_MODELS_TIMEOUT_S = 10.0
# A thread above this share of a core may be what limits the figures.
_BUSY_CLIENT = 0.9
# Fields of the configuration by the name of their option's value: for servers only, and others.
_SERVER_FIELDS = {
    "endpoint": "endpoint",
    "stream": "stream",
    "rate": "rate",
    "trace": "trace",
    "length_scale": "length_scale",
    "duration": "duration_s",
    "warmup": "warmup",
    "retries": "retries",
    "vocab_size": "vocab_size",
    "timeout": "timeout_s",
    "ignore_eos": "ignore_eos",
    "extra_body": "extra_body",
    "client_threads": "threads",
}
_SHARED_FIELDS = {
    "num_requests": "num_requests",
    "input_len": "prompt_tokens",
    "output_len": "output_tokens",
    "file": "prompts",
}


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that measure a server; what is not given is None."""
    group = parser.add_argument_group("server (with --url)")
    group.add_argument("--url", metavar="URL", help="http://HOST:PORT of the server to measure")
    group.add_argument(
        "--model",
        dest="served_model",
        metavar="NAME",
        help="the model that requests name (default: the first that the server lists)",
    )
    group.add_argument(
        "--endpoint",
        choices=("completions", "chat"),
        help="completions: random prompts are token ids; chat: words (default: completions)",
    )
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="whether responses are streamed (default: they are)",
    )
    group.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="open loop instead of --concurrency: requests per second, a Poisson process; with "
        "--trace the mean that its times are scaled to",
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="lengths, and without --concurrency arrival times: JSONL (.gz) with timestamp_ms, "
        "input_length, output_length, hash_ids; --input-len and --output-len are then limits",
    )
    group.add_argument(
        "--length-scale", type=float, metavar="X", help="factor on the lengths of the trace"
    )
    group.add_argument(
        "--duration",
        type=float,
        metavar="S",
        help="start requests for so many seconds; those in flight then end on their own",
    )
    for option, metavar, meaning in (
        ("--warmup", "N", "requests before the clock starts, in no figure (default: 0)"),
        ("--retries", "N", "times a request is sent again after 429 or 503, once Retry-After has "
         "passed (default: 0)"),
        ("--client-threads", "N", "threads of the load generator (default: 1)"),
        ("--vocab-size", "N", "random token ids are below this (default: 32000)"),
    ):  # fmt: skip
        group.add_argument(option, type=_count, metavar=metavar, help=meaning)
    group.add_argument(
        "--timeout", type=float, metavar="S", help="give a request up after this (default: 600)"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="go on after end tokens, so that outputs have their length (default: they do, except "
        "for prompts of a file)",
    )
    group.add_argument(
        "--extra-body",
        type=_json_object,
        metavar="JSON",
        help='further fields of every request, such as \'{"priority": "interactive"}\'',
    )
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="its first line is sent as bearer token"
    )


def check_no_server_options(arguments: argparse.Namespace) -> None:
    """Refuses options of a server where there is none.

    Raises:
        InputError: names the option.
    """
    for name in (*_SERVER_FIELDS, "served_model", "api_key_file"):
        if getattr(arguments, name) is not None:
            raise InputError(f"{_option(name)} is for a server; give --url too, or leave it out")


def run_server(arguments: argparse.Namespace, concurrencies: tuple[int, ...]) -> int:
    """Measures a server, a level for each concurrency or one open loop; returns the exit code."""
    _check_options(arguments)
    key = _read_key(arguments.api_key_file)
    model = arguments.served_model or arguments.model or _first_model(arguments.url, key)
    config = {"url": arguments.url, "model": model}
    for name, field in {**_SERVER_FIELDS, **_SHARED_FIELDS}.items():
        value = getattr(arguments, name)
        if value is not None:
            config[field] = value
    is_open = arguments.concurrency is None and not (arguments.rate is arguments.trace is None)
    levels = []
    for concurrency in (None,) if is_open else concurrencies:
        level = {**config, "seed": _level_seed(arguments.seed, concurrency)}
        if concurrency is not None:
            level["concurrency"] = concurrency
        if key is not None:
            level["api_key"] = key
        levels.append({"concurrency": concurrency, **_run_level(level)})
    print(format_table(to_table(levels, arguments.rate)))
    if arguments.json:
        print(json.dumps({**config, "seed": arguments.seed, "levels": levels}))
    return _tell_failures(levels)


def _check_options(arguments: argparse.Namespace) -> None:
    # The positional MODEL is a name that both kinds of run know.
    for name in given(arguments, EngineConfig, but="seed"):
        if name != "model":
            raise InputError(f"{_option(name)} is for an engine of this process; leave out --url")
    if arguments.plot is not None:
        raise InputError("--plot is for an engine of this process; leave out --url")
    if arguments.file == "-":
        raise InputError(
            "--file - (stdin) is for an engine of this process; with --url name a file"
        )
    if arguments.served_model is not None and arguments.model is not None:
        raise InputError("MODEL and --model name the model twice; leave out one")


def _option(name: str) -> str:
    names = {"served_model": "model", "enable_prefix_caching": "no-prefix-caching"}
    return "--" + names.get(name, name).replace("_", "-")


def _level_seed(seed: int, concurrency: int | None) -> int:
    """Another seed for each level, so that no level finds prompts of another in the cache."""
    return (seed + ((concurrency or 0) << 32)) % 2**64


def _run_level(config: dict[str, Any]) -> dict[str, Any]:
    from cbrs._core import run_load

    concurrency = config.get("concurrency")
    name = "open loop" if concurrency is None else f"concurrency {concurrency}"
    report = run_load(config, _ProgressLine(name) if sys.stderr.isatty() else None)
    if sys.stderr.isatty():
        _ProgressLine.clear()
    logger.info(
        "%s: %d requests in %.1f s, %d failed, %.1f output tokens/s",
        name,
        report["num_requests"],
        report["duration_s"],
        report["num_failed"],
        report["output_tokens_per_s"],
    )
    busiest = report["client"]["busiest_thread_cpu"]
    if busiest > _BUSY_CLIENT:
        logger.warning(
            "the load generator used %.0f %% of a core and may be what limits; "
            "give it more --client-threads",
            100 * busiest,
        )
    return report


class _ProgressLine:
    """One line on the terminal that is written over twice a second."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last = (0.0, 0)

    def __call__(self, progress: dict[str, Any]) -> None:
        ended = progress["num_succeeded"] + progress["num_failed"]
        if progress["elapsed_s"] is None:
            line = f"warm-up: {ended} requests"
        else:
            elapsed_s, num_tokens = progress["elapsed_s"], progress["num_tokens"]
            rate = (num_tokens - self._last[1]) / (elapsed_s - self._last[0])
            self._last = (elapsed_s, num_tokens)
            total = "" if progress["num_requests"] is None else f"/{progress['num_requests']}"
            line = (
                f"{elapsed_s:.1f} s: {ended}{total} requests, "
                f"{progress['num_started'] - ended} in flight, {progress['num_failed']} failed, "
                f"{rate:,.0f} tokens/s"
            )
        print(f"\r\x1b[K{self._name}, {line}", end="", file=sys.stderr, flush=True)

    @staticmethod
    def clear() -> None:
        """Removes the line."""
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _tell_failures(levels: list[dict[str, Any]]) -> int:
    messages: dict[str, int] = {}
    for level in levels:
        for message, count in level["errors"].items():
            messages[message] = messages.get(message, 0) + count
    for message, count in sorted(messages.items(), key=lambda item: -item[1]):
        logger.error("%d requests failed with: %s", count, message)
    return EXIT_FAILURE if messages else 0


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        lines = path.read_text(encoding="utf-8").split()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8") from None
    if not lines:
        raise InputError(f"{path} holds no key")
    return lines[0]


def _first_model(url: str, key: str | None) -> str:
    """Asks the server for its models."""
    import http.client

    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise InputError(f"--url {url}: give http://HOST:PORT")
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/models"
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        connection = http.client.HTTPConnection(
            parts.hostname, parts.port, timeout=_MODELS_TIMEOUT_S
        )
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise ValueError(f"status {response.status}")
        return str(json.loads(body)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
        raise InputError(
            f"cannot ask {url} for its models ({error or type(error).__name__}); "
            "is it running? --model NAME does without"
        ) from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("it must be a JSON object")
    return value


def _count(text: str) -> int:
    return 0 if text == "0" else positive_int(text)
