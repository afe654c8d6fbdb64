"""How long it takes until cbrs is of use: import, first scheduler, opening the small model.

Each figure is the best of several fresh interpreters. Prints a table and, as its last line, one
JSON object whose list `checks` holds the figures with their goals.
"""

import argparse
import json
import subprocess
import sys

from hardware import describe_run

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


def main() -> None:
    """Measures each start-up step and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args()
    checks = []
    for name, code, goal_ms in MEASUREMENTS:
        value = round(best_ms(code, options.repeats), 1)
        check = {"name": name, "value": value, "unit": "ms", "goal": f"<= {goal_ms:g}"}
        checks.append(check | {"ok": value <= goal_ms})
        if not options.json:
            print(f"{name:<50} {value:>8.1f} ms  (goal {check['goal']})", flush=True)
    run = describe_run(repeats=options.repeats)
    print(json.dumps({"bench": "startup", **run, "checks": checks}))


if __name__ == "__main__":
    main()
