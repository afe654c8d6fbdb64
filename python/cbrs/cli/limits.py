"""Limits of `cbrs serve` that an operator sets, and the open files that connections need."""

from __future__ import annotations

import argparse
import logging
import resource
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cbrs.cli.settings import Value
    from cbrs.serving import ServerLimits

logger = logging.getLogger("cbrs")

# Files besides connections: the model, the libraries, the probes beyond the limit.
_OTHER_FILES = 256
_OPTIONS = (
    ("max_connections", int, "connections at a time (default: 4096)"),
    ("max_connections_per_address", int, "the same of one address (default: no limit)"),
    ("idle_timeout_s", float, "seconds without a request that close a connection (default: 60)"),
    ("head_timeout_s", float, "seconds for the head of a request (default: 10)"),
    ("body_timeout_s", float, "seconds for its body (default: 30)"),
    (
        "write_timeout_s",
        float,
        "seconds in which a reader takes nothing that end its request (default: 30)",
    ),
    ("max_body_bytes", int, "bytes of a body (default: 4 to 64 MiB, by the context)"),
    ("max_stop_strings", int, "stop strings of a request, up to 16 (default: 4)"),
    ("max_completion_logprobs", int, "logprobs of a completion, up to 20 (default: 5)"),
)


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options; what is not given is None."""
    group = parser.add_argument_group("limits")
    for name, kind, meaning in _OPTIONS:
        option = "--" + _setting(name).replace("_", "-")
        metavar = "N" if kind is int else "S"
        group.add_argument(option, type=kind, metavar=metavar, help=meaning)


def given_limits(values: Mapping[str, Value]) -> ServerLimits:
    """Returns the limits that were given."""
    limits = {name: values[_setting(name)].value for name, _, _ in _OPTIONS}
    return cast(
        "ServerLimits", {name: value for name, value in limits.items() if value is not None}
    )


def limits_by_option(limits: ServerLimits) -> dict[str, object]:
    """Returns limits by the names of their options."""
    return {_setting(name): value for name, value in limits.items()}


def _setting(name: str) -> str:
    """The option for a limit."""
    return name.removesuffix("_s")


def raise_open_files(max_connections: int) -> None:
    """Raises this process's limit of open files as far as it may, and tells if it stays too low."""
    needed = max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < needed:
        logger.warning(
            "this process may open %d files, but %d connections need %d; raise the limit "
            "(ulimit -Hn) or lower --max-connections",
            hard,
            max_connections,
            needed,
        )
