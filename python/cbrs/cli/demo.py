"""`cbrs demo`: static against continuous batching, as figures and a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbrs import demo
from cbrs.cli.common import add_command, add_offline_option

if TYPE_CHECKING:
    from cbrs.cli.common import Commands


def add_parser(commands: Commands) -> None:
    """Adds the command `demo`."""
    parser = add_command(
        commands,
        "demo",
        "run the same requests under static and continuous batching and draw both",
        "cbrs demo --model null --out cbrs-demo",
        demo.run_demo,
    )
    demo.add_arguments(parser)
    add_offline_option(parser)
