"""What a latency target costs and holds, in virtual time (profiles of a step's cost; no model).

    python benches/itl.py --json --plot itl.png

64 requests decode all the time while prompts of 4,000 to 20,000 tokens come. With `target_itl_ms`
(50 ms by the profile gpu, 150 ms by cpu) and at most 8,192 tokens a step, the scheduler chooses
each step's tokens by what it has learned of the steps' cost; without, a fixed budget decides.

  saturated  eight prompts always wait or run: 99th percentile of the time between two tokens (ITL)
             of the decodes, and prompt tokens computed per second; with the target, with each fixed
             budget of a grid (128 to 8,192, ratio 1.19, with 512, 2,048 and 8,192), and the best of
             these that holds the target, too (p99 <= 1.1 times the target)
  loads      the same with prompts that arrive at random, at several parts of the saturated rate
             (first seed only)
  joining    a context of 50,000 tokens joins 63 of 500: the predicted and the real step and the
             budget, while it is computed and before and after, and the ITL of the others

More rows than 64 are allowed, since the prompts need some besides the decodes; prompts end with
their first token. The first tenth of the time is left out. Goals hold for each seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from policies import output, plots
from policies.output import Figures, Report
from policies.profiles import PROFILES, Profile
from policies.run import NEVER, Run
from policies.simulator import config, simulate
from policies.workload import SECOND_NS, Stream, poisson

TARGET_MS = {"gpu": 50.0, "cpu": 150.0}
SPAN_S = {"gpu": 40.0, "cpu": 150.0}
NUM_DECODES = 64
DECODE_CONTEXT = 500
MIN_PROMPT, MAX_PROMPT = 4_000, 20_000
NUM_PROMPTS_IN_FLIGHT = 8
TOKEN_BUDGET = 8192
SHOWN_BUDGETS = (512, 2048, 8192)
LOADS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.3)
QUICK_LOADS = (0.5, 1.0)
LONG_CONTEXT = 50_000
TOLERANCE = 1.1
# Steps until the model of a step's cost is expected to be right.
NUM_LEARNING_STEPS = 200
WATCHED = ("predicted_step_ns", "token_budget")


def ms(seconds: float) -> float:
    return output.rounded(1e3 * seconds)


def budgets(quick: bool) -> list[int]:
    """The fixed budgets to choose the best from."""
    grid = np.geomspace(128, TOKEN_BUDGET, 4 if quick else 25).round().astype(int)
    return sorted({*grid.tolist(), *SHOWN_BUDGETS})


def settings(budget: int, target_ms: float | None) -> Any:
    return config(
        policy="fair",
        max_num_seqs=2 * NUM_DECODES,
        max_num_batched_tokens=budget,
        num_blocks=1 << 16,
        max_model_len=1 << 17,
        target_itl_ms=target_ms,
    )


def decodes(num_requests: int = NUM_DECODES) -> Stream:
    """Requests that go on decoding until the end of the simulation."""
    at_once = np.zeros(num_requests, dtype=np.int64)
    lengths = np.full(num_requests, 1 << 40), np.full(num_requests, DECODE_CONTEXT)
    return Stream("decodes", at_once, *lengths, max_tokens=None)


def prompts(seed: int, num_requests: int) -> Stream:
    """Prompts that end with their first token, in a closed loop unless given arrival times."""
    random = np.random.default_rng(seed)
    lengths = random.integers(MIN_PROMPT, MAX_PROMPT + 1, size=num_requests)
    at_once, ones = np.zeros(num_requests, dtype=np.int64), np.ones(num_requests, dtype=np.int64)
    return Stream("prompts", at_once, ones, lengths, num_in_flight=NUM_PROMPTS_IN_FLIGHT)


def figures_of(run: Run) -> Figures:
    """ITL of the decodes and prompt tokens computed per second, without the first tenth."""
    from_ns = run.end_ns // 10
    start = np.asarray(run.steps.start_ns)
    is_inside = start >= from_ns
    gaps, request, ends = run.gaps()
    is_decode = (run.requests.stream[request] == run.stream("decodes")) & (ends > from_ns)
    itl_s = gaps[is_decode] / SECOND_NS
    first = run.requests.first_token_ns
    num_first = np.count_nonzero(first > from_ns)
    num_decoded = run.output_tokens(None, from_ns) - num_first
    num_prompt_tokens = int(np.asarray(run.steps.num_tokens)[is_inside].sum()) - num_decoded
    seconds = (run.end_ns - from_ns) / SECOND_NS
    return {
        "itl_p50_ms": ms(output.percentile(itl_s, 50)),
        "itl_p99_ms": ms(output.percentile(itl_s, 99)),
        "itl_max_ms": ms(float(itl_s.max(initial=0))),
        "prompt_tokens_per_s": output.rounded(num_prompt_tokens / seconds),
        "num_decodes": int(np.count_nonzero(first[run.of("decodes")] != NEVER)),
    }


def prediction_error(run: Run) -> float:
    """Median of the relative error of the predicted steps, in percent, once it has learned."""
    predicted = np.asarray(run.steps.watched["predicted_step_ns"])[NUM_LEARNING_STEPS:]
    real = np.asarray(run.steps.duration_ns)[NUM_LEARNING_STEPS:]
    return float(np.median(np.abs(predicted / real - 1))) * 100 if len(real) else float("inf")


def measure_saturated(
    seed: int, profile: Profile, target_ms: float, span_s: float, quick: bool
) -> Figures:
    num_prompts = int(span_s * 40) + 50
    streams = [decodes(), prompts(seed, num_prompts)]
    run = simulate(
        settings(TOKEN_BUDGET, target_ms), profile, streams, until_s=span_s, watch=WATCHED
    )
    ours = {**figures_of(run), "step_error_percent": output.rounded(prediction_error(run))}
    fixed = {}
    for budget in budgets(quick):
        run = simulate(settings(budget, None), profile, streams, until_s=span_s)
        fixed[budget] = figures_of(run)
    holding = {
        budget: figures["prompt_tokens_per_s"]
        for budget, figures in fixed.items()
        if figures["itl_p99_ms"] <= TOLERANCE * target_ms
    }
    best = max(holding, key=lambda budget: holding[budget])
    return {
        "target": ours,
        "fixed": fixed,
        "best_fixed_budget": best,
        "best_fixed_tokens_per_s": holding[best],
        "itl_to_target": output.rounded(ours["itl_p99_ms"] / target_ms),
        "throughput_to_best_fixed": output.rounded(ours["prompt_tokens_per_s"] / holding[best]),
    }


def measure_loads(
    seed: int,
    profile: Profile,
    target_ms: float,
    span_s: float,
    rate: float,
    offered: tuple[float, ...],
) -> Figures:
    """Prompts at parts of `rate` (per second), by mode: a list of figures in order of the load."""
    modes = {"target": settings(TOKEN_BUDGET, target_ms)}
    modes |= {f"fixed {budget}": settings(budget, None) for budget in SHOWN_BUDGETS}
    result: Figures = {mode: [] for mode in modes}
    for load in offered:
        arrivals = poisson(np.random.default_rng(seed), load * rate, 0, span_s)
        stream = prompts(seed, len(arrivals))
        stream.num_in_flight, stream.arrival_ns = 0, arrivals
        for mode, mode_settings in modes.items():
            run = simulate(mode_settings, profile, [decodes(), stream], until_s=span_s)
            result[mode].append({"load": load, **figures_of(run)})
    return result


def measure_joining(profile: Profile, target_ms: float, span_s: float) -> Figures:
    """The long context joins after a third of the time."""
    join_ns = int(span_s / 3 * SECOND_NS)
    joining = Stream(
        "joining",
        np.array([join_ns]),
        np.array([1 << 40]),
        np.array([LONG_CONTEXT]),
        max_tokens=None,
    )
    streams = [decodes(NUM_DECODES - 1), joining]
    run = simulate(
        settings(TOKEN_BUDGET, target_ms), profile, streams, until_s=span_s, watch=WATCHED
    )
    started = int(run.requests.first_planned_ns[-1])
    computed = int(run.requests.first_token_ns[-1])
    assert computed != NEVER, "the long context was not computed in time"
    start = np.asarray(run.steps.start_ns)
    spans = {
        "before": (start >= started - SECOND_NS) & (start < started),
        "computing": (start >= started) & (start < computed),
        "after": (start >= computed) & (start < computed + SECOND_NS),
    }
    series = {
        "step_ms": np.asarray(run.steps.duration_ns) / 1e6,
        "predicted_ms": np.asarray(run.steps.watched["predicted_step_ns"]) / 1e6,
        "token_budget": np.asarray(run.steps.watched["token_budget"], dtype=np.float64),
    }
    result: Figures = {
        span: {
            name: output.rounded(float(np.mean(values[inside]))) for name, values in series.items()
        }
        for span, inside in spans.items()
    }
    gaps, request, ends = run.gaps()
    is_other = (request < NUM_DECODES - 1) & (ends >= started)
    others = gaps[is_other] / SECOND_NS
    step = spans["computing"]
    result["itl_p99_ms"] = ms(output.percentile(others, 99))
    result["itl_max_ms"] = ms(float(others.max()))
    result["itl_to_target"] = output.rounded(result["itl_max_ms"] / target_ms)
    result["computed_in_s"] = output.rounded((computed - started) / SECOND_NS)
    result["num_chunks"] = int(np.count_nonzero(step))
    near = (start >= started - 2 * SECOND_NS) & (start < computed + 2 * SECOND_NS)
    result["series"] = {
        "seconds": ((start[near] - started) / SECOND_NS).round(4).tolist(),
        **{name: values[near].round(3).tolist() for name, values in series.items()},
    }
    return result


def checks(results: Figures) -> list[output.Check]:
    entries = []
    for profile, result in results.items():
        runs = list(result["saturated"].values())
        target = f"{profile}, target {result['target_itl_ms']:g} ms"
        entries += [
            output.at_most(
                f"{target}: ITL p99 to target",
                output.worst(runs, "itl_to_target"),
                "ratio",
                TOLERANCE,
            ),
            output.at_least(
                f"{target}: prompt tokens/s to the best fixed budget",
                100 * output.least(runs, "throughput_to_best_fixed"),
                "%",
                85,
            ),
            output.at_most(
                f"{target}: median error of the predicted step",
                output.worst([run["target"] for run in runs], "step_error_percent"),
                "%",
                10,
            ),
            output.at_most(
                f"{target}, 50,000 tokens join: longest ITL to target",
                result["joining"]["itl_to_target"],
                "ratio",
                TOLERANCE,
            ),
        ]
    return entries


def plot(results: Figures, path: Path) -> None:
    """Throughput against ITL: saturated over fixed budgets, and over load; the joining context."""
    title = "64 decodes beside prompts of 4,000 to 20,000 tokens (virtual time)"
    with plots.figure(path, len(results), 3, title) as axes:
        for row, (profile, result) in zip(axes, results.items(), strict=True):
            target_ms = result["target_itl_ms"]
            _plot_saturated(row[0], profile, result)
            _plot_loads(row[1], profile, result)
            for each in row[:2]:
                each.axvline(target_ms, label=f"target {target_ms:g} ms", **plots.GOAL)
                each.set(xscale="log", xlabel="ITL of the decodes, p99, ms")
                plots.plain_ticks(each.xaxis)
                each.set(ylabel="prompt tokens/s")
            _plot_joining(row[2], profile, result)


def _points(figures: list[Figures]) -> tuple[list[float], list[float]]:
    each = [(entry["itl_p99_ms"], entry["prompt_tokens_per_s"]) for entry in figures]
    return [itl for itl, _ in each], [tokens for _, tokens in each]


def _plot_saturated(axes: Any, profile: str, result: Figures) -> None:
    runs = list(result["saturated"].values())
    fixed = runs[0]["fixed"]
    axes.plot(*_points(list(fixed.values())), "-o", color=plots.OTHER, label="fixed budgets")
    for budget in SHOWN_BUDGETS:
        figures = fixed[budget]
        at = (figures["itl_p99_ms"], figures["prompt_tokens_per_s"])
        axes.annotate(f"{budget:,}", at, xytext=(6, -11), textcoords="offset points", fontsize=8)
    ours = _points([run["target"] for run in runs])
    axes.plot(*ours, "*", color=plots.OURS, markersize=11, label="with the target, all seeds")
    axes.set_title(f"{profile}: prompts always waiting", fontsize=9)


def _plot_loads(axes: Any, profile: str, result: Figures) -> None:
    colors = [plots.OURS, plots.OTHER, plots.FOURTH, plots.THIRD]
    for (mode, figures), color in zip(result["loads"].items(), colors, strict=True):
        axes.plot(*_points(figures), "-o", color=color, label=mode, markersize=4)
    axes.set_title(f"{profile}: load {LOADS[0]:g} to {LOADS[-1]:g} of saturation", fontsize=9)


def _plot_joining(axes: Any, profile: str, result: Figures) -> None:
    series = result["joining"]["series"]
    axes.plot(series["seconds"], series["step_ms"], color=plots.OTHER, label="step, ms")
    axes.plot(
        series["seconds"], series["predicted_ms"], ":", color=plots.OURS, label="predicted, ms"
    )
    axes.axhline(result["target_itl_ms"], **plots.GOAL)
    axes.set(xlabel="virtual seconds since 50,000 tokens came", ylabel="ms")
    second = axes.twinx()
    second.plot(series["seconds"], series["token_budget"], color=plots.FOURTH, alpha=0.7)
    second.set_ylabel("token budget of the step", color=plots.FOURTH)
    axes.set_title(f"{profile}: a context of 50,000 joins 63 of 500", fontsize=9)


def measure(options: argparse.Namespace, report: Report) -> Figures:
    results: Figures = {}
    for name in options.profile:
        profile, target_ms = PROFILES[name], TARGET_MS[name]
        span_s = SPAN_S[name] * (0.15 if options.quick else 1)
        result = results[name] = {"target_itl_ms": target_ms, "saturated": {}}
        for seed in options.seeds:
            figures = measure_saturated(seed, profile, target_ms, span_s, options.quick)
            result["saturated"][seed] = figures
            report.show(f"{name}, saturated, seed {seed}, target", figures["target"])
            for budget in (*SHOWN_BUDGETS, figures["best_fixed_budget"]):
                report.show(
                    f"{name}, saturated, seed {seed}, fixed {budget}", figures["fixed"][budget]
                )
            report.show(f"{name}, saturated, seed {seed}", figures)
        first = options.seeds[0]
        tokens = result["saturated"][first]["target"]["prompt_tokens_per_s"]
        rate = tokens / ((MIN_PROMPT + MAX_PROMPT) / 2)
        offered = QUICK_LOADS if options.quick else LOADS
        result["loads"] = measure_loads(first, profile, target_ms, span_s, rate, offered)
        for mode, entries in result["loads"].items():
            for entry in entries:
                report.show(f"{name}, loads, {mode}", entry)
        # Long enough for the whole context to be computed.
        joining_s = SPAN_S[name] * (0.4 if options.quick else 1)
        result["joining"] = measure_joining(profile, target_ms, joining_s)
        for span in ("before", "computing", "after"):
            report.show(f"{name}, joining, {span}", result["joining"][span])
        report.show(f"{name}, joining", result["joining"])
    return results


def main() -> None:
    options = output.parser(__doc__).parse_args()
    report = Report("itl", options)
    results = measure(options, report)
    report.checks = checks(results)
    report.finish(results, plot)


if __name__ == "__main__":
    main()
