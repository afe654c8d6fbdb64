"""Let a virtual environment use the PyTorch that another interpreter already has.

Run by the interpreter that may have it. `--check` only says whether it has; `--into VENV` links
torch and the packages that torch requires, and nothing else of that interpreter, into
`VENV/shared-torch`, which a `.pth` file puts behind the environment's own packages. Sharing all
of it (`--system-site-packages`) would bring in packages of unknown versions, and would not see
those of another virtual environment.
"""

import argparse
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

MINIMUM = (2, 6)
NAME_AND_EXTRAS = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?")
EXTRA_MARKER = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


def has_torch() -> bool:
    """Whether this interpreter has a recent enough torch; does not import it (that is slow)."""
    try:
        numbers = re.match(r"(\d+)\.(\d+)", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return False
    return numbers is not None and tuple(map(int, numbers.groups())) >= MINIMUM


def required(name: str, extras: frozenset[str]) -> list[tuple[str, frozenset[str]]]:
    """What a distribution requires, as (name, extras); other markers are left to what is there."""
    found = []
    for line in metadata.requires(name) or []:
        requirement, _, marker = line.partition(";")
        wanted_by = set(EXTRA_MARKER.findall(marker))
        if wanted_by and not wanted_by & extras:
            continue
        match = NAME_AND_EXTRAS.match(requirement)
        if match is not None:
            names = frozenset(part.strip() for part in (match[2] or "").split(",") if part.strip())
            found.append((match[1], names))
    return found


def distributions() -> list[metadata.Distribution]:
    """Torch and everything installed that it requires, directly or not."""
    todo: list[tuple[str, frozenset[str]]] = [("torch", frozenset())]
    seen: set[tuple[str, frozenset[str]]] = set()
    found: dict[str, metadata.Distribution] = {}
    while todo:
        item = todo.pop()
        if item in seen:
            continue
        seen.add(item)
        name, extras = item
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # excluded by a marker: other systems, other Python versions
        todo += required(name, extras)
    return list(found.values())


def link_into(venv: Path) -> None:
    """Link the top-level files of each distribution, and point the environment there."""
    folder = venv / "shared-torch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for distribution in distributions():
        top_level = {file.parts[0] for file in distribution.files or [] if ".." not in file.parts}
        for name in sorted(top_level - {"__pycache__"}):
            target = Path(str(distribution.locate_file(name))).resolve()
            link = folder / name
            if target.exists() and not link.exists():
                link.symlink_to(target)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    pth = venv / "lib" / python / "site-packages" / "cbrs-shared-torch.pth"
    pth.write_text(f"{folder.resolve()}\n", encoding="utf-8")


def main() -> int:
    """Exit status 0 if there is a torch to share."""
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true")
    what.add_argument("--into", type=Path, metavar="VENV")
    options = parser.parse_args()
    if not has_torch():
        return 1
    if options.into is not None:
        link_into(options.into)
    print(f"torch {metadata.version('torch')} of {sys.prefix}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
