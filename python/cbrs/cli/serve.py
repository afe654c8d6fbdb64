"""`cbrs serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cbrs.cli.access import POLICY, Access, Reloader, read_access
from cbrs.cli.common import EXIT_FAILURE, InputError, add_command, add_offline_option, positive_int
from cbrs.cli.effective import effective, told
from cbrs.cli.limits import add_limit_options, given_limits, raise_open_files
from cbrs.cli.logs import add_log_options, set_up_logs, writing_apart
from cbrs.cli.options import add_engine_options
from cbrs.cli.settings import Settings, Value
from cbrs.config import DEFAULT_MODEL

if TYPE_CHECKING:
    import types
    from collections.abc import Iterator

    from cbrs._core import LogWriter
    from cbrs.async_llm import AsyncLLM
    from cbrs.cli.common import Commands
    from cbrs.cli.logs import LogFormat
    from cbrs.serving import RunningServer

logger = logging.getLogger("cbrs")

_EXAMPLE = "cbrs serve null --port 8000"
_DETAILS = """\
SIGTERM and Ctrl-C end it: new requests are refused, those under way may finish for the time of
--drain-timeout, down to the last byte of their answers; a second signal cuts them. While the model
is loaded they end it at once. SIGHUP reads the files of --api-keys and --policy again.
Exit codes: 0 all requests had finished, 1 some were cut or the engine died, 2 bad input.

Each option is a variable of the environment, too (CBRS_MAX_NUM_SEQS for --max-num-seqs), and a key
of the file of --config (max_num_seqs). A flag goes before a variable, and that before the file.
CBRS_API_KEY is a key with all rights."""
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
        action=argparse.BooleanOptionalAction,
        default=False,
        help="listen on an address that is not loopback without API keys: anybody there may use it",
    )
    group.add_argument(
        "--api-keys", metavar="FILE.toml", help="who may use the server, and how much of it"
    )
    group.add_argument(
        "--open-metrics",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="/metrics and /stats need no API key",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="a name of the server besides those of loopback, as Host has it; repeatable, * = any",
    )
    add_log_options(group)
    add_limit_options(parser)
    add_engine_options(parser, policy=POLICY)
    # Last: it has to see all options.
    parser.set_defaults(settings=Settings(parser))


def _run(arguments: argparse.Namespace) -> int:
    environ = dict(os.environ)
    with _signals() as signals, writing_apart() as log_writer:
        try:
            with signals.raising():
                llm, values, access, access_log = _load(arguments, environ)
        except _EndedEarly as ended:
            logger.warning("%s while loading: nothing was served", ended)
            return 0
        try:
            with _start(llm, values, access, access_log, log_writer) as server:
                decided = effective(values, llm, server)
                server.tell_settings(told(decided))
                _print(decided)
                raise_open_files(decided["max_connections"].value)
                logger.info("serving %s at %s", llm.config().model, server.url)
                _wait(llm, signals, Reloader(llm, server, values, environ))
                return _end(llm, server, signals, values["drain_timeout"].value)
        finally:
            asyncio.run(llm.aclose())


def _load(
    arguments: argparse.Namespace, environ: dict[str, str]
) -> tuple[AsyncLLM, dict[str, Value], Access, LogFormat | None]:
    """Reads the settings and loads the model."""
    from cbrs.async_llm import AsyncLLM

    values, warnings = arguments.settings.resolve(arguments, environ)
    access_log = set_up_logs(values)
    access = read_access(values, environ)
    for warning in (*warnings, *(access.keys.warnings if access.keys else ())):
        logger.warning("%s", warning)
    if values["offline"].value:
        # As the flag does; the command sees to it that it is as before afterwards.
        os.environ["CBRS_OFFLINE"] = "1"
    return AsyncLLM(**access.engine_options), values, access, access_log


def _print(values: dict[str, Value]) -> None:
    """Logs each setting and where it is from. There are no secrets among them."""
    lines = [f"  {name} = {item.value} ({item.source})" for name, item in values.items()]
    logger.info("%s", "\n".join(["settings:", *lines]))


def _start(
    llm: AsyncLLM,
    values: dict[str, Value],
    access: Access,
    access_log: LogFormat | None,
    log_writer: LogWriter,
) -> RunningServer:
    from cbrs.serving import RunningServer

    host, port = values["host"].value, values["port"].value
    try:
        return RunningServer(
            llm,
            host=host,
            port=port,
            served_model_names=values["served_model_name"].value or (),
            worker_threads=values["http_threads"].value,
            allow_public=values["allow_public"].value,
            api_keys=None if access.keys is None else access.keys.keys,
            open_metrics=values["open_metrics"].value,
            allowed_hosts=values["allowed_host"].value or (),
            limits=given_limits(values),
            access_log=access_log,
            log_writer=log_writer,
            settings=told(values),
        )
    except OSError as error:
        raise InputError(f"cannot listen on {host}, port {port}: {error}") from error


def _wait(llm: AsyncLLM, signals: _Signals, reloader: Reloader) -> None:
    """Returns at the first signal that ends the server; raises if the engine dies."""
    while signals.count == 0:
        if signals.arrived.wait(_LOOK_INTERVAL_S):
            signals.arrived.clear()
        if signals.is_reload_wanted:
            signals.is_reload_wanted = False
            reloader.reload()
        llm.stats()


def _end(llm: AsyncLLM, server: RunningServer, signals: _Signals, drain_timeout_s: float) -> int:
    """Lets requests finish; raises if the engine died meanwhile."""
    server.begin_drain()
    logger.info("ending: %d requests under way", server.num_active)
    if server.drain(drain_timeout_s, is_cut=lambda: signals.count > 1):
        llm.stats()
        return 0
    logger.warning("requests were cut")
    return EXIT_FAILURE


class _EndedEarly(BaseException):
    """A signal asked for the end before anything was served."""


class _Signals:
    """Counts the signals that ask for the end, and notes one that asks to reload."""

    def __init__(self) -> None:
        self.count = 0
        self.is_reload_wanted = False
        self.arrived = threading.Event()
        self._is_raising = False

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Has a signal that asks for the end, and one that has, raise `_EndedEarly` in the block.

        If whatever runs there swallows it, the signal still counts after the block.
        """
        self._is_raising = True
        try:
            if self.count:
                raise _EndedEarly("a signal")
            yield
        finally:
            self._is_raising = False

    def on_end(self, number: int, frame: types.FrameType | None) -> None:
        self.count += 1
        self.arrived.set()
        if self._is_raising:
            raise _EndedEarly(signal.Signals(number).name)

    def on_reload(self, number: int, frame: types.FrameType | None) -> None:
        self.is_reload_wanted = True
        self.arrived.set()


@contextmanager
def _signals() -> Iterator[_Signals]:
    """Notes SIGTERM, SIGINT and SIGHUP, wherever the command is; afterwards all is as it was."""
    signals = _Signals()
    handlers = {
        signal.SIGTERM: signals.on_end,
        signal.SIGINT: signals.on_end,
        signal.SIGHUP: signals.on_reload,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield signals
    finally:
        for number, handler in before.items():
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
