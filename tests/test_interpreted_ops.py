"""The kernels around attention under Triton's interpreter, which has to be chosen at import.

So every file of checks runs in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_CHECKS = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("name", ["check_ops", "check_sampling"])
def test_kernels_do_as_their_twins(name):
    run(name, "not soak")


@pytest.mark.soak
def test_kernels_do_as_their_twins_for_long():
    run("check_sampling", "soak")


def run(name: str, marks: str) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider", "-p",
        "no:xdist", f"{_CHECKS / name}.py",
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment, cwd=_CHECKS.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
