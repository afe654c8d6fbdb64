"""What overload does to those who are served, in virtual time (profiles of a step's cost).

    python benches/overload.py --json --plot overload.png

Capacity is measured first: requests per second of a closed loop that keeps the rows full. Every
request then carries a deadline of 2 s for its first token (`ttft_deadline_ms`), and the queue is
bounded to 2 predicted seconds (`max_queue_s`), 1,024 requests and 262,144 prompt tokens.

  loads    requests arrive at 0.5 to 10 times capacity, and who is refused does not come back.
           Goodput counts the output tokens of requests whose first token came within 2 s and whose
           ITL p99 is at most 100 ms; `fcfs` without deadline and with bounds as they are by default
           beside it. By the profile cpu, whose steps with a prompt take longer, 300 ms, without
           a goal. The queue is looked at after every step; its predicted seconds
           after the first fifth: before some steps are over, nobody can predict any (then at most
           as many requests wait as there are rows).
  burst    half of capacity, and 10 times capacity for 5 s in the middle. Who is refused comes back
           once, when it was told to: how many are admitted then, and get their first token in time.
           Where the refused stay away: how long after the burst times to first token are as before
           it. (Where they come back, the load stays near capacity until all have been served.)
  refusal  microseconds of `submit` until it raises, by the machine's clock: build with the profile
           `release`, and leave the machine alone.

Goals hold for each seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from policies import output, plots
from policies.capacity import measure_capacity
from policies.output import Figures, Report
from policies.profiles import PROFILES, Profile
from policies.run import NEVER, Run
from policies.simulator import config, simulate
from policies.workload import SECOND_NS, Stream, open_loop, poisson

LOADS = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
QUICK_LOADS = (0.5, 1.0, 10.0)
BASE_LOAD, BURST_LOAD = 0.5, 10.0
TTFT_DEADLINE_S = 2.0
MAX_ITL_S = {"gpu": 0.1, "cpu": 0.3}
MAX_QUEUE_S = 2.0
QUEUE_CAPACITY = 1024
MAX_QUEUED_TOKENS = 1 << 18
SPAN_S = {"gpu": 40.0, "cpu": 120.0}
BURST_S = 5.0
RECOVERY_S = 5.0
# Before and after the burst: the refused need a while at half of capacity to be served.
BEFORE_S, AFTER_S = 20.0, 100.0
# Arrivals whose median time to first token says how it is now.
NUM_LOOKED_AT = 20
WATCHED = ("num_waiting", "num_queued_tokens", "queued_service_s", "is_refusing")


def settings() -> Any:
    return config(
        policy="fair",
        queue_capacity=QUEUE_CAPACITY,
        max_queued_tokens=MAX_QUEUED_TOKENS,
        max_queue_s=MAX_QUEUE_S,
    )


def goodput(run: Run, max_itl_s: float, from_ns: int, until_ns: int) -> float:
    """Output tokens per second of the requests that were served well, in a span of time."""
    requests = run.requests
    ttft_ns = requests.first_token_ns - requests.submitted_ns
    is_good = (requests.first_token_ns != NEVER) & (ttft_ns <= TTFT_DEADLINE_S * SECOND_NS)
    gaps, request, _ = run.gaps()
    # p99 of a request's gaps is at most a bound if at most 1 % of them are above it.
    num_gaps = np.bincount(request, minlength=len(is_good))
    num_long = np.bincount(request[gaps > max_itl_s * SECOND_NS], minlength=len(is_good))
    is_good &= num_long <= 0.01 * num_gaps
    is_inside = (run.event_ns > from_ns) & (run.event_ns <= until_ns)
    return np.count_nonzero(is_good[run.event_request[is_inside]]) / (
        (until_ns - from_ns) / SECOND_NS
    )


def most_since(run: Run, name: str, from_ns: int) -> float:
    """The largest of a watched figure from a time on."""
    is_inside = np.asarray(run.steps.start_ns) >= from_ns
    return float(np.asarray(run.steps.watched[name])[is_inside].max(initial=0.0))


def load_figures(run: Run, profile: Profile) -> Figures:
    indices, requests = np.arange(len(run.requests.stream)), run.requests
    # The first fifth is left out, in which the queue forms.
    from_ns = run.end_ns // 5
    tokens = goodput(run, MAX_ITL_S[profile.name], from_ns, run.end_ns)
    ttft_s = run.ttft_s(indices)
    watched = run.steps.watched
    return {
        "goodput_tokens_per_s": output.rounded(tokens),
        "tokens_per_s": output.rounded(
            run.output_tokens(None, from_ns) / (run.end_ns - from_ns) * SECOND_NS
        ),
        "num_arrived": int(np.count_nonzero(run.requests.length)),
        "num_refused": int(np.count_nonzero(requests.refused_ns != NEVER)),
        "num_expired": int(np.count_nonzero(requests.is_expired)),
        "ttft_p50_ms": output.rounded(1e3 * output.percentile(ttft_s, 50)),
        "ttft_p99_ms": output.rounded(1e3 * output.percentile(ttft_s, 99)),
        "itl_p99_ms": output.rounded(1e3 * output.percentile(run.itl_s(indices), 99)),
        "most_waiting": int(max(watched["num_waiting"])),
        "most_queued_tokens": int(max(watched["num_queued_tokens"])),
        # Before the first steps are over nobody can say how long anything takes.
        "most_queued_s": output.rounded(most_since(run, "queued_service_s", from_ns)),
        "part_of_time_refusing": output.rounded(
            run.mean_over_time(watched["is_refusing"], 0, run.end_ns)
        ),
    }


def bounds_to_limits(figures: Figures) -> float:
    """The largest of the queue's figures to its bound."""
    return output.rounded(
        max(
            figures["most_waiting"] / QUEUE_CAPACITY,
            figures["most_queued_tokens"] / MAX_QUEUED_TOKENS,
            figures["most_queued_s"] / MAX_QUEUE_S,
        )
    )


