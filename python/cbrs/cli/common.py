"""What several commands share: help that ends with an example, and bad input as an exception."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    Commands = argparse._SubParsersAction["Parser"]

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


class InputError(Exception):
    """The user's input cannot be used; the message is one line and says what to do."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all other errors of the command are."""

    def error(self, message: str) -> NoReturn:
        """Prints the error and where to find help, and exits with 2."""
        one_line = " ".join(message.split())
        self.exit(EXIT_BAD_INPUT, f"cbrs: error: {one_line}; see `{self.prog} --help`\n")


def add_command(
    commands: Commands,
    name: str,
    summary: str,
    example: str,
    run: Callable[[argparse.Namespace], int],
    *,
    details: str = "",
) -> Parser:
    """Adds a command whose help ends with a command line that works as it stands."""
    description = f"{summary[0].upper()}{summary[1:]}."
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{description}\n\n{details}" if details else description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, with tracebacks")
    parser.set_defaults(run=run, example=example, offline=False)
    return parser


def add_offline_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--offline`, for every command that may load a model."""
    parser.add_argument(
        "--offline",
        action="store_true",
        help="never touch the network: use what is in the cache (as CBRS_OFFLINE=1)",
    )


def positive_int(text: str) -> int:
    """An option's value that must be an integer >= 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not >= 1")
    return value
