"""Priority, fairness and a latency target on a real engine, once each (SmolLM2 on the CPU).

    python benches/engine_policy.py --json --plot engine_policy.png

`AsyncLLM` with 4 rows; what the clients of one event loop see, in the time of a clock.

  priority  16 requests come at once, and a short one every 1.5 s: `fair` with the classes batch and
            interactive beside `fcfs` without classes; time to first token (TTFT) of the short ones
  fairness  the same, as requests of a flooding tenant and of a polite one, all of one class
  target    3 requests decode while prompts of 700 tokens come: time between two tokens (ITL) of the
            three with `target_itl_ms` and without; both `fair`, at most 512 tokens a step

The prompts are random ids. One engine of each policy runs everything, so the model of a step's cost
has learned when the target comes. Takes one to three minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from policies import output, plots, real
from policies.output import Figures, Report

from cbrs import AsyncLLM, SamplingParams

POLICIES = ("fcfs", "fair")
NUM_ROWS = 4
TOKEN_BUDGET = 512
NUM_DECODES = 3
# They are ended earlier, when the last prompt is computed.
MAX_DECODED = 1_900
# Of the requests of priority and fairness: who fills the engine, and who comes in between.
FILLING = {"priority": {"priority": "batch"}, "fairness": {"tenant": "flooding"}}
COMING = {"priority": {"priority": "interactive"}, "fairness": {"tenant": "polite"}}
WHO = {"priority": "interactive", "fairness": "polite tenant"}


@dataclass(frozen=True)
class Scale:
    """Sizes of the loads, in requests, tokens and seconds."""

    num_filling: int = 16
    filling: tuple[int, int] = (64, 32)
    """Tokens of prompt and output."""
    num_coming: int = 6
    coming: tuple[int, int] = (32, 8)
    interval_s: float = 1.5
    num_long: int = 3
    long_prompt: int = 700
    long_interval_s: float = 2.0


QUICK = Scale(6, (24, 12), 2, (16, 4), 0.1, 1, 120, 0.1)


@dataclass
class Seen:
    """What the client of one request saw, in seconds of the clock."""

    submitted: float = 0.0
    times: list[float] = field(default_factory=list)
    """When each token came."""

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.submitted


class Client:
    """Sends requests to one engine."""

    def __init__(self, llm: AsyncLLM, seed: int) -> None:
        self.llm = llm
        self._random = np.random.default_rng(seed)
        self._vocab_size = llm.engine.scheduler.config.vocab_size

    def ask(
        self,
        lengths: tuple[int, int],
        after_s: float = 0.0,
        seen: Seen | None = None,
        **params: Any,
    ) -> asyncio.Task[Seen]:
        """Begins a request of so many tokens of prompt and output, `after_s` from now.

        What it sees is added to `seen` as it comes.
        """
        num_prompt_tokens, max_tokens = lengths
        prompt = real.prompt(self._random, num_prompt_tokens, self._vocab_size)
        chosen = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind="delta",
            **params,
        )
        return asyncio.create_task(self._follow(seen or Seen(), prompt, chosen, after_s))

    async def _follow(
        self, seen: Seen, prompt: list[int], params: SamplingParams, after_s: float
    ) -> Seen:
        await asyncio.sleep(after_s)
        seen.submitted = time.perf_counter()
        async for part in self.llm.generate(prompt, params):
            now = time.perf_counter()
            seen.times += [now] * sum(len(choice.token_ids) for choice in part.outputs)
        return seen


async def share(client: Client, policy: str, which: str, scale: Scale) -> Figures:
    """Requests that fill the engine, and short ones that come in between."""
    llm = client.llm
    before = llm.stats()
    is_fair = policy == "fair"
    began = time.perf_counter()
    filling = [
        client.ask(scale.filling, **(FILLING[which] if is_fair else {}))
        for _ in range(scale.num_filling)
    ]
    coming = [
        client.ask(scale.coming, (i + 1) * scale.interval_s, **(COMING[which] if is_fair else {}))
        for i in range(scale.num_coming)
    ]
    seen = await asyncio.gather(*coming)
    filled = await asyncio.gather(*filling)
    stats = llm.stats()
    ttft_s = [each.ttft_s for each in seen]
    ends = [each.times[-1] for each in filled]
    return {
        "ttft_p50_s": output.rounded(output.percentile(ttft_s, 50)),
        "ttft_max_s": output.rounded(max(ttft_s)),
        "filling_ended_s": output.rounded(max(ends) - began),
        "num_displacements": stats["num_displacements"] - before["num_displacements"],
        "ttft_s": [output.rounded(value) for value in ttft_s],
    }


async def pace(client: Client, target_itl_ms: float | None, scale: Scale) -> Figures:
    """ITL of running decodes from the coming of the first long prompt to the last one's end."""
    decodes = [Seen() for _ in range(NUM_DECODES)]
    tasks = [
        client.ask((16, MAX_DECODED), seen=seen, target_itl_ms=target_itl_ms) for seen in decodes
    ]
    while not all(len(seen.times) >= 4 for seen in decodes):
        await asyncio.sleep(0.005)
    began = time.perf_counter()
    prompts = [
        client.ask((scale.long_prompt, 1), i * scale.long_interval_s) for i in range(scale.num_long)
    ]
    seen = await asyncio.gather(*prompts)
    ended = max(each.times[0] for each in seen)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    itl_s = np.concatenate([gaps(each, began, ended) for each in decodes])
    return {
        "itl_p50_ms": output.rounded(1e3 * output.percentile(itl_s, 50)),
        "itl_p99_ms": output.rounded(1e3 * output.percentile(itl_s, 99)),
        "itl_max_ms": output.rounded(1e3 * float(itl_s.max(initial=0))),
        "num_gaps": len(itl_s),
        "prompts_ttft_max_s": output.rounded(max(each.ttft_s for each in seen)),
        "prompts_took_s": output.rounded(ended - began),
        "itl_ms": [output.rounded(1e3 * value) for value in itl_s],
    }


