"""What several commands share: help that ends with an example, and bad input as an exception."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


class InputError(Exception):
    """The user's input cannot be used; the message is one line and says what to do."""


def add_command(
    commands: Commands,
    name: str,
    summary: str,
    example: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Adds a command whose help ends with a command line that works as it stands."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, with tracebacks")
    parser.set_defaults(run=run)
    return parser
