"""What `cbrs serve` logs, and how its lines look."""

from __future__ import annotations

import argparse
import json
import logging
import os
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cbrs._core import LogWriter
    from cbrs.cli.settings import Value

logger = logging.getLogger("cbrs")

LogFormat = Literal["text", "json"]
_LEVELS = ("debug", "info", "warning", "error")
# The reader of the log holds up the end for so long at most.
_FLUSH_S = 1.0
# The descriptor that a `LogWriter` writes to.
_STDERR = 2


def add_log_options(group: argparse._ArgumentGroup) -> None:
    """Adds the options that `set_up_logs` reads."""
    group.add_argument(
        "--log-level",
        choices=_LEVELS,
        help="least level that is logged (default: info, with --verbose debug)",
    )
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="how lines look (default: text)",
    )
    group.add_argument(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a line for each request, of level info",
    )


def set_up_logs(values: Mapping[str, Value]) -> LogFormat | None:
    """Sets up the command's log; returns how a line for each request looks, None without one."""
    level = values["log_level"].value
    if level is not None:
        logger.setLevel(level.upper())
    log_format: LogFormat = values["log_format"].value
    if log_format == "json":
        for handler in logger.handlers:
            handler.setFormatter(JsonFormatter())
    is_wanted = values["access_log"].value and logger.isEnabledFor(logging.INFO)
    return log_format if is_wanted else None


@contextmanager
def writing_apart() -> Iterator[LogWriter]:
    """Has a thread of its own write the log, so that a reader who stands still holds nobody up."""
    from cbrs._core import LogWriter

    writer, before = LogWriter(), logger.handlers[:]
    handler = _WriterHandler(writer)
    if before:
        handler.setFormatter(before[0].formatter)
    logger.handlers[:] = [handler]
    try:
        yield writer
    finally:
        logger.handlers[:] = before
        if not writer.flush(_FLUSH_S):
            # Nor may it hold up what is still printed, which is why the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)


class _WriterHandler(logging.Handler):
    """Hands lines to a writer."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.write(self.format(record) + "\n")
        except Exception:  # a mistake in a call must not end what called
            self.handleError(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line; tracebacks only if everything is logged."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns `record` with time, level, logger and message."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and logger.isEnabledFor(logging.DEBUG):
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)
