"""What scheduling costs, seen from Python, without a model: the step, submissions, memory.

    python benches/scheduler.py --json

Steady decode is timed with every array of the batch and of its outputs fetched as a numpy view
after each step, since that is what an engine does; `step_alone` in the results is the call without
them, `arrays` the difference, and `parts` its commit, plan and hand-over. With --criterion
(`target/criterion`), `rust` is the same step without Python. Python's garbage collector is frozen
and off while something is timed. Where two situations are compared, they take turns in one process,
so that whatever else the machine does hits both.

Prints each figure as it comes and, as its last line, one JSON object.

The parts, chosen with --only:

  steady   the step at several sizes: median of the runs' medians, lowest of their p99
  busy     its p99 beside a busy Python thread
  mixed    a closed loop: prompts that share heads, submitted as others finish
  growth   the exponent of the step's time over the number of sequences
  context  64 sequences with short and with very long contexts
  waiting  64 sequences with few and with many requests waiting
  tenants  steady decode and the mixed load with 1,000 tenants and 3 classes, to one of each
  pool     24 sequences in a small and in a huge pool with shuffled free lists (1 to 2 GB)
  submit   `submit` of 512 tokens
  prefix   the look-up of a cached prompt
  publish  the publication of a filled block
  cancel   cancels among few and among many requests
  memory   bytes per sequence and per block, growth over many requests
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hardware import describe_run
from scheduling import decode, memory, mixed, ratios, requests, tenants

Measure = Callable[[argparse.Namespace], Iterator[tuple[str, Any]]]
Checks = Callable[[Any], list[dict[str, object]]]
# A part yields a name and a figure for each thing it has measured, and its whole result last.
PARTS: dict[str, tuple[Measure, Checks]] = {
    "steady": (decode.measure_steady, decode.steady_checks),
    "busy": (decode.measure_busy, decode.busy_checks),
    "mixed": (mixed.measure_mixed, mixed.mixed_checks),
    "growth": (decode.measure_growth, decode.growth_checks),
    "context": (ratios.measure_context, ratios.context_checks),
    "waiting": (ratios.measure_waiting, ratios.waiting_checks),
    "tenants": (tenants.measure_tenants, tenants.tenants_checks),
    "pool": (ratios.measure_pool, ratios.pool_checks),
    "submit": (requests.measure_submit, requests.submit_checks),
    "prefix": (requests.measure_prefix, requests.prefix_checks),
    "publish": (requests.measure_publish, requests.publish_checks),
    "cancel": (requests.measure_cancel, requests.cancel_checks),
    "memory": (memory.measure_memory, memory.memory_checks),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 64, 256, 1024, 4096])
    parser.add_argument(
        "--growth-num-seqs", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384]
    )
    parser.add_argument("--context", type=int, default=512, help="tokens, for steady and busy")
    parser.add_argument("--long-context", type=int, default=131_072, help="tokens, for context")
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--num-tenants", type=int, default=1000)
    parser.add_argument("--pool-blocks", type=int, default=10_000_000)
    parser.add_argument("--in-flight", type=int, default=1024, help="requests of the mixed load")
    parser.add_argument("--num-requests", type=int, default=1_000_000, help="for memory")
    parser.add_argument("--soak", action="store_true", help="memory over 10,000,000 requests")
    parser.add_argument("--num-steps", type=int, default=400, help="timed steps of a run")
    parser.add_argument("--runs", type=int, default=5, help="for steady and mixed")
    parser.add_argument(
        "--criterion", type=Path, metavar="DIR", help="results of benches/scheduler.rs, for steady"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print only the JSON line to stdout")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    progress = sys.stderr if options.json else sys.stdout
    results, checks = {}, []
    for part in options.only:
        measure, make_checks = PARTS[part]
        for name, figures in measure(options):
            if name:
                text = "  ".join(f"{key} {value}" for key, value in figures.items())
                print(f"{name}: {text}", file=progress, flush=True)
        results[part] = figures
        checks.extend(make_checks(figures))
    for entry in checks:
        verdict = "ok" if entry["ok"] else "MISSED"
        line = f"{entry['name']}: {entry['value']} {entry['unit']} ({entry['goal']})"
        print(f"{verdict:>6}  {line}", file=progress)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    settings["criterion"] = options.criterion and str(options.criterion)
    run = describe_run(**settings)
    print(json.dumps({"bench": "scheduler", **run, "results": results, "checks": checks}))


if __name__ == "__main__":
    main()
