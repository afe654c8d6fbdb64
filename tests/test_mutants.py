"""The seeded faults of `make mutants` can all be applied to the sources as they are."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_seeded_fault_matches_the_sources_exactly_once() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "mutants.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
