"""How cbrs shares the cores: what a second thread brings, a busy neighbour costs, and idling takes.

    python benches/cpu_threads.py --json
    python benches/cpu_threads.py --only idle --seconds 10

  scaling  a decode step of `--batch` sequences with one thread and with `--threads`, in turn
  busy     the same with `--threads`, alone and beside another process that keeps one core busy,
           in turn; engines whose threads wait for each other awake lose far more than the core
  idle     an `AsyncLLM` that has served a request: processor time of the process while it waits
           for the next one, all threads together

The process keeps to as many cores as it has threads. Times are medians of `--rounds` rounds of
`--num-steps` steps; goals of steps are those of two threads. Prints a table and, as its last line,
one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from policies.output import Figures, Report, at_least, at_most, rounded
from running.steps import Steady

from cbrs import AsyncLLM, SamplingParams

PARTS = ("scaling", "busy", "idle")
NUM_THREADS = 2  # those that the goals of steps are for
SCALING_GOAL, BUSY_GOAL, IDLE_GOAL = 1.7, 2.5, 1.0


def cores(num: int) -> list[int]:
    """So many CPUs that this process may use; two threads of one core only if there are no more."""

    def comes_second(cpu: int) -> bool:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        return siblings.exists() and not re.match(rf"{cpu}\b", siblings.read_text())

    cpus = sorted(os.sched_getaffinity(0))
    return sorted(cpus, key=comes_second)[:num]


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that computes on one core."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def scaling(options: argparse.Namespace) -> Figures:
    """Milliseconds of a step by threads, and the ratio."""
    one, all_threads = (Steady(options, threads) for threads in (1, options.threads))
    times: dict[int, list[float]] = {1: [], options.threads: []}
    try:
        for _ in range(options.rounds):
            for steady, threads in ((one, 1), (all_threads, options.threads)):
                times[threads].append(steady.step_ms(options.num_steps))
    finally:
        one.close()
        all_threads.close()
    single, several = (statistics.median(times[threads]) for threads in (1, options.threads))
    return {
        "one_thread_ms": rounded(single),
        "threads_ms": rounded(several),
        "threads": options.threads,
        "ratio": rounded(single / several),
    }


def busy(options: argparse.Namespace) -> Figures:
    """Milliseconds of a step alone and beside a busy process."""
    steady = Steady(options, options.threads)
    alone, beside = [], []
    try:
        for _ in range(options.rounds):
            alone.append(steady.step_ms(options.num_steps))
            with neighbour():
                beside.append(steady.step_ms(options.num_steps))
    finally:
        steady.close()
    return {
        "alone_ms": rounded(statistics.median(alone)),
        "beside_ms": rounded(statistics.median(beside)),
        "ratio": rounded(statistics.median(beside) / statistics.median(alone)),
    }


def idle(options: argparse.Namespace) -> Figures:
    """Processor time of an engine without requests, as a part of one core."""

    async def wait() -> Figures:
        async with AsyncLLM(options.model, dtype=options.dtype, num_threads=options.threads) as llm:
            async for _ in llm.generate([1, 2, 3], SamplingParams(max_tokens=4)):
                pass
            await asyncio.sleep(options.settle_s)
            started_s, before_s = time.monotonic(), time.process_time()
            await asyncio.sleep(options.seconds)
            used_s, passed_s = time.process_time() - before_s, time.monotonic() - started_s
        return {"cpu_percent": rounded(100 * used_s / passed_s), "seconds": rounded(passed_s)}

    return asyncio.run(wait())


def check(results: Figures, options: argparse.Namespace, report: Report) -> None:
    has_goals = options.threads == NUM_THREADS
    if "scaling" in results and has_goals:
        name = f"1 to {options.threads} threads, {options.batch} sequences: times as fast"
        report.checks.append(at_least(name, results["scaling"]["ratio"], "ratio", SCALING_GOAL))
    if "busy" in results and has_goals:
        name = "beside a busy process: step to that alone"
        report.checks.append(at_most(name, results["busy"]["ratio"], "ratio", BUSY_GOAL))
    if "idle" in results:
        name = "no requests: processor time"
        used = results["idle"]["cpu_percent"]
        report.checks.append(at_most(name, used, "% of a core", IDLE_GOAL))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), metavar="PART")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as cbrs takes it")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step")
    parser.add_argument("--context", type=int, default=192, help="tokens of each, about")
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=NUM_THREADS, help="and cores")
    parser.add_argument("--seconds", type=float, default=10.0, help="of idling")
    parser.add_argument("--settle-s", type=float, default=1.0, help="before that")
    parser.add_argument("--json", action="store_true", help="print only the JSON line to stdout")
    options = parser.parse_args()
    if "scaling" in options.only and options.threads < 2:
        parser.error(f"--threads is {options.threads}; scaling needs 2 or more")
    options.plot = None
    options.cores = cores(options.threads)
    os.sched_setaffinity(0, options.cores)
    report = Report("cpu_threads", options)
    parts = {"scaling": scaling, "busy": busy, "idle": idle}
    results: Figures = {}
    for name in options.only:
        results[name] = parts[name](options)
        report.show(name, results[name])
    check(results, options, report)
    report.finish(results, lambda *_: None)


if __name__ == "__main__":
    main()
