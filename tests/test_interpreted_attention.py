"""The attention kernels under Triton's interpreter, which has to be chosen at import.

So the checks run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_CHECKS = Path(__file__).parent / "interpreted"


def test_attention_does_as_its_twin():
    run("not soak")


@pytest.mark.soak
def test_attention_does_as_its_twin_with_many_heads():
    run("soak")


def run(marks: str) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-q", "-m", marks, "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(_CHECKS / "check_attention.py")],
        env=environment,
        cwd=_CHECKS.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
