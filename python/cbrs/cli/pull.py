"""`cbrs pull`: fetches a known model into the cache."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cbrs.cli.common import add_command

if TYPE_CHECKING:
    from cbrs.cli.common import Commands


def add_parser(commands: Commands) -> None:
    """Adds the command `pull`."""
    parser = add_command(
        commands,
        "pull",
        "fetch a known model into the cache and print its path",
        "cbrs pull smollm2-135m-instruct",
        _run,
    )
    parser.add_argument("name", metavar="NAME", help="a known model, e.g. smollm2-135m-instruct")


def _run(arguments: argparse.Namespace) -> int:
    from cbrs.hub import pull

    print(pull(arguments.name))
    return 0