def measure_loads(
    seed: int, profile: Profile, capacity: float, span_s: float, offered: tuple[float, ...]
) -> Figures:
    result: Figures = {"fair": {}, "fcfs": {}}
    refusals = []
    for load in offered:
        random = np.random.default_rng(seed)
        arrivals = poisson(random, load * capacity, 0, span_s)
        deadline_ms = 1e3 * TTFT_DEADLINE_S
        stream = open_loop("all", random, arrivals, ttft_deadline_ms=deadline_ms)
        run = simulate(settings(), profile, [stream], until_s=span_s, watch=WATCHED)
        result["fair"][load] = load_figures(run, profile)
        refusals.append(run.refusal_ns)
        plain = Stream(**{**vars(stream), "parameters": {}})
        run = simulate(config(policy="fcfs"), profile, [plain], until_s=span_s, watch=WATCHED)
        result["fcfs"][load] = load_figures(run, profile)
    result["refusal_us"] = np.concatenate(refusals) / 1e3
    return result


def burst_stream(seed: int, capacity: float, after_s: float) -> Stream:
    random = np.random.default_rng(seed)
    end_of_burst_s = BEFORE_S + BURST_S
    extra = (BURST_LOAD - BASE_LOAD) * capacity
    base = poisson(random, BASE_LOAD * capacity, 0, end_of_burst_s + after_s)
    arrivals = np.sort(np.concatenate([base, poisson(random, extra, BEFORE_S, end_of_burst_s)]))
    return open_loop("all", random, arrivals, ttft_deadline_ms=1e3 * TTFT_DEADLINE_S)


def measure_burst(seed: int, profile: Profile, capacity: float, after_s: float) -> Figures:
    stream, end_s = burst_stream(seed, capacity, after_s), BEFORE_S + BURST_S + after_s
    returning, staying_away = (
        simulate(settings(), profile, [stream], until_s=end_s, watch=WATCHED, returns=returns)
        for returns in (True, False)
    )
    watched = returning.steps.watched
    return {
        **return_figures(returning),
        "most_waiting": int(max(watched["num_waiting"])),
        "most_queued_tokens": int(max(watched["num_queued_tokens"])),
        "most_queued_s": output.rounded(max(watched["queued_service_s"])),
        **recovery(staying_away),
        "recovered_after_s_with_returns": recovery(returning)["recovered_after_s"],
        "waiting": waiting_over_time(returning),
    }