def gaps(seen: Seen, began: float, ended: float) -> np.ndarray:
    """Seconds between two tokens, of those that came between two times (and the first after)."""
    times = np.array(seen.times)
    before = np.searchsorted(times, began) - 1
    until = np.searchsorted(times, ended, "right") + 1
    return np.diff(times[max(0, before) : until])


async def run_policy(policy: str, options: argparse.Namespace, scale: Scale) -> Figures:
    settings: dict[str, Any] = {
        "policy": policy,
        "max_num_seqs": NUM_ROWS,
        "max_num_batched_tokens": TOKEN_BUDGET,
        "max_model_len": 2_000,
        "num_threads": options.threads,
    }
    result: Figures = {}
    async with AsyncLLM(real.model(options), **settings) as llm:
        client = Client(llm, options.seed)
        # Memory is touched and kernels are chosen before anything is measured.
        await client.ask((64, 8))
        for which in WHO:
            result[which] = await share(client, policy, which, scale)
        if policy == "fair":
            result["without"] = await pace(client, None, scale)
            result["with"] = await pace(client, options.target_itl_ms, scale)
            result["step_time_error"] = output.rounded(llm.stats()["step_time_error"])
    return result


def measure(options: argparse.Namespace, report: Report) -> Figures:
    scale = QUICK if options.quick else Scale()
    runs = {policy: asyncio.run(run_policy(policy, options, scale)) for policy in POLICIES}
    fair = runs["fair"]
    results: Figures = {
        which: {policy: runs[policy][which] for policy in POLICIES} for which in WHO
    }
    results["target"] = {
        "without": fair["without"],
        "with": fair["with"],
        "target_itl_ms": options.target_itl_ms,
        "step_time_error": fair["step_time_error"],
    }
    for experiment, modes in results.items():
        for mode, figures in modes.items():
            if isinstance(figures, dict):
                report.show(f"{experiment}, {mode}", figures)
    return results


def checks(results: Figures) -> list[output.Check]:
    entries = [
        output.at_most(
            f"{which}: longest TTFT of the {WHO[which]}, fair to fcfs",
            results[which]["fair"]["ttft_max_s"] / results[which]["fcfs"]["ttft_max_s"],
            "ratio",
            1,
        )
        for which in WHO
    ]
    target = results["target"]
    ratio = target["with"]["itl_p99_ms"] / target["without"]["itl_p99_ms"]
    return [*entries, output.at_most("target: ITL p99, with to without", ratio, "ratio", 1)]


def plot(results: Figures, path: Path) -> None:
    """TTFT of those who come beside a full engine, twice, and ITL beside long prompts."""
    title = "SmolLM2-135M on a CPU: priority, fairness, latency target"
    with plots.figure(path, 1, 3, title, width=4.4) as axes:
        for each, which in zip(axes[0], WHO, strict=False):
            _plot_ttft(each, results[which], which)
        _plot_itl(axes[0][2], results["target"])


def _plot_ttft(axes: Any, modes: Figures, which: str) -> None:
    for mode, color in zip(POLICIES, (plots.OTHER, plots.OURS), strict=True):
        values = modes[mode]["ttft_s"]
        axes.plot(range(1, len(values) + 1), values, "o-", color=color, label=mode)
    axes.set(xlabel=f"requests ({WHO[which]})", ylabel="time to first token, s", ylim=(0, None))
    axes.set_title(which, fontsize=9)


def _plot_itl(axes: Any, target: Figures) -> None:
    for mode, color in (("without", plots.OTHER), ("with", plots.OURS)):
        plots.distribution(axes, target[mode]["itl_ms"], f"{mode} a target", color)
    axes.axvline(target["target_itl_ms"], label="target", **plots.GOAL)
    axes.set(xscale="log", xlabel="time between tokens, ms", ylabel="part at or above")
    plots.plain_ticks(axes.xaxis)
    axes.set_title("target", fontsize=9)


def main() -> None:
    parser = real.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' tokens")
    parser.add_argument("--target-itl-ms", type=float, default=250.0, help="default: 250")
    options = parser.parse_args()
    report = Report("engine_policy", options)
    results = measure(options, report)
    report.checks = checks(results)
    report.finish(results, plot)


if __name__ == "__main__":
    main()
