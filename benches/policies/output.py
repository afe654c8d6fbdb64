"""Options, progress and the closing JSON line, the same for all benches of the policy."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

# As a program's modules see it: the folder of the program is on the path.
from hardware import describe_run

from .profiles import PROFILES

Figures = dict[str, Any]
Check = dict[str, object]


def rounded(value: float) -> float:
    """Four significant digits."""
    return float(f"{float(value):.4g}")


def at_most(name: str, value: float, unit: str, limit: float) -> Check:
    """One entry of `checks`: a figure that must not exceed its goal."""
    return _check(name, value, unit, f"<= {limit:.4g}", value <= limit)


def at_least(name: str, value: float, unit: str, limit: float) -> Check:
    """One entry of `checks`: a figure that must reach its goal."""
    return _check(name, value, unit, f">= {limit:.4g}", value >= limit)


def _check(name: str, value: float, unit: str, goal: str, is_ok: bool) -> Check:
    return {"name": name, "value": rounded(value), "unit": unit, "goal": goal, "ok": bool(is_ok)}


def percentile(values: Iterable[float] | np.ndarray, percent: float) -> float:
    """The smallest value that `percent` of all do not exceed: one that was really seen."""
    array = np.asarray(values, dtype=np.float64)
    return float(np.percentile(array, percent, method="inverted_cdf")) if array.size else 0.0


def worst(runs: Iterable[Figures], key: str) -> float:
    """The largest of a figure over the seeds."""
    return max(float(run[key]) for run in runs)


def least(runs: Iterable[Figures], key: str) -> float:
    """The smallest of a figure over the seeds."""
    return min(float(run[key]) for run in runs)


def ttft_to_limits(loaded: Figures, alone: Figures) -> Figures:
    """p99 of the time to first token to that alone and two loaded steps, of their p99.

    These are the step in flight when a request comes and the one that it is in. Beside it the same
    with the mean and with the median step.
    """
    steps = {
        "ttft_to_limit": "step_p99_ms",
        "ttft_to_mean_limit": "step_mean_ms",
        "ttft_to_median_limit": "step_median_ms",
    }
    return {
        name: rounded(loaded["ttft_p99_ms"] / (alone["ttft_p99_ms"] + 2 * loaded[step]))
        for name, step in steps.items()
    }


def step_times(durations_s: np.ndarray) -> Figures:
    """Milliseconds of a run's steps."""
    times_ms = 1e3 * np.asarray(durations_s)
    return {
        "step_p99_ms": rounded(percentile(times_ms, 99)),
        "step_mean_ms": rounded(float(np.mean(times_ms))),
        "step_median_ms": rounded(float(np.median(times_ms))),
    }


def parser(doc: str | None, profiles: tuple[str, ...] = ("gpu", "cpu")) -> argparse.ArgumentParser:
    """The options that all of these benches have."""
    result = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--profile", choices=PROFILES, nargs="+", default=list(profiles))
    result.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    result.add_argument("--quick", action="store_true", help="a few seconds; figures mean little")
    result.add_argument("--plot", type=Path, metavar="PNG", help="draw the result into this file")
    result.add_argument("--json", action="store_true", help="print only the JSON line to stdout")
    return result


class Report:
    """Prints figures as they come, and everything as one JSON object at the end."""

    def __init__(self, bench: str, options: argparse.Namespace) -> None:
        self.bench, self.options = bench, options
        self.progress = sys.stderr if options.json else sys.stdout
        self.checks: list[Check] = []

    def show(self, name: str, figures: Figures) -> None:
        """Prints figures; nested ones are left to the JSON."""
        shown = {key: value for key, value in figures.items() if not isinstance(value, dict | list)}
        text = "  ".join(f"{key} {value}" for key, value in shown.items())
        print(f"{name}: {text}", file=self.progress, flush=True)

    def finish(self, results: Figures, plot: Callable[[Figures, Path], None]) -> None:
        """Prints the checks and the JSON line; draws if that is wanted."""
        for check in self.checks:
            verdict = "ok" if check["ok"] else "MISSED"
            line = f"{check['name']}: {check['value']} {check['unit']} ({check['goal']})"
            print(f"{verdict:>6}  {line}", file=self.progress)
        if self.options.plot:
            plot(results, self.options.plot)
        settings = {name: value for name, value in vars(self.options).items() if name != "json"}
        settings["plot"] = self.options.plot and str(self.options.plot)
        document = {
            "bench": self.bench,
            **describe_run(**settings),
            "results": results,
            "checks": self.checks,
        }
        print(json.dumps(document))
