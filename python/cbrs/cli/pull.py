"""`cbrs pull`: fetches a model into the cache, and lists the known ones."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from cbrs.cli.common import add_command, add_offline_option
from cbrs.table import format_table

if TYPE_CHECKING:
    from cbrs.cli.common import Commands


def add_parser(commands: Commands) -> None:
    """Adds the command `pull`."""
    parser = add_command(
        commands,
        "pull",
        "fetch a model into the cache and print its path, or list the known models",
        "cbrs pull --list",
        _run,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="a known model, or (extra hub) OWNER/NAME on the hub, whose newest revision is taken",
    )
    what.add_argument(
        "--list",
        action="store_true",
        dest="is_list",
        help="print names, sizes and paths: where each model lies, or would lie",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_offline_option(parser)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.is_list:
        _print_list(as_json=arguments.json)
        return 0
    path = _fetch(arguments.name)
    print(json.dumps({"name": arguments.name, "path": path}) if arguments.json else path)
    return 0


def _fetch(name: str) -> str:
    from cbrs import hub

    is_hub_id = name not in hub.KNOWN_MODELS and name.count("/") == 1
    return str(hub.pull_from_hub(name, update=True) if is_hub_id else hub.pull(name))


def _print_list(*, as_json: bool) -> None:
    from cbrs import hub

    entries: list[dict[str, Any]] = [
        {
            "name": model.name,
            "description": model.description,
            "license": model.license,
            "num_bytes": model.num_bytes,
            "is_cached": hub.cached(model.name) is not None,
            "path": str(hub.cache_path(model.name)),
            "source": model.source,
        }
        for model in hub.KNOWN_MODELS.values()
    ]
    if as_json:
        print(json.dumps(entries))
        return
    rows = [["NAME", "SIZE", "STATE"]]
    rows += [
        [
            entry["name"],
            f"{entry['num_bytes'] / 1e6:.1f} MB",
            "cached" if entry["is_cached"] else "not fetched",
        ]
        for entry in entries
    ]
    paths = ["PATH", *(entry["path"] for entry in entries)]
    lines = format_table(rows).splitlines()
    width = max(map(len, lines))
    for line, path in zip(lines, paths, strict=True):
        print(f"{line.ljust(width)}  {path}")
