"""`cbrs serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cbrs.cli.common import EXIT_FAILURE, InputError, add_command, add_offline_option, positive_int
from cbrs.cli.logs import add_log_options, set_up_logs
from cbrs.cli.options import add_engine_options, given
from cbrs.config import DEFAULT_MODEL, EngineConfig

if TYPE_CHECKING:
    import types
    from collections.abc import Iterator

    from cbrs.async_llm import AsyncLLM
    from cbrs.cli.common import Commands
    from cbrs.serving import RunningServer

logger = logging.getLogger("cbrs")

_EXAMPLE = "cbrs serve null --port 8000"
_DETAILS = """\
SIGTERM and Ctrl-C end it: new requests are refused, those under way may finish for the time of
--drain-timeout; a second signal cuts them. Exit codes: 0 all requests had finished, 1 some were cut
or the engine died, 2 bad input."""
# The end of the engine is looked for this often.
_LOOK_INTERVAL_S = 0.5


def add_parser(commands: Commands) -> None:
    """Adds the command `serve`."""
    parser = add_command(
        commands, "serve", "serve a model over HTTP", _EXAMPLE, _run, details=_DETAILS
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"known name, folder, .gguf file, hub id or null (default: {DEFAULT_MODEL})",
    )
    add_offline_option(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    group.add_argument(
        "--port", type=_port, default=8000, metavar="N", help="0 = a free one (default: 8000)"
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what clients call the model; repeatable, answers carry the first (default: MODEL)",
    )
    group.add_argument(
        "--http-threads",
        type=positive_int,
        metavar="N",
        help="threads for connections (default: half the cores, 1 to 4)",
    )
    group.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds that requests under way may take after a signal (default: 30)",
    )
    group.add_argument(
        "--allow-public",
        action="store_true",
        help="listen on an address that is not loopback, although anybody there may use it",
    )
    add_log_options(group)
    add_engine_options(parser, policy="fair")


def _run(arguments: argparse.Namespace) -> int:
    from cbrs.async_llm import AsyncLLM

    arguments.access_log = set_up_logs(arguments)
    with _signals() as signals:
        options = {"policy": "fair", **given(arguments, EngineConfig)}
        llm = AsyncLLM(**options)
        try:
            with _start(llm, arguments) as server:
                logger.info("serving %s at %s", llm.config().model, server.url)
                _wait(llm, signals)
                return _end(server, signals, arguments.drain_timeout)
        finally:
            asyncio.run(llm.aclose())


def _start(llm: AsyncLLM, arguments: argparse.Namespace) -> RunningServer:
    from cbrs.serving import RunningServer

    try:
        return RunningServer(
            llm,
            host=arguments.host,
            port=arguments.port,
            served_model_names=arguments.served_model_name or (),
            worker_threads=arguments.http_threads,
            allow_public=arguments.allow_public,
            access_log=arguments.access_log,
        )
    except OSError as error:
        message = f"cannot listen on {arguments.host}, port {arguments.port}: {error}"
        raise InputError(message) from error


def _wait(llm: AsyncLLM, signals: _Signals) -> None:
    """Returns at the first signal; raises if the engine dies."""
    while not signals.arrived.wait(_LOOK_INTERVAL_S):
        llm.stats()


def _end(server: RunningServer, signals: _Signals, drain_timeout_s: float) -> int:
    logger.info("ending: %d requests under way", server.num_active)
    if server.drain(drain_timeout_s, is_cut=lambda: signals.count > 1):
        return 0
    logger.warning("requests were cut")
    return EXIT_FAILURE


class _Signals:
    """Counts the signals that ask for the end."""

    def __init__(self) -> None:
        self.count = 0
        self.arrived = threading.Event()

    def on_signal(self, number: int, frame: types.FrameType | None) -> None:
        self.count += 1
        self.arrived.set()


@contextmanager
def _signals() -> Iterator[_Signals]:
    """Counts SIGTERM and SIGINT instead of what they would do; afterwards all is as it was."""
    signals = _Signals()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, signals.on_signal) for number in numbers]
    try:
        yield signals
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 0xFFFF):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 to 1e6")
    return value