def return_figures(run: Run) -> Figures:
    """How those fare that come back; only whose time to do so is within the simulation."""
    requests = run.requests
    was_refused = requests.refused_ns != NEVER
    came_back = np.flatnonzero(was_refused & (requests.promised_ns < run.end_ns))
    is_admitted = ~requests.is_refused_again[came_back]
    first, submitted = requests.first_token_ns[came_back], requests.submitted_ns[came_back]
    is_in_time = (first != NEVER) & (first - submitted <= TTFT_DEADLINE_S * SECOND_NS)
    promised_s = (requests.promised_ns - requests.refused_ns)[came_back] / SECOND_NS
    return {
        "num_refused": int(np.count_nonzero(was_refused)),
        "num_came_back": len(came_back),
        "part_admitted": output.rounded(is_admitted.mean()) if len(came_back) else 0.0,
        "part_in_time": output.rounded(is_in_time.mean()) if len(came_back) else 0.0,
        "promised_p50_s": output.rounded(output.percentile(promised_s, 50)),
        "promised_max_s": output.rounded(promised_s.max(initial=0)),
    }


def recovery(run: Run) -> Figures:
    """When times to first token of new arrivals are again what they were before the burst.

    The median of each arrival and the 19 after it is held against the 99th percentile before the
    burst, without its first quarter; what counts is the last arrival for which it is above.
    """
    requests, end_of_burst_s = run.requests, BEFORE_S + BURST_S
    is_fresh = (requests.refused_ns == NEVER) & (requests.first_token_ns != NEVER)
    at_s = requests.submitted_ns[is_fresh] / SECOND_NS
    ttft_s = (requests.first_token_ns - requests.submitted_ns)[is_fresh] / SECOND_NS
    is_before = (at_s >= BEFORE_S / 4) & (at_s < BEFORE_S)
    unloaded_s = output.percentile(ttft_s[is_before], 99)
    is_after = at_s >= end_of_burst_s
    after_s, ttft_s = at_s[is_after], ttft_s[is_after]
    num_looked_at = min(NUM_LOOKED_AT, len(ttft_s))
    medians_s = np.median(np.lib.stride_tricks.sliding_window_view(ttft_s, num_looked_at), axis=1)
    is_above = np.flatnonzero(medians_s > unloaded_s)
    num_bad = int(is_above[-1]) + 1 if len(is_above) else 0
    # Who is the last of the run to have waited long: it has not recovered.
    until_s = np.append(after_s, run.end_ns / SECOND_NS)[num_bad]
    recovered_s = until_s - end_of_burst_s if num_bad else 0.0
    return {
        "ttft_p99_before_ms": output.rounded(1e3 * unloaded_s),
        "worst_median_after_ms": output.rounded(1e3 * medians_s.max()),
        "recovered_after_s": output.rounded(recovered_s),
    }


