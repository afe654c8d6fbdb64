"""How many sequences run in one size of KV memory, and what that brings: four ways to spend it.

    python benches/capacity.py --json
    python benches/capacity.py --plot capacity.png

Requests with a common beginning (a system prompt), prompts of their own and outputs of different
lengths wait in a queue that never empties. In each way the pool has the same number of bytes (less
the part of a block that is over), and a step has the same budget of tokens:

  contiguous  every sequence has room for `--max-model-len` tokens from the start, as in engines
              that keep a sequence's keys and values in one piece. It is the same engine, in which
              only as many sequences may run as such pieces fit into the pool; nothing else of
              contiguous memory is imitated (its attention would be no faster here).
  paged       sequences take blocks as they grow
  shared      the same, and blocks of the common beginning are there once
  int8        the same, and keys and values take 8 bits each

Of each way: sequences that run (mean over the time), output tokens/s and preemptions; then the
factor of each way over the one before, and the product. Requests are admitted by
`admission="estimated"` in all of them. Figures are medians of `--runs`; in each the clock starts
when as many requests have ended as run.

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import os
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from policies import plots
from policies.output import Figures, Report, at_least, rounded
from running.capacity import Load, Way, fits, measure

WAYS = (
    Way("contiguous", is_contiguous=True),
    Way("paged"),
    Way("shared", shares_prefixes=True),
    Way("int8", shares_prefixes=True, kv_cache_dtype="int8"),
)
TITLES = {
    "contiguous": "contiguous\nreservation",
    "paged": "paged",
    "shared": "+ prefix\nsharing",
    "int8": "+ int8 KV",
}
# Sequences that run, to those of the way before.
GOALS = {"paged": 3.0, "shared": 1.2, "int8": 1.7}


def run(options: argparse.Namespace, report: Report) -> Figures:
    """Figures by way."""
    load = Load(
        options.shared_tokens, options.prompt_tokens, options.output_tokens, options.max_model_len
    )
    runs: dict[str, list[Figures]] = {way.name: [] for way in WAYS}
    for seed in range(options.runs):
        for way in WAYS[:: 1 if seed % 2 == 0 else -1]:
            found = measure(way, load, options, seed)
            runs[way.name].append(found)
            report.show(f"{way.name}, run {seed + 1} of {options.runs}", found)
    return {
        name: {key: statistics.median(each[key] for each in of_way) for key in of_way[0]}
        for name, of_way in runs.items()
    }


def factors(ways: Figures) -> Figures:
    """Of each way to the one before, and of the last to the first."""
    names = list(ways)
    result: Figures = {}
    for key in ("num_running", "tokens_per_s"):
        steps = {
            name: rounded(ways[name][key] / ways[before][key]) for before, name in pairwise(names)
        }
        result[key] = {**steps, "product": rounded(ways[names[-1]][key] / ways[names[0]][key])}
    return result


def check(ways: Figures, report: Report) -> Figures:
    """Each way lets more run than the one before, and together they bring more tokens."""
    found = factors(ways)
    for name, goal in GOALS.items():
        title = f"{name}: sequences that run, to the way before"
        report.checks.append(at_least(title, found["num_running"][name], "", goal))
    title = "all together: tokens/s to contiguous reservation"
    report.checks.append(at_least(title, found["tokens_per_s"]["product"], "", 1.5))
    return found


def draw(results: Figures, title: str, path: Path) -> None:
    """Two panels of bars: sequences and tokens/s, with the factor over the bar before."""
    ways = results["ways"]
    panels = {"num_running": "sequences that run", "tokens_per_s": "output tokens/s"}
    colours = [plots.THIRD, plots.OTHER, plots.FOURTH, plots.OURS]
    with plots.figure(path, 1, 2, title, 4.8, 3.6) as axes:
        for panel, (key, label) in zip(axes[0], panels.items(), strict=True):
            values = [way[key] for way in ways.values()]
            bars = panel.bar([TITLES[name] for name in ways], values, color=colours, width=0.62)
            steps = results["factors"][key]
            texts = [
                f"{value:,.3g}" + (f"\n{steps[name]:.3g}x" if name in steps else "")
                for name, value in zip(ways, values, strict=True)
            ]
            panel.bar_label(bars, labels=texts, fontsize=8, padding=2)
            panel.set_ylim(top=1.22 * max(values))
            product = results["factors"][key]["product"]
            panel.set_title(f"{label}: {product:.3g}x in all", fontsize=10)
            panel.tick_params(axis="x", labelsize=8)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as cbrs takes it")
    parser.add_argument("--dtype", default="bfloat16", help="of weights, and of keys and values")
    parser.add_argument("--pool-tokens", type=int, default=4096, help="that fit in --dtype")
    parser.add_argument("--max-model-len", type=int, default=1024, help="what is reserved")
    parser.add_argument("--shared-tokens", type=int, default=128, help="of the common beginning")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each prompt's own")
    parser.add_argument("--output-tokens", type=int, default=96, help="in the mean")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each run, by the clock")
    parser.add_argument("--runs", type=int, default=3, help="the median counts (default: 3)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the result into this file")
    parser.add_argument("--json", action="store_true", help="print only the JSON line to stdout")
    options = parser.parse_args()
    if problem := fits(options):
        parser.error(problem)
    return options


def main() -> None:
    options = parse()
    report = Report("capacity", options)
    ways = run(options, report)
    results: dict[str, Any] = {"ways": ways, "factors": check(ways, report)}
    megabytes = ways["paged"]["pool_bytes"] / 1e6
    title = f"{Path(options.model).name}: one KV pool of {megabytes:.0f} MB"
    report.finish(results, lambda found, path: draw(found, title, path))


if __name__ == "__main__":
    main()
