"""How long it takes until cbrs is of use, and how much memory: from the import to a first token.

Each time is the best of several fresh interpreters, so files are in the system's cache.

  import, scheduler, open   of the package, of a first `Scheduler`, of the small model's file
  first token               of `cbrs generate`, from the moment at which torch is imported until the
                            text is written, with the pool that it chooses by itself
  memory                    the largest anonymous resident memory until then, less that right after
                            `import torch`, to the bytes of the weights and of a KV pool of 64
                            blocks (the pool takes memory as it is written; a large one would hide
                            what loading takes)

Prints a table and, as its last line, one JSON object whose list `checks` holds the figures with
their goals.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hardware import describe_run

MODEL = "smollm2-135m-instruct"
FIRST_TOKEN = Path(__file__).resolve().parent / "running" / "first_token.py"
FIRST_TOKEN_GOAL_MS = 1500.0
MEMORY_GOAL = 1.5
SMALL_POOL_BLOCKS = 64

IMPORT = """
import time
started = time.perf_counter()
import cbrs
print(time.perf_counter() - started)
"""

FIRST_SCHEDULER = """
import time
started = time.perf_counter()
import cbrs
cbrs.Scheduler(cbrs.SchedulerConfig(
    max_num_seqs=64, max_num_batched_tokens=2048, num_blocks=4096, max_model_len=2048))
print(time.perf_counter() - started)
"""

OPEN_MODEL = """
import time
from cbrs._core import GgufFile
from cbrs.hub import pull
path = str(pull("smollm2-135m-instruct"))
started = time.perf_counter()
file = GgufFile(path)
for name in file.tensor_names:
    file.tensor(name, "float32")
print(time.perf_counter() - started)
"""

MEASUREMENTS = [
    ("import cbrs", IMPORT, 40.0),
    ("import cbrs and make a Scheduler", FIRST_SCHEDULER, 120.0),
    ("open SmolLM2-135M Q4_1 and dequantise all of it", OPEN_MODEL, 1000.0),
]


def best_ms(code: str, repeats: int) -> float:
    """Least milliseconds that `code`, run by fresh interpreters, reports."""
    seconds = []
    for _ in range(repeats):
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        seconds.append(float(run.stdout))
    return min(seconds) * 1e3


def first_tokens(options: argparse.Namespace, num_blocks: int | None) -> list[dict[str, Any]]:
    """What fresh interpreters report of `cbrs generate`; None is the pool that it chooses."""
    command = [sys.executable, str(FIRST_TOKEN), options.model, options.dtype]
    command += [] if num_blocks is None else [str(num_blocks)]
    runs = []
    for _ in range(options.repeats):
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            sys.exit(run.stderr)
        runs.append(json.loads(run.stdout.splitlines()[-1]))
    return runs


def check_of(name: str, value: float, unit: str, goal: float) -> dict[str, Any]:
    """An entry of `checks`: a figure that must not exceed its goal."""
    check = {"name": name, "value": value, "unit": unit, "goal": f"<= {goal:g}"}
    return check | {"ok": value <= goal}


def measure_generate(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The checks of the first token and of memory."""
    best_s = min(run["first_token_s"] for run in first_tokens(options, None))
    name = "first token of cbrs generate after import torch"
    small = first_tokens(options, SMALL_POOL_BLOCKS)
    ratio = min(run["peak_bytes"] / (run["weight_bytes"] + run["pool_bytes"]) for run in small)
    memory = "peak of anonymous memory to weights and KV pool"
    return [
        check_of(name, round(best_s * 1e3, 1), "ms", FIRST_TOKEN_GOAL_MS),
        check_of(memory, round(ratio, 3), "ratio", MEMORY_GOAL),
    ]


def main() -> None:
    """Measures each start-up step and prints the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default=MODEL, help="of the first token")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args()
    checks = [
        check_of(name, round(best_ms(code, options.repeats), 1), "ms", goal_ms)
        for name, code, goal_ms in MEASUREMENTS
    ]
    checks += measure_generate(options)
    if not options.json:
        for check in checks:
            print(f"{check['name']:<50} {check['value']:>8} {check['unit']} ({check['goal']})")
    run = describe_run(repeats=options.repeats, model=options.model, dtype=options.dtype)
    print(json.dumps({"bench": "startup", **run, "checks": checks}))


if __name__ == "__main__":
    main()
