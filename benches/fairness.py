"""Whether tenants get their share, in virtual time (profiles of a step's cost; no model).

    python benches/fairness.py --json --plot fairness.png

  flood    a tenant submits 200 requests with outputs around 1,000 tokens (at most 4,096) at once;
           a polite one submits one request per second (in the mean, from the first second on). In
           how many steps after its arrival a polite request runs its first chunk, and its time to
           first token: by `fair`, by `fcfs`, and alone. `fair` has an engine-wide latency target:
           what a step of full rows takes that also computes one prompt, rounded up to 5 ms.
           Throughput is output tokens per second until the flood has ended.
  weights  three tenants of weight 1, 2 and 4 that always have requests waiting: each one's part of
           the weighted service (prompt tokens 1, output tokens 2), and throughput beside `fcfs`.
  caps     a tenant asks for outputs of 10,000 tokens, 100 at once, while another sends short
           requests at a quarter of capacity: how long these wait by `fcfs`, by `fair`, and by
           `fair` with a cap on the tenant's `max_tokens` or `max_num_seqs`. Who has not started at
           the end has waited until then. No goal, only figures.

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
from policies.output import Figures, Report
from policies.profiles import NUM_ROWS, PROFILES, Profile
from policies.run import Run
from policies.simulator import config, simulate
from policies.workload import SECOND_NS, Stream, closed_loop, open_loop, poisson

NUM_FLOOD_REQUESTS = 200
FLOOD_OUTPUT_TOKENS, MAX_FLOOD_TOKENS = 1000, 4096
# Of its running sequences in the mean over time: longer ones run longer.
FLOOD_CONTEXT = 1300
POLITE_RATE = 1.0
WEIGHTS = {"one": 1.0, "two": 2.0, "four": 4.0}
NUM_LONG_REQUESTS = 100
LONG_OUTPUT_TOKENS = 10_000
MAX_TOKENS_CAP = 1024
MAX_NUM_SEQS_CAP = 16
# Short requests per second, a quarter of what the profile serves.
SHORT_RATE = {"gpu": 9.0, "cpu": 1.6}


def ms(seconds: float) -> float:
    return output.rounded(1e3 * seconds)


def flood_streams(seed: int, num_requests: int, span_s: float) -> list[Stream]:
    random = np.random.default_rng(seed)
    at_once = np.zeros(num_requests, dtype=np.int64)
    flood = open_loop(
        "flood",
        random,
        at_once,
        median=FLOOD_OUTPUT_TOKENS,
        at_most=MAX_FLOOD_TOKENS,
        max_tokens=MAX_FLOOD_TOKENS,
        tenant="flood",
    )
    # It does not come with the flood, but after it.
    arrivals = poisson(random, POLITE_RATE, 1.0, span_s)
    return [flood, open_loop("polite", random, arrivals, tenant="polite")]


def polite_figures(run: Run) -> Figures:
    polite = run.of("polite")
    ttft_s = run.ttft_s(polite)
    chunks = run.first_chunk_steps(polite)
    return {
        "num_polite": len(ttft_s),
        "first_chunk_steps_p99": int(output.percentile(chunks, 99)),
        "first_chunk_steps_max": int(chunks.max(initial=0)),
        "ttft_p50_ms": ms(output.percentile(ttft_s, 50)),
        "ttft_p99_ms": ms(output.percentile(ttft_s, 99)),
        **output.step_times(run.durations_s()),
        "output_tokens_per_s": output.rounded(run.output_tokens() / run.end_ns * SECOND_NS),
        "num_preemptions": int(run.stats["num_preemptions"]),
        "num_recomputed_tokens": int(run.stats["num_recomputed_tokens"]),
        "ttft_ms": [ms(value) for value in ttft_s],
    }


def measure_flood(seed: int, profile: Profile, num_requests: int) -> Figures:
    # Far more than the flood can take: a step of full rows brings 64 tokens.
    num_steps = num_requests * FLOOD_OUTPUT_TOKENS * 1.4 / NUM_ROWS + 6000
    span_s = num_steps * profile.step_ms(NUM_ROWS, NUM_ROWS * 1000) / 1e3
    streams = flood_streams(seed, num_requests, span_s)
    fair_settings = {"policy": "fair", "target_itl_ms": profile.full_step_ms(1, FLOOD_CONTEXT)}
    runs = {
        name: simulate(config(**settings), profile, streams, until_ended="flood")
        for name, settings in {"fair": fair_settings, "fcfs": {"policy": "fcfs"}}.items()
    }
    result: Figures = {name: polite_figures(run) for name, run in runs.items()}
    until_s = runs["fair"].end_ns / SECOND_NS
    alone = simulate(config(**fair_settings), profile, streams[1:], until_s=until_s)
    result["alone"] = polite_figures(alone)
    fair, fcfs = result["fair"], result["fcfs"]
    result |= output.ttft_to_limits(fair, result["alone"])
    result["throughput_to_fcfs"] = output.rounded(
        fair["output_tokens_per_s"] / fcfs["output_tokens_per_s"]
    )
    return result


def measure_weights(seed: int, profile: Profile, span_s: float) -> Figures:
    random = np.random.default_rng(seed)
    # No more than four times what is served: each always has twice the rows in flight.
    num_requests = int(4 * span_s * (36 if profile.name == "gpu" else 7)) + 4 * NUM_ROWS
    streams = [
        closed_loop(name, random, num_requests, 2 * NUM_ROWS, tenant=name) for name in WEIGHTS
    ]
    tenants = {name: {"weight": weight} for name, weight in WEIGHTS.items()}
    fair = simulate(config(policy="fair", tenants=tenants), profile, streams, until_s=span_s)
    fcfs = simulate(config(policy="fcfs"), profile, streams, until_s=span_s)
    # The first tenth fills the rows, which nobody has a share of yet.
    from_ns = fair.end_ns // 10
    service = {name: fair.service(name, from_ns, fair.end_ns) for name in WEIGHTS}
    total, weights = sum(service.values()), sum(WEIGHTS.values())
    errors = {
        name: service[name] / total / (weight / weights) - 1 for name, weight in WEIGHTS.items()
    }
    rates = [run.output_tokens() / run.end_ns * SECOND_NS for run in (fair, fcfs)]
    return {
        **{f"share_{name}": output.rounded(service[name] / total) for name in WEIGHTS},
        "share_error": output.rounded(max(map(abs, errors.values()))),
        "output_tokens_per_s": output.rounded(rates[0]),
        "fcfs_output_tokens_per_s": output.rounded(rates[1]),
        "throughput_to_fcfs": output.rounded(rates[0] / rates[1]),
        "num_preemptions": int(fair.stats["num_preemptions"]),
    }


def cap_settings() -> dict[str, dict[str, Any]]:
    """The policies that `caps` compares."""
    capped = {"max_tokens": {"max_tokens": MAX_TOKENS_CAP}}
    capped["max_num_seqs"] = {"max_num_seqs": MAX_NUM_SEQS_CAP}
    settings: dict[str, dict[str, Any]] = {"fcfs": {"policy": "fcfs"}, "fair": {"policy": "fair"}}
    for name, limits in capped.items():
        settings[f"fair, {name} capped"] = {"policy": "fair", "tenants": {"long": limits}}
    return settings


def measure_caps(seed: int, profile: Profile, num_requests: int, span_s: float) -> Figures:
    random = np.random.default_rng(seed)
    long = open_loop("long", random, np.zeros(num_requests, dtype=np.int64), tenant="long")
    long.num_output_tokens[:] = LONG_OUTPUT_TOKENS
    arrivals = poisson(random, SHORT_RATE[profile.name], 1.0, span_s)
    short = open_loop("short", random, arrivals, tenant="short")
    result: Figures = {}
    for name, settings in cap_settings().items():
        # With a cap, who names no `max_tokens` gets it; who names more is refused.
        long.max_tokens = None if "max_tokens" in name else LONG_OUTPUT_TOKENS
        run = simulate(config(**settings), profile, [long, short], until_s=span_s)
        indices = run.of("short")
        waited = run.requests.first_planned_ns[indices] - run.requests.submitted_ns[indices]
        is_open = run.requests.first_step[indices] < 0
        waited[is_open] = run.end_ns - run.requests.submitted_ns[indices][is_open]
        result[name] = {
            "wait_p50_ms": ms(output.percentile(waited / SECOND_NS, 50)),
            "wait_p99_ms": ms(output.percentile(waited / SECOND_NS, 99)),
            "num_short": len(indices),
            "num_not_started": int(np.count_nonzero(is_open)),
            "ttft_p99_ms": ms(output.percentile(run.ttft_s(indices), 99)),
            "output_tokens_per_s": output.rounded(run.output_tokens() / run.end_ns * SECOND_NS),
            "long_output_tokens": run.output_tokens("long"),
            "num_displacements": int(run.stats["num_displacements"]),
        }
    return result


def checks(results: Figures) -> list[output.Check]:
    entries = []
    for profile, result in results.items():
        floods = result["flood"].values()
        fair = [run["fair"] for run in floods]
        weights = result["weights"].values()
        entries += [
            output.at_most(
                f"{profile}, polite beside a flood: first chunk, p99",
                output.worst(fair, "first_chunk_steps_p99"),
                "steps",
                2,
            ),
            output.at_most(
                f"{profile}, polite beside a flood: TTFT p99 to (alone p99 + 2 loaded steps)",
                output.worst(floods, "ttft_to_limit"),
                "ratio",
                1,
            ),
            output.at_most(
                f"{profile}, weights 1:2:4: largest error of a share",
                100 * output.worst(weights, "share_error"),
                "%",
                5,
            ),
            output.at_least(
                f"{profile}, flood: throughput to fcfs",
                100 * output.least(floods, "throughput_to_fcfs"),
                "%",
                98,
            ),
            output.at_least(
                f"{profile}, weights: throughput to fcfs",
                100 * output.least(weights, "throughput_to_fcfs"),
                "%",
                98,
            ),
        ]
    return entries


def plot(results: Figures, path: Path) -> None:
    """Times to first token beside a flood, shares over the seeds, waiting beside long outputs."""
    title = "Fair sharing between tenants (virtual time, all seeds)"
    with plots.figure(path, len(results), 3, title) as axes:
        for row, (profile, result) in zip(axes, results.items(), strict=True):
            styles = {"alone": plots.THIRD, "fcfs": plots.OTHER, "fair": plots.OURS}
            for name, color in styles.items():
                runs = [run[name]["ttft_ms"] for run in result["flood"].values()]
                plots.distribution(row[0], np.concatenate(runs), name, color)
            row[0].set(xscale="log", yscale="log", xlabel="TTFT of the polite tenant, ms")
            row[0].set(ylabel="part of requests at or above")
            row[0].set_title(f"{profile}: one request/s beside 200 at once", fontsize=9)
            _plot_shares(row[1], profile, result["weights"])
            _plot_caps(row[2], profile, result["caps"])


def _plot_shares(axes: Any, profile: str, runs: Figures) -> None:
    total = sum(WEIGHTS.values())
    for place, (name, weight) in enumerate(WEIGHTS.items()):
        shares = [100 * run[f"share_{name}"] for run in runs.values()]
        axes.bar(place, np.mean(shares), color=plots.OURS, alpha=0.55, width=0.6)
        axes.plot([place] * len(shares), shares, ".", color="black", markersize=4)
        goal = 100 * weight / total
        label = "share by weight" if not place else None
        axes.plot([place - 0.4, place + 0.4], [goal, goal], label=label, **plots.GOAL)
    axes.set_xticks(range(len(WEIGHTS)), [f"weight {weight:g}" for weight in WEIGHTS.values()])
    axes.set(ylabel="% of weighted service")
    axes.set_title(f"{profile}: three tenants, always backlogged", fontsize=9)


def _plot_caps(axes: Any, profile: str, runs: Figures) -> None:
    names = list(cap_settings())
    colors = [plots.OTHER, plots.OURS, plots.FOURTH, plots.THIRD]
    for place, (name, color) in enumerate(zip(names, colors, strict=True)):
        for offset, key, alpha in ((-0.2, "wait_p50_ms", 0.45), (0.2, "wait_p99_ms", 0.9)):
            values = [run[name][key] for run in runs.values()]
            axes.bar(place + offset, np.median(values), width=0.36, color=color, alpha=alpha)
    axes.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=7)
    axes.set(yscale="log", ylabel="wait for first chunk, ms: p50 (pale), p99")
    axes.set_title(f"{profile}: short requests beside 10,000-token outputs", fontsize=9)


def measure(options: argparse.Namespace, report: Report) -> Figures:
    results: Figures = {}
    quick = options.quick
    for name in options.profile:
        profile = PROFILES[name]
        span_s = {"gpu": 60.0, "cpu": 300.0}[name] * (0.05 if quick else 1)
        result = results[name] = {"flood": {}, "weights": {}, "caps": {}}
        for seed in options.seeds:
            num_requests = 66 if quick else NUM_FLOOD_REQUESTS
            result["flood"][seed] = flood = measure_flood(seed, profile, num_requests)
            for policy in ("alone", "fcfs", "fair"):
                report.show(f"{name}, flood, seed {seed}, {policy}", flood[policy])
            report.show(f"{name}, flood, seed {seed}", flood)
            result["weights"][seed] = measure_weights(seed, profile, span_s)
            report.show(f"{name}, weights, seed {seed}", result["weights"][seed])
            result["caps"][seed] = measure_caps(seed, profile, NUM_LONG_REQUESTS, span_s)
            for policy, figures in result["caps"][seed].items():
                report.show(f"{name}, caps, seed {seed}, {policy}", figures)
    return results


def main() -> None:
    options = output.parser(__doc__).parse_args()
    report = Report("fairness", options)
    results = measure(options, report)
    report.checks = checks(results)
    report.finish(results, plot)


if __name__ == "__main__":
    main()
