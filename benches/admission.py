"""How well rules of admission use a pool that is too small, in virtual time (no model).

    CBRS_DATA=... python benches/admission.py --json --plot admission.png

A closed loop keeps 128 requests in flight whose lengths are those of published traces (Azure 2023
conversations, Mooncake conversations, ServeGen DeepSeek-R1; without `CBRS_DATA` log-normal ones,
which `source` says). A run with a pool that is never full says how many blocks are held at most;
then the pool has 60 % of that. Each request asks for as many output tokens as the longest of its
data set has, and ends at its own length. The rules, under `fair` otherwise:

  guaranteed       what runs can grow to its `max_tokens`: the maximum is reserved
  guaranteed, 2x   the same with a `max_tokens` of twice the true length, which no client knows
  prompt           what fits now, and a block for each that may grow
  estimated        what fits now, and the estimated peak of all that runs

Reported: blocks held to blocks in the pool, over time, from the end of the first quarter of
submissions to the last one; preemptions and tokens computed again, in the whole run; output tokens
per second. Goals hold for each trace and seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from policies import output, plots
from policies.lengths import SYNTHETIC, TRACES, Lengths, load_lengths, trace_folder
from policies.output import Figures, Report
from policies.profiles import BLOCK_SIZE, PROFILES, Profile
from policies.run import Run
from policies.simulator import config, simulate
from policies.workload import SECOND_NS, Stream

NUM_IN_FLIGHT = 128
POOL_TO_PEAK = 0.6
NUM_REQUESTS = {"azure": 1200, "mooncake": 600, "servegen": 700, SYNTHETIC: 1200}
LARGE_POOL = 1 << 18
# More than any request, so that only the pool counts.
MAX_MODEL_LEN = 1 << 18
TWICE = "guaranteed, 2x"
RULES = ("guaranteed", TWICE, "prompt", "estimated")
WATCHED = ("num_used_blocks", "num_running")


def stream_of(lengths: Lengths, max_tokens: int) -> Stream:
    num_requests = len(lengths.num_prompt_tokens)
    return Stream(
        "all",
        np.zeros(num_requests, dtype=np.int64),
        lengths.num_output_tokens,
        lengths.num_prompt_tokens,
        max_tokens=max_tokens,
        num_in_flight=NUM_IN_FLIGHT,
    )


def settings(num_blocks: int, admission: str) -> Any:
    return config(
        policy="fair",
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        admission=admission,
        queue_capacity=4 * NUM_IN_FLIGHT,
    )


def figures_of(run: Run, num_blocks: int) -> Figures:
    submitted = np.sort(run.requests.submitted_ns)
    from_ns, until_ns = int(submitted[len(submitted) // 4]), int(submitted[-1])
    used, running = (run.steps.watched[name] for name in WATCHED)
    return {
        "kv_use": output.rounded(run.mean_over_time(used, from_ns, until_ns) / num_blocks),
        "num_running": output.rounded(run.mean_over_time(running, from_ns, until_ns)),
        "num_preemptions": int(run.stats["num_preemptions"]),
        "num_recomputed_tokens": int(run.stats["num_recomputed_tokens"]),
        "part_recomputed": output.rounded(
            run.stats["num_recomputed_tokens"] / run.stats["num_scheduled_tokens"]
        ),
        "output_tokens_per_s": output.rounded(
            run.output_tokens(None, from_ns, until_ns) / (until_ns - from_ns) * SECOND_NS
        ),
        "seconds": output.rounded(run.end_ns / SECOND_NS),
    }


def measure_trace(seed: int, profile: Profile, lengths: Lengths, num_requests: int) -> Figures:
    max_tokens = int(lengths.num_output_tokens.max())
    sample = lengths.sample(np.random.default_rng(seed), num_requests)
    stream = stream_of(sample, max_tokens)
    run = simulate(settings(LARGE_POOL, "prompt"), profile, [stream], watch=WATCHED)
    peak = int(max(run.steps.watched["num_used_blocks"]))
    num_blocks = int(POOL_TO_PEAK * peak)
    # A request that the smaller pool cannot hold at its longest would be refused by every rule.
    fits = sample.num_prompt_tokens + max_tokens + BLOCK_SIZE < num_blocks * BLOCK_SIZE
    sample = Lengths(sample.source, sample.num_prompt_tokens[fits], sample.num_output_tokens[fits])
    stream = stream_of(sample, max_tokens)
    result: Figures = {
        "source": lengths.source,
        "max_tokens": max_tokens,
        "peak_blocks": peak,
        "num_blocks": num_blocks,
        "num_too_long": int(np.count_nonzero(~fits)),
        "rules": {},
    }
    for rule in RULES:
        stream.max_tokens = max_tokens
        if rule == TWICE:
            stream.max_tokens = np.minimum(2 * stream.num_output_tokens, max_tokens)
        admission = rule.partition(",")[0]
        run = simulate(settings(num_blocks, admission), profile, [stream], watch=WATCHED)
        result["rules"][rule] = figures_of(run, num_blocks)
    rules = result["rules"]
    ours, prompt = rules["estimated"], rules["prompt"]
    best = max(figures["kv_use"] for figures in rules.values())
    result["use_to_best"] = output.rounded(ours["kv_use"] / best)
    # Where prompt only recomputes nothing, a tenth of it is nothing.
    recomputed = ours["num_recomputed_tokens"]
    base = max(prompt["num_recomputed_tokens"], 1)
    result["recomputed_to_prompt"] = output.rounded(recomputed / base)
    return result


def recomputed_to_prompt(runs: list[Figures]) -> float:
    """Tokens that ours computes again in all runs, to those of the prompt-only rule.

    Of the sums: a run of ServeGen has a handful of preemptions, so that the ratio of a single run
    (`recomputed_to_prompt`, printed for each seed) is hardly more than one of them.
    """
    ours, prompt = (
        sum(run["rules"][rule]["num_recomputed_tokens"] for run in runs)
        for rule in ("estimated", "prompt")
    )
    return ours / max(prompt, 1)


def checks(results: Figures) -> list[output.Check]:
    entries = []
    for profile, by_trace in results.items():
        for trace, by_seed in by_trace.items():
            runs = list(by_seed.values())
            entries += [
                output.at_least(
                    f"{profile}, {trace}: KV use to the best rule's",
                    100 * output.least(runs, "use_to_best"),
                    "%",
                    97,
                ),
                output.at_most(
                    f"{profile}, {trace}: tokens computed again to prompt only",
                    recomputed_to_prompt(runs),
                    "ratio",
                    0.1,
                ),
            ]
    return entries


def plot(results: Figures, path: Path) -> None:
    """KV use against tokens computed again, one point per seed, and throughput."""
    num_traces = max(len(by_trace) for by_trace in results.values())
    title = "Rules of admission in a pool of 60 % of the peak (virtual time, all seeds)"
    with plots.figure(path, len(results), num_traces, title) as axes:
        for row, (profile, by_trace) in zip(axes, results.items(), strict=True):
            for each, (trace, by_seed) in zip(row, by_trace.items(), strict=False):
                _plot_trace(each, f"{profile}, {trace}", list(by_seed.values()))


def _plot_trace(axes: Any, title: str, runs: list[Figures]) -> None:
    colors = [plots.THIRD, plots.FOURTH, plots.OTHER, plots.OURS]
    for rule, color, marker in zip(RULES, colors, "sD^*", strict=True):
        figures = [run["rules"][rule] for run in runs]
        use = [100 * each["kv_use"] for each in figures]
        again = [100 * each["part_recomputed"] for each in figures]
        speed = np.median([each["output_tokens_per_s"] for each in figures])
        label = f"{rule} ({speed:,.0f} tokens/s)"
        size = 10 if marker == "*" else 6
        axes.plot(use, again, marker, color=color, label=label, markersize=size, alpha=0.8)
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_ylim(-0.002, None)
    axes.set(xlabel="blocks held, % of the pool", ylabel="tokens computed again, % of all")
    axes.set_title(f"{title} ({runs[0]['source']})", fontsize=8)


def measure(options: argparse.Namespace, report: Report) -> Figures:
    results: Figures = {}
    lengths = {name: load_lengths(name) for name in options.trace}
    for profile in options.profile:
        results[profile] = {name: {} for name in lengths}
        for name, each in lengths.items():
            for seed in options.seeds:
                num_requests = NUM_REQUESTS[name] // (8 if options.quick else 1)
                result = measure_trace(seed, PROFILES[profile], each, num_requests)
                results[profile][name][seed] = result
                for rule, figures in result["rules"].items():
                    report.show(f"{profile}, {name}, seed {seed}, {rule}", figures)
                report.show(f"{profile}, {name}, seed {seed}", result)
    return results


def parse() -> argparse.Namespace:
    have = list(TRACES) if trace_folder() else [SYNTHETIC]
    parser = output.parser(__doc__)
    choices = sorted({*have, SYNTHETIC})
    parser.add_argument("--trace", choices=choices, nargs="+", default=have, help="of lengths")
    return parser.parse_args()


def main() -> None:
    options = parse()
    report = Report("admission", options)
    results = measure(options, report)
    report.checks = checks(results)
    report.finish(results, plot)


if __name__ == "__main__":
    main()
