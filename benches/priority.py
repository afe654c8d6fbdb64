"""Whether classes keep their order under load, in virtual time (profiles of a step's cost).

    python benches/priority.py --json --plot priority.png

Capacity is measured first: requests per second of a closed loop that keeps the rows full. Then
interactive requests arrive at half of it and batch requests at 9.5 times of it; in the middle third
of the time no interactive ones come. The interactive target for the time between two tokens is what
a step of full rows takes that also computes two prompts, rounded up to 5 ms. Reported and checked:

  interactive  plans from arrival to the first chunk, time to first token beside that of the same
               requests alone (`fair`) and beside batch in one line (`fcfs`, no classes), and the
               time between tokens against the target
  batch        longest pause of a running decode; how often later arrivals were admitted before
               an aged request, to the bound `20 * (aged requests before it + 1)`; the longest wait
  idle         rows in use, over time, while no interactive request comes, and in the whole run; and
               throughput in the middle third to the saturated one

A loaded step is the 99th percentile of the loaded run's, as both times to first token are. The
ratios to the limits with the mean and with the median step are reported, too.
Goals hold for each seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from policies import output, plots
from policies.aging import overtakes_to_bound
from policies.capacity import measure_capacity
from policies.output import Figures, Report
from policies.profiles import NUM_ROWS, PROFILES, Profile
from policies.run import NEVER, Run
from policies.simulator import config, simulate
from policies.workload import SECOND_NS, Stream, open_loop, poisson

INTERACTIVE_LOAD = 0.5
TOTAL_LOAD = 10.0
MAX_BATCH_PAUSE_STEPS = 32
# Context of a sequence in the mean, half of its outputs told: what the target is computed from.
MEAN_CONTEXT = 350
SPAN_S = {"gpu": 90.0, "cpu": 300.0}
"""Seconds of a run, by profile: a few thousand steps in each third."""


def ms(seconds: float) -> float:
    return output.rounded(1e3 * seconds)


def streams_of(seed: int, capacity: float, span_s: float) -> list[Stream]:
    random = np.random.default_rng(seed)
    rate, third = INTERACTIVE_LOAD * capacity, span_s / 3
    parts = [poisson(random, rate, 0, third), poisson(random, rate, 2 * third, span_s)]
    batch = poisson(random, (TOTAL_LOAD - INTERACTIVE_LOAD) * capacity, 0, span_s)
    return [
        open_loop("interactive", random, np.concatenate(parts), priority="interactive"),
        open_loop("batch", random, batch, priority="batch"),
    ]


def interactive_figures(run: Run) -> Figures:
    indices = run.of("interactive")
    chunks, ttft_s, itl_s = (
        run.first_chunk_steps(indices),
        run.ttft_s(indices),
        run.itl_s(indices),
    )
    return {
        "first_chunk_steps_p99": int(output.percentile(chunks, 99)),
        "first_chunk_steps_max": int(chunks.max(initial=0)),
        "ttft_p50_ms": ms(output.percentile(ttft_s, 50)),
        "ttft_p99_ms": ms(output.percentile(ttft_s, 99)),
        "itl_p50_ms": ms(output.percentile(itl_s, 50)),
        "itl_p99_ms": ms(output.percentile(itl_s, 99)),
        **output.step_times(run.durations_s()),
        "num_started": len(chunks),
        "num_submitted": len(indices),
        "ttft_ms": [ms(value) for value in ttft_s[:: max(1, len(ttft_s) // 500)]],
    }


def batch_figures(run: Run, aging_s: float, aged_interval: int) -> Figures:
    """How batch requests fare; only what had time to happen counts as waiting for it."""
    indices, requests = run.of("batch"), run.requests
    submitted, first = requests.submitted_ns[indices], requests.first_planned_ns[indices]
    came = submitted != NEVER
    waited = np.where(first == NEVER, run.end_ns, first)[came] - submitted[came]
    has_started = came & (first != NEVER)
    started_wait = (first - submitted)[has_started]
    overtakes = overtakes_to_bound(run, aging_s, aged_interval)
    return {
        "num_started": int(np.count_nonzero(has_started)),
        "num_ended": int(np.count_nonzero(requests.ended_ns[indices] != NEVER)),
        "longest_pause_steps": int(requests.longest_pause[indices].max(initial=0)),
        "longest_absence_steps": int(requests.longest_absence[indices].max(initial=0)),
        "longest_wait_of_started_s": output.rounded(started_wait.max(initial=0) / SECOND_NS),
        "longest_wait_s": output.rounded(waited.max(initial=0) / SECOND_NS),
        **overtakes,
        "num_displacements": int(run.stats["num_displacements"]),
        "num_recomputed_tokens": int(run.stats["num_recomputed_tokens"]),
    }


def idle_figures(run: Run, capacity: Figures, span_s: float) -> Figures:
    """Rows in use; the first tenth of each third is left out, in which the load changes."""
    third = span_s / 3
    from_ns, until_ns = (int(SECOND_NS * third * part) for part in (1.1, 2.0))
    start_ns = int(SECOND_NS * third * 0.1)

    def rows(values: list[int], since: int, until: int) -> float:
        return output.rounded(run.mean_over_time(values, since, until) / NUM_ROWS)

    tokens = run.output_tokens(None, from_ns, until_ns) / (until_ns - from_ns) * SECOND_NS
    held, running = run.steps.num_held_rows, run.steps.num_seqs
    return {
        "held_rows": rows(held, start_ns, run.end_ns),
        "held_rows_without_interactive": rows(held, from_ns, until_ns),
        "rows_in_batch": rows(running, start_ns, run.end_ns),
        "rows_in_batch_without_interactive": rows(running, from_ns, until_ns),
        "throughput_to_saturated": output.rounded(tokens / capacity["output_tokens_per_s"]),
    }


def timeline(run: Run, span_s: float, num_bins: int = 60) -> Figures:
    """Output tokens per second of each class, over time."""
    edges = np.linspace(0, span_s * SECOND_NS, num_bins + 1)
    of_event = run.requests.stream[run.event_request]
    result: Figures = {"seconds": (edges[:-1] / SECOND_NS).round(3).tolist()}
    for number, stream in enumerate(run.streams):
        counts, _ = np.histogram(run.event_ns[of_event == number], bins=edges)
        result[stream.name] = (counts * num_bins / span_s).round(1).tolist()
    return result


def without_classes(streams: list[Stream]) -> list[Stream]:
    """The same requests, all of the standard class."""
    return [Stream(**{**vars(stream), "parameters": {}}) for stream in streams]


def measure_seed(seed: int, profile: Profile, span_s: float) -> Figures:
    capacity = measure_capacity(seed, profile, span_s)
    streams = streams_of(seed, capacity["requests_per_s"], span_s)
    target_ms = profile.full_step_ms(2, MEAN_CONTEXT)
    classes = {"interactive": {"target_itl_ms": target_ms}}
    fair = config(policy="fair", classes=classes)
    run = simulate(fair, profile, streams, until_s=span_s)
    alone = simulate(fair, profile, streams[:1], until_s=span_s)
    fcfs = simulate(config(policy="fcfs"), profile, without_classes(streams), until_s=span_s)
    interactive, unloaded = interactive_figures(run), interactive_figures(alone)
    aged_interval = round(1 / fair.aged_share)
    return {
        "capacity": capacity,
        "target_itl_ms": target_ms,
        "interactive": interactive,
        "alone": unloaded,
        "fcfs": interactive_figures(fcfs),
        **output.ttft_to_limits(interactive, unloaded),
        "itl_to_target": output.rounded(interactive["itl_p99_ms"] / target_ms),
        "batch": batch_figures(run, fair.aging_s, aged_interval),
        "idle": idle_figures(run, capacity, span_s),
        "timeline": timeline(run, span_s),
    }


def checks(results: Figures) -> list[output.Check]:
    entries = []
    for profile, by_seed in results.items():
        runs = list(by_seed.values())
        interactive = [run["interactive"] for run in runs]
        batch, idle = [run["batch"] for run in runs], [run["idle"] for run in runs]
        chunk = output.worst(interactive, "first_chunk_steps_p99")
        pause = output.worst(batch, "longest_pause_steps")
        held = min(
            output.least(idle, "held_rows"), output.least(idle, "held_rows_without_interactive")
        )
        throughput = 100 * output.least(idle, "throughput_to_saturated")
        entries += [
            output.at_most(f"{profile}, interactive: first chunk, p99", chunk, "steps", 2),
            output.at_most(
                f"{profile}, interactive: TTFT p99 to (alone p99 + 2 loaded steps)",
                output.worst(runs, "ttft_to_limit"),
                "ratio",
                1,
            ),
            output.at_most(
                f"{profile}, interactive: ITL p99 to target {runs[0]['target_itl_ms']:g} ms",
                output.worst(runs, "itl_to_target"),
                "ratio",
                1,
            ),
            output.at_most(
                f"{profile}, batch: longest pause of a decode",
                pause,
                "steps",
                MAX_BATCH_PAUSE_STEPS,
            ),
            output.at_most(
                f"{profile}, batch: later admissions before an aged request to the bound W",
                output.worst(batch, "overtakes_to_bound"),
                "ratio",
                1,
            ),
            output.at_least(f"{profile}, rows held over time", 100 * held, "%", 98),
            output.at_least(
                f"{profile}, batch alone: throughput to saturated", throughput, "%", 98
            ),
        ]
    return entries


def plot(results: Figures, path: Path) -> None:
    """Tokens of both classes over time, and the interactive times to first token."""
    title = "Interactive at half of capacity, batch bringing the load to 10x (virtual time)"
    with plots.figure(path, len(results), 2, title, width=6) as axes:
        for row, (profile, by_seed) in zip(axes, results.items(), strict=True):
            runs = list(by_seed.values())
            _plot_timeline(row[0], profile, runs[0])
            styles = {"alone": plots.THIRD, "fcfs": plots.OTHER, "interactive": plots.OURS}
            labels = {"fcfs": "fcfs, no classes", "interactive": "fair"}
            for name, color in styles.items():
                values = [value for run in runs for value in run[name]["ttft_ms"]]
                plots.distribution(row[1], values, labels.get(name, name), color)
            row[1].set(xscale="log", yscale="log", xlabel="TTFT of interactive requests, ms")
            row[1].set(ylabel="part of requests at or above")
            row[1].set_title(f"{profile}: interactive requests, all seeds", fontsize=9)


def _plot_timeline(axes: Any, profile: str, run: Figures) -> None:
    line = run["timeline"]
    parts, colors = [line["interactive"], line["batch"]], [plots.OURS, plots.OTHER]
    labels = ["interactive", "batch"]
    axes.stackplot(line["seconds"], *parts, labels=labels, colors=colors, alpha=0.75)
    saturated = run["capacity"]["output_tokens_per_s"]
    axes.axhline(saturated, label="saturated, one class", **plots.GOAL)
    axes.set(xlabel="virtual seconds", ylabel="output tokens/s", ylim=(0, 1.35 * saturated))
    axes.set_title(f"{profile}: who gets the tokens (first seed)", fontsize=9)


def measure(options: argparse.Namespace, report: Report) -> Figures:
    results: Figures = {}
    for name in options.profile:
        span_s = SPAN_S[name] * (0.06 if options.quick else 1)
        results[name] = {}
        for seed in options.seeds:
            results[name][seed] = result = measure_seed(seed, PROFILES[name], span_s)
            for part in ("capacity", "alone", "fcfs", "interactive", "batch", "idle"):
                report.show(f"{name}, seed {seed}, {part}", result[part])
            report.show(f"{name}, seed {seed}", result)
    return results


def main() -> None:
    options = output.parser(__doc__).parse_args()
    report = Report("priority", options)
    results = measure(options, report)
    report.checks = checks(results)
    report.finish(results, plot)


if __name__ == "__main__":
    main()
