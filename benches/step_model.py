"""How well the scheduler predicts what a step of a real engine takes (SmolLM2 on the CPU).

    python benches/step_model.py --json --plot step_model.png

Prompts of 16 to 1,000 tokens (log-uniform) come while others decode 20 to 200 tokens; at most 64
tokens a step, 16 rows. Who comes when depends on the number of the step, not on the time, so the
batches are the same on every machine. Half of the requests are greedy, half drawn at random.

For every step the prediction that stood in `stats()` before it ran (`predicted_step_ns`) is held
against what it took (`last_step_ns`: from one commit to the next, with sampling and the text's
hand-over, so what a stream sees between two tokens). What is wanted is the median of |predicted -
measured| / measured after 200 steps. Beside it, over the same steps:

  best_fit  the error of the coefficients that fit these very steps best, found afterwards: what no
            model of the same features can beat (least absolute relative errors)
  repeat    the difference of two steps in a row with the same work to 2 %: what no model can beat
  watch     `last_step_ns` against a stop-watch of our own

The machine's noise counts in full: run it several times on an idle machine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from policies import output, plots, real
from policies.output import Figures, Report

from cbrs import LLM, SamplingParams
from cbrs.base import submission

NUM_LEARNING_STEPS = 200
MIN_PROMPT, MAX_PROMPT = 16, 1_000
MIN_OUTPUT, MAX_OUTPUT = 20, 200
NUM_ROWS = 16
TOKEN_BUDGET = 64
# Chance that a request comes in a step, by what is going on: busy times and quiet ones.
CHANCES = (0.15, 0.03)
SPELL = 50
COLUMNS = ("predicted_ns", "measured_ns", "watch_ns", *real.WORK, "num_samples", "num_decodes")


class Load:
    """Submits by the number of the step."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self._engine = llm.engine
        self._random = np.random.default_rng(seed)
        self._num_steps = 0
        self.num_requests = 0

    def advance(self) -> None:
        """To be called once before each step; whoever comes first comes at once."""
        chance = CHANCES[self._num_steps // SPELL % len(CHANCES)]
        self._num_steps += 1
        if self.num_requests == 0 or self._random.random() < chance:
            self._submit()

    def _submit(self) -> None:
        num_tokens = self._length(MIN_PROMPT, MAX_PROMPT)
        vocab_size = self._engine.scheduler.config.vocab_size
        ids = real.prompt(self._random, num_tokens, vocab_size)
        params = SamplingParams(
            max_tokens=self._length(MIN_OUTPUT, MAX_OUTPUT),
            ignore_eos=True,
            temperature=float(self.num_requests % 2),
            detokenize=False,
        )
        submission(self._engine.processor, ids, params)(index=self.num_requests)
        self.num_requests += 1

    def _length(self, low: int, high: int) -> int:
        return int(np.exp(self._random.uniform(*np.log([low, high]))))


def run(options: argparse.Namespace, seed: int) -> Figures:
    """Runs the load; returns one list per entry of `COLUMNS`, and how the core's error ended."""
    rows: list[tuple[int, ...]] = []
    settings: dict[str, Any] = {
        "max_num_seqs": NUM_ROWS,
        "max_num_batched_tokens": TOKEN_BUDGET,
        "max_model_len": MAX_PROMPT + MAX_OUTPUT,
        "num_threads": options.threads,
        "policy": "fair",
    }
    with LLM(real.model(options), **settings) as llm:
        load = Load(llm, seed)
        pending: tuple[int, ...] | None = None
        began = 0
        while len(rows) < options.steps:
            load.advance()
            batch = llm.engine.step()
            now = time.perf_counter_ns()
            stats = llm.stats()
            if pending is not None:
                # The step that this call has committed.
                predicted, watch, *rest = pending
                rows.append((predicted, int(stats["last_step_ns"]), watch, *rest))
            pending = None
            if batch.num_seqs:
                counts = (*real.work(batch), len(batch.sample_index), batch.num_decodes)
                pending = (int(stats["predicted_step_ns"]), now - began, *counts)
            began = now
            llm.engine.processor.take_finished()
        series = dict(zip(COLUMNS, np.array(rows).T.tolist(), strict=True))
        return {"series": series, "core_error": llm.stats()["step_time_error"]}


def best_fit(features: np.ndarray, measured: np.ndarray, num_rounds: int = 100) -> np.ndarray:
    """Coefficients with the least sum of |error| / measured, by reweighted least squares."""
    weights = np.ones(len(measured))
    relative = features / measured[:, None]
    # Features of very different size make for an ill-conditioned problem.
    size = np.abs(relative).max(axis=0)
    size[size == 0] = 1
    solution = np.zeros(features.shape[1])
    for _ in range(num_rounds):
        root = np.sqrt(weights)
        solution = np.linalg.lstsq(relative / size * root[:, None], root, rcond=None)[0]
        residual = np.abs(relative / size @ solution - 1)
        weights = 1 / np.maximum(residual, 1e-3)
    return solution / size


def percent(errors: np.ndarray, part: float = 50) -> float:
    return output.rounded(100 * float(np.percentile(errors, part))) if len(errors) else 0.0


def repeat_error(work: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Differences of steps in a row that have the same work to 2 %, as one of them alone has."""
    alike = (np.abs(np.diff(work, axis=0)) <= 0.02 * work[1:]).all(axis=1)
    difference = np.abs(np.diff(measured)) / measured[1:] / np.sqrt(2)
    result: np.ndarray = difference[alike]
    return result


def figures_of(series: Figures, num_learning: int) -> Figures:
    """The errors over the steps after the first `num_learning`."""
    columns = {name: np.array(values[num_learning:], float) for name, values in series.items()}
    predicted, measured = columns["predicted_ns"], columns["measured_ns"]
    work = np.stack([columns[name] for name in real.WORK], axis=1)
    features = np.column_stack([np.ones(len(work)), work])
    errors = np.abs(predicted - measured) / measured
    coefficients = best_fit(features, measured)
    fitted = features @ coefficients
    has_chunk = columns["num_decodes"] < columns["new_tokens"]
    return {
        "error_percent": percent(errors),
        "error_p90_percent": percent(errors, 90),
        "error_decodes_percent": percent(errors[~has_chunk]),
        "error_chunks_percent": percent(errors[has_chunk]),
        "best_fit_percent": percent(np.abs(fitted - measured) / measured),
        "repeat_percent": percent(repeat_error(work, measured)),
        "watch_percent": percent(np.abs(columns["watch_ns"] - measured) / measured),
        "num_steps": len(measured),
        "num_steps_with_chunks": int(has_chunk.sum()),
        "step_p50_ms": output.rounded(float(np.median(measured)) / 1e6),
        "step_p99_ms": output.rounded(float(np.percentile(measured, 99)) / 1e6),
        "best_a_ms": output.rounded(coefficients[0] / 1e6),
        "best_b_us": output.rounded(coefficients[1] / 1e3),
        "best_c_ns": output.rounded(coefficients[2]),
        "best_d_ns": output.rounded(coefficients[3]),
    }


def checks(results: Figures, num_learning: int) -> list[output.Check]:
    runs = list(results.values())
    after = f"after {num_learning} steps"
    return [
        output.at_most(
            f"median error of the predicted step {after}, worst run",
            output.worst(runs, "error_percent"),
            "%",
            10,
        ),
        output.at_most(
            "time of a step in stats() to a stop-watch's, median difference",
            output.worst(runs, "watch_percent"),
            "%",
            2,
        ),
    ]


def plot(results: Figures, path: Path) -> None:
    """Predicted against measured, and the errors as the model learns."""
    first = next(iter(results.values()))
    series, num_learning = first["series"], first["num_learning_steps"]
    title = f"Predicted and measured steps (median error {first['error_percent']:g} %)"
    with plots.figure(path, 1, 2, title) as axes:
        _plot_pairs(axes[0][0], series, num_learning)
        _plot_errors(axes[0][1], results, num_learning)


def _plot_pairs(axes: Any, series: Figures, num_learning: int) -> None:
    columns = {name: np.array(values[num_learning:], float) for name, values in series.items()}
    measured, predicted = columns["measured_ns"] / 1e6, columns["predicted_ns"] / 1e6
    has_chunk = columns["num_decodes"] < columns["new_tokens"]
    for chosen, label, color in (
        (~has_chunk, "decodes", plots.OTHER),
        (has_chunk, "with chunks of prompts", plots.OURS),
    ):
        axes.plot(measured[chosen], predicted[chosen], ".", color=color, label=label, markersize=3)
    ends = [measured.min(), measured.max()]
    axes.plot(ends, ends, label="predicted = measured", **plots.GOAL)
    axes.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted, ms")
    for axis in (axes.xaxis, axes.yaxis):
        plots.plain_ticks(axis)


def _plot_errors(axes: Any, results: Figures, num_learning: int) -> None:
    for name, result in results.items():
        predicted = np.array(result["series"]["predicted_ns"], float)
        measured = np.array(result["series"]["measured_ns"], float)
        errors = 100 * np.abs(predicted - measured) / measured
        medians = [np.median(errors[max(0, end - 50) : end]) for end in range(8, len(errors) + 1)]
        axes.plot(range(8, len(errors) + 1), medians, linewidth=1.2, label=f"run {name}")
    axes.axhline(10, label="goal", **plots.GOAL)
    axes.axvline(num_learning, color=plots.THIRD, linewidth=0.8)
    axes.set(xlabel="step", ylabel="median error of the last 50 steps, %", ylim=(0, 50))


def measure(options: argparse.Namespace, report: Report) -> Figures:
    results: Figures = {}
    num_learning = options.steps // 2 if options.quick else NUM_LEARNING_STEPS
    for seed in options.seeds:
        result = run(options, seed)
        figures = figures_of(result["series"], num_learning)
        report.show(f"seed {seed}", {**figures, "core_error": result["core_error"]})
        results[str(seed)] = {**figures, **result, "num_learning_steps": num_learning}
    return results


def main() -> None:
    parser = real.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="default: 600, quick 40")
    options = parser.parse_args()
    options.steps = options.steps or (40 if options.quick else 600)
    report = Report("step_model", options)
    results = measure(options, report)
    report.checks = checks(results, next(iter(results.values()))["num_learning_steps"])
    report.finish(results, plot)


if __name__ == "__main__":
    main()
