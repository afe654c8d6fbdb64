"""Print requirements from `pyproject.toml`, one a line: what `.venv` needs, or the named groups.

usage: requirements.py [GROUP...]

`.venv` needs the run-time dependencies, the extras the demo and the tests use, and the `tests`
group: one list, kept in one file, readable by every pip (installing a group by name needs a recent
one).
"""

import sys
import tomllib
from pathlib import Path

EXTRAS = ("engine", "viz")


def main(groups: list[str]) -> None:
    """Print the requirements, sorted, so that equal needs give equal text."""
    root = Path(__file__).resolve().parent.parent
    pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    project = pyproject["project"]
    needed = set[str]() if groups else set(project["dependencies"])
    for group in groups or ["tests"]:
        needed |= set(pyproject["dependency-groups"][group])
    for extra in () if groups else EXTRAS:
        needed |= set(project["optional-dependencies"][extra])
    sys.stdout.write("".join(f"{line}\n" for line in sorted(needed)))


if __name__ == "__main__":
    main(sys.argv[1:])
