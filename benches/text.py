"""What turning tokens into text costs on the text thread: 256 streams, without a model.

Each step gives every stream one token of a text in several languages. The figure is the processor
time of the text thread for each token, with everything that it does: reading the step's output,
detokenizing, stop strings, results or updates, and being woken. `--step-ms` is the pause between
two steps, in which a model would run; it is what makes the figure one of cold caches.

Prints a table and, as its last line, one JSON object.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from hardware import describe_run

import cbrs
from cbrs import hub
from cbrs._core import GgufFile, OutputChannel, OutputProcessor, Tokenizer

NUM_STREAMS = 256
NUM_WARM_UP_STEPS = 20
GOAL_US = 1.5
TEXT = (
    "The queue is a bounded ring; whoever finds it full is told so at once. "
    "Les élèves ont déjà été reçus à l'hôtel de ville, où l'on servit du thé. "
    "東京は日本の首都であり、世界最大級の都市圏の中心でもある。\n"
    "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)\n"
    "안녕하세요, 세계! Grüße aus Köln 🚀🚀 — 42 km.\n"
)
MODES = {
    "whole": {},
    "whole, 4 stop strings": {"stop": ["\n\nUser:", "</answer>", "Observation:", "END"]},
    "streamed": {},
    "streamed, 4 stop strings": {"stop": ["\n\nUser:", "</answer>", "Observation:", "END"]},
}


def text_thread_ns() -> int:
    """Processor time of the text thread so far."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text(encoding="utf-8").strip() == "cbrs-text":
            return int((task / "schedstat").read_text(encoding="ascii").split()[0])
    raise RuntimeError("there is no text thread")


def measure(tokenizer: Tokenizer, mode: str, num_steps: int, step_ms: float) -> dict[str, float]:
    """Microseconds of the text thread, and of `take()` if streamed, for each token."""
    max_model_len = num_steps + NUM_WARM_UP_STEPS + 2
    scheduler = cbrs.Scheduler(
        cbrs.SchedulerConfig(
            max_num_seqs=NUM_STREAMS,
            max_num_batched_tokens=NUM_STREAMS,
            num_blocks=NUM_STREAMS * (max_model_len // 16 + 1),
            max_model_len=max_model_len,
            vocab_size=tokenizer.vocab_size,
        )
    )
    processor = OutputProcessor(scheduler, tokenizer)
    channel = OutputChannel() if mode.startswith("streamed") else None
    for index in range(NUM_STREAMS):
        processor.submit([1], index=index, channel=channel, ignore_eos=True, **MODES[mode])
    script = np.array(tokenizer.encode(TEXT), np.int32)
    batch = scheduler.step()
    num_updates, take_ns = 0, 0
    for step in range(NUM_WARM_UP_STEPS + num_steps):
        if step == NUM_WARM_UP_STEPS:
            started_ns, num_updates, take_ns = text_thread_ns(), 0, 0
        at = batch.sample_positions + 7 * batch.sample_rows
        batch = scheduler.step(script[at % len(script)])
        assert batch.num_seqs == NUM_STREAMS, "the load was not steady"
        time.sleep(step_ms / 1e3)
        if channel is not None:
            before_ns = time.perf_counter_ns()
            num_updates += len(channel.take())
            take_ns += time.perf_counter_ns() - before_ns
    used_ns = text_thread_ns() - started_ns
    processor.close()
    num_tokens = NUM_STREAMS * num_steps
    figures = {"text_thread_us_per_token": round(used_ns / num_tokens / 1e3, 3)}
    if channel is not None:
        assert num_updates >= 0.9 * num_tokens, "the text thread was not done with its steps"
        figures["take_us_per_token"] = round(take_ns / num_updates / 1e3, 3)
    return figures


def main() -> None:
    """Measures each way to get a result and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer")
    parser.add_argument("--num-steps", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args()
    tokenizer = Tokenizer(GgufFile(hub.pull(options.model)).tokenizer_json())
    results = {}
    if not options.json:
        print(f"{'':>24}  {'text thread, us/token':>21}  {'take(), us/token':>16}")
    for mode in MODES:
        result = measure(tokenizer, mode, options.num_steps, options.step_ms)
        results[mode] = result
        if not options.json:
            taken = result.get("take_us_per_token", "")
            print(f"{mode:>24}  {result['text_thread_us_per_token']:>21}  {taken:>16}", flush=True)
    checks = [
        {
            "name": f"text thread, {mode}",
            "value": result["text_thread_us_per_token"],
            "unit": "us/token",
            "goal": f"<= {GOAL_US}",
            "ok": result["text_thread_us_per_token"] <= GOAL_US,
        }
        for mode, result in results.items()
    ]
    run = describe_run(
        model=options.model,
        num_streams=NUM_STREAMS,
        num_steps=options.num_steps,
        step_ms=options.step_ms,
    )
    print(json.dumps({"bench": "text", **run, "results": results, "checks": checks}))


if __name__ == "__main__":
    main()
