"""What sampling costs: decode steps with everything switched on, against greedy ones.

    python benches/sampling.py --json

Rounds of a greedy and of a heavy batch (temperature 1, top-p 0.9, all three penalties, logprobs 5)
take turns in one engine, so that whatever else the machine does hits both. A round is
`--num-steps` steps in which all sequences decode; its time is the median step. The ratio is that
of neighbouring rounds, and the result the median of the ratios. The profile says how much of a
step the model and the sampler took, and how much processor time (of all threads) it cost: on a
machine that others use, too, the ratio of the latter is the one to look at. A third batch in turn
with them samples as users do (temperature 0.8, top-p 0.9, penalties, no log-probabilities): the
sampler's share of its steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
from comparing.timed import Timed
from hardware import describe_run
from policies.output import at_least, at_most

from cbrs import LLM
from cbrs._core import cpu_features

GOAL = 0.8
SHARE_GOAL = 0.05
GREEDY = {"temperature": 0.0}
HEAVY = {
    "temperature": 1.0,
    "top_p": 0.9,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logprobs": 5,
}
USUAL = {
    "temperature": 0.8,
    "top_p": 0.9,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
}
NUM_WARM_UP_STEPS = 2


class Bench:
    """An engine whose model run and sampler are timed."""

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self.engine, self.options = llm.engine, options
        self.runner = self.engine._runner = Timed(self.engine._runner)
        self.sampler = self.engine._sampler = Timed(self.engine._sampler)
        self.random = np.random.default_rng(options.seed)

    def run(self, parameters: dict[str, Any]) -> dict[str, float]:
        """Median milliseconds of a step of all sequences, and the parts' share in the mean one."""
        options = self.options
        shape = (options.num_seqs, options.num_prompt_tokens)
        # Ids that no tokenizer gives a special meaning.
        for index, prompt in enumerate(self.random.integers(1000, 30_000, shape, dtype=np.int32)):
            self.engine.processor.submit(
                prompt,
                index=index,
                max_tokens=options.num_steps + NUM_WARM_UP_STEPS + 2,
                ignore_eos=True,
                seed=index,
                **parameters,
            )
        batch = self.engine.step()
        while batch.num_decodes < options.num_seqs:
            batch = self.engine.step()
        for _ in range(NUM_WARM_UP_STEPS):
            self.engine.step()
        self.runner.seconds = self.sampler.seconds = 0.0
        times = []
        cpu_started = time.process_time()
        for _ in range(options.num_steps):
            started = time.perf_counter()
            batch = self.engine.step()
            times.append(time.perf_counter() - started)
        assert batch.num_decodes == options.num_seqs, "the load was not steady"
        result = {
            "step_ms": 1e3 * statistics.median(times),
            "mean_step_ms": 1e3 * statistics.mean(times),
            "cpu_ms": 1e3 * (time.process_time() - cpu_started) / options.num_steps,
            "model_ms": 1e3 * self.runner.seconds / options.num_steps,
            "sampler_ms": 1e3 * self.sampler.seconds / options.num_steps,
        }
        self.drain()
        return result

    def drain(self) -> None:
        """Step until every request has been handed over."""
        while self.engine.processor.num_live > 0:
            if self.engine.step().num_seqs == 0:
                self.engine.processor.wait_finished(0.01)
            self.engine.processor.take_finished()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with LLM(
        options.model,
        max_num_seqs=options.num_seqs,
        max_model_len=options.num_prompt_tokens + options.num_steps + NUM_WARM_UP_STEPS + 8,
        # All prompts in one step, so that all sequences have the same steps to go.
        max_num_batched_tokens=options.num_seqs * options.num_prompt_tokens,
        num_threads=options.num_threads,
    ) as llm:
        bench = Bench(llm, options)
        if options.plain:
            from cbrs.runner.sampler import Sampler

            bench.sampler.inner = Sampler(llm.tokenizer.vocab_size)
        bench.run(HEAVY)
        rounds = [
            (bench.run(GREEDY), bench.run(HEAVY), bench.run(USUAL)) for _ in range(options.rounds)
        ]
    names = rounds[0][0]
    medians = [
        {name: round(statistics.median(runs[kind][name] for runs in rounds), 3) for name in names}
        for kind in range(3)
    ]
    for kind in medians:
        kind["tokens_per_s"] = round(1e3 * options.num_seqs / kind["step_ms"], 1)
    ratios = [greedy["step_ms"] / heavy["step_ms"] for greedy, heavy, _ in rounds]
    cpu_ratios = [greedy["cpu_ms"] / heavy["cpu_ms"] for greedy, heavy, _ in rounds]
    shares = [usual["sampler_ms"] / usual["mean_step_ms"] for _, _, usual in rounds]
    return {
        "greedy": medians[0],
        "heavy": medians[1],
        "usual": medians[2],
        "sampling_share": round(statistics.median(shares), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "heavy_to_greedy": round(statistics.median(ratios), 4),
        "heavy_to_greedy_by_processor_time": round(statistics.median(cpu_ratios), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--num-seqs", type=int, default=64)
    parser.add_argument("--num-prompt-tokens", type=int, default=32)
    parser.add_argument("--num-steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="sample with plain PyTorch")
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    options = parser.parse_args()
    result = measure(options)
    if not options.json:
        for kind in ("greedy", "heavy", "usual"):
            print(kind, "  ".join(f"{name} {value}" for name, value in result[kind].items()))
        for name in ("heavy_to_greedy", "heavy_to_greedy_by_processor_time", "sampling_share"):
            print(name, result[name])
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    run = describe_run(features=cpu_features(), **settings)
    checks = [
        at_least(
            "throughput of sampling-heavy to greedy decoding",
            result["heavy_to_greedy"],
            "ratio",
            GOAL,
        ),
        at_most("sampling's share of a step", result["sampling_share"], "ratio", SHARE_GOAL),
    ]
    print(json.dumps({"bench": "sampling", **run, "results": result, "checks": checks}))


if __name__ == "__main__":
    main()
