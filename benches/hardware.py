"""What a benchmark ran on: part of every result, since figures mean nothing without it."""

import os
import platform
import subprocess
from pathlib import Path

import cbrs

ROOT = Path(__file__).resolve().parent.parent


def cpu_model() -> str:
    """Name of the processor, as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str:
    """Commit of the sources, marked if they have changed since; `unknown` outside a checkout."""
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return result.stdout.strip() if result.returncode == 0 else "unknown"


def describe_run(**settings: object) -> dict[str, object]:
    """Settings, hardware, versions and commit, for the JSON line of a benchmark."""
    return {
        **settings,
        "cpu": cpu_model(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "cbrs": cbrs.__version__,
        "commit": commit(),
    }