def waiting_over_time(run: Run, num_points: int = 400) -> Figures:
    """Requests in the queue, at some of the steps."""
    every = max(1, len(run.steps.start_ns) // num_points)
    return {
        "seconds": [round(value / SECOND_NS, 3) for value in run.steps.start_ns[::every]],
        "num_waiting": run.steps.watched["num_waiting"][::every],
    }


def measure_seed(seed: int, profile: Profile, quick: bool) -> Figures:
    span_s = SPAN_S[profile.name] * (0.1 if quick else 1)
    offered = QUICK_LOADS if quick else LOADS
    capacity = measure_capacity(seed, profile, span_s)
    rate = capacity["requests_per_s"]
    loads = measure_loads(seed, profile, rate, span_s, offered)
    refusal_us = loads.pop("refusal_us")
    fair = loads["fair"]
    tokens = {load: figures["goodput_tokens_per_s"] for load, figures in fair.items()}
    burst = measure_burst(seed, profile, rate, AFTER_S * (0.06 if quick else 1))
    return {
        "capacity": capacity,
        "loads": loads,
        "peak_load": max(tokens, key=lambda load: tokens[load]),
        "goodput_to_peak": output.rounded(tokens[offered[-1]] / max(tokens.values())),
        "queue_to_bounds": max(map(bounds_to_limits, [*fair.values(), burst])),
        "burst": burst,
        "refusals": len(refusal_us),
        "refusal_median_us": output.rounded(output.percentile(refusal_us, 50)),
        "refusal_p99_us": output.rounded(output.percentile(refusal_us, 99)),
    }


def checks(results: Figures) -> list[output.Check]:
    entries = []
    for profile, by_seed in results.items():
        runs = list(by_seed.values())
        bursts = [run["burst"] for run in runs]
        if profile == "gpu":
            goodput = 100 * output.least(runs, "goodput_to_peak")
            entries.append(output.at_least("gpu, goodput at 10x to its peak", goodput, "%", 95))
        entries += [
            output.at_most(
                f"{profile}, queue to its bounds", output.worst(runs, "queue_to_bounds"), "ratio", 1
            ),
            output.at_least(
                f"{profile}, burst: admitted of the refused that came back when told",
                100 * output.least(bursts, "part_admitted"),
                "%",
                90,
            ),
            output.at_most(
                f"{profile}, a refusal, p99", output.worst(runs, "refusal_p99_us"), "us", 50
            ),
            output.at_most(
                f"{profile}, burst: until TTFT is as before",
                output.worst(bursts, "recovered_after_s"),
                "s",
                RECOVERY_S,
            ),
        ]
    return entries


def plot(results: Figures, path: Path) -> None:
    """Goodput and times to first token over load, and the queue around the burst."""
    title = "Open loop up to ten times capacity (virtual time)"
    with plots.figure(path, len(results), 3, title) as axes:
        for row, (profile, by_seed) in zip(axes, results.items(), strict=True):
            runs = list(by_seed.values())
            offered = list(runs[0]["loads"]["fair"])
            for mode, color in (("fair", plots.OURS), ("fcfs", plots.OTHER)):
                for axes_of, key in ((row[0], "goodput_tokens_per_s"), (row[1], "ttft_p99_ms")):
                    values = [[each[key] for each in run["loads"][mode].values()] for run in runs]
                    _plot_band(axes_of, offered, np.asarray(values), mode, color)
            row[0].set(ylabel="goodput, output tokens/s", ylim=(0, None))
            row[1].set(ylabel="TTFT p99 of the served, ms", yscale="log")
            row[1].axhline(1e3 * TTFT_DEADLINE_S, label="deadline", **plots.GOAL)
            for each in row[:2]:
                each.set(xscale="log", xlabel="offered load, times capacity")
                each.set_xticks(offered, [f"{load:g}" for load in offered])
                each.minorticks_off()
                each.set_title(f"{profile}: all seeds", fontsize=9)
            _plot_burst(row[2], profile, runs[0]["burst"])


def _plot_band(axes: Any, loads: list[float], values: np.ndarray, label: str, color: str) -> None:
    axes.plot(loads, np.median(values, axis=0), "-o", color=color, label=label, markersize=4)
    axes.fill_between(loads, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2)


def _plot_burst(axes: Any, profile: str, burst: Figures) -> None:
    waiting = burst["waiting"]
    axes.plot(waiting["seconds"], waiting["num_waiting"], color=plots.OURS, linewidth=1)
    axes.axvspan(
        BEFORE_S, BEFORE_S + BURST_S, color=plots.THIRD, alpha=0.25, label="10 times capacity"
    )
    axes.set(xlabel="virtual seconds", ylabel="requests waiting")
    part = 100 * burst["part_admitted"]
    axes.set_title(f"{profile}: a burst; {part:.3g} % of those told so come in", fontsize=9)


def measure(options: argparse.Namespace, report: Report) -> Figures:
    results: Figures = {}
    for name in options.profile:
        results[name] = {}
        for seed in options.seeds:
            results[name][seed] = result = measure_seed(seed, PROFILES[name], options.quick)
            report.show(f"{name}, seed {seed}, capacity", result["capacity"])
            for mode, loads in result["loads"].items():
                for load, figures in loads.items():
                    report.show(f"{name}, seed {seed}, {mode}, load {load:g}", figures)
            report.show(f"{name}, seed {seed}, burst", result["burst"])
            report.show(f"{name}, seed {seed}", result)
    return results


def main() -> None:
    options = output.parser(__doc__).parse_args()
    report = Report("overload", options)
    results = measure(options, report)
    report.checks = checks(results)
    report.finish(results, plot)


if __name__ == "__main__":
    main()
