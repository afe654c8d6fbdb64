"""The kernels around attention under Triton's interpreter, which has to be chosen at import.

So the checks run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_CHECKS = Path(__file__).parent / "interpreted"


def test_kernels_do_as_their_twins():
    run("not soak", "check_ops", "check_sampling")


@pytest.mark.soak
def test_kernels_do_as_their_twins_for_long():
    run("soak", "check_sampling")


def run(marks: str, *names: str) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    files = [str(_CHECKS / f"{name}.py") for name in names]
    options = ["-q", "-m", marks, "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        env=environment,
        cwd=_CHECKS.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
