"""Every row of the launch table compiles for its devices, without spills; no GPU is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="compiling kernels needs triton")

FAULTY = """
from dataclasses import replace
from cbrs.kernels import compile, launch

row = next(r for r in launch.read_rows() if r.kernel == "attention_decode" and r.capability == 80)

def fault(num_warps, num_stages, block_n, cache, head_dim):
    constants = {**row.launch.constants, "BLOCK_N": block_n}
    example = {"query": "bf16", "cache": cache, "head_dim": head_dim}
    changed = replace(
        row, when={}, launch=launch.Launch(num_warps, num_stages, constants), example=example
    )
    (compiled,) = [c for c in compile.compile_rows((changed,)) if c.row.capability == 80]
    print(compiled.fault.splitlines()[0] if compiled.fault else "none")

compile.SHARED_BYTES = {80: compile.SHARED_BYTES[80]}
fault(1, 2, 64, "bf16", 256)
fault(4, 4, 128, "bf16", 128)
fault(4, 2, 32, "fp8e4nv", 64)
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options", [(), pytest.param(("--everywhere",), marks=pytest.mark.soak)], ids=["own", "all"]
)
def test_every_row_compiles_and_no_hot_kernel_spills(tmp_path, options):
    done = run(tmp_path, "-m", "cbrs.kernels.compile", *options)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith(": 0 faults")


def test_spills_too_much_shared_memory_and_what_does_not_compile_are_faults(tmp_path):
    done = run(tmp_path, "-c", FAULTY)
    assert done.returncode == 0, done.stderr
    spills, shared, error = done.stdout.splitlines()[-3:]
    assert spills.startswith("spills ")
    assert shared.startswith("needs ")
    assert "bytes of shared memory, the device has 166912" in shared
    assert "Error" in error


def run(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a compiler's cache of its own: nothing may come from an earlier run."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True
    )
