"""Print what `.venv` needs, one requirement a line, from `pyproject.toml`.

The run-time dependencies, the extras the demo and the tests use, and the `tests` group: one list,
kept in one file, readable by every pip (installing a group by name needs a recent one).
"""

import sys
import tomllib
from pathlib import Path

EXTRAS = ("engine", "viz")


def main() -> None:
    """Print the requirements, sorted, so that equal needs give equal text."""
    root = Path(__file__).resolve().parent.parent
    pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    project = pyproject["project"]
    needed = set(project["dependencies"]) | set(pyproject["dependency-groups"]["tests"])
    for extra in EXTRAS:
        needed |= set(project["optional-dependencies"][extra])
    sys.stdout.write("".join(f"{line}\n" for line in sorted(needed)))


if __name__ == "__main__":
    main()
