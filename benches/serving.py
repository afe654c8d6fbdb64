"""What the engine serves in process, against the number of clients: why batching pays.

    python benches/serving.py --json
    python benches/serving.py --concurrency 1 2 4 8 16 32 64 128 --plot serving.png

`AsyncLLM`, closed loops: so many clients, each sends its next request when its last has ended.
Prompts of 128 random ids, all different; 128 output tokens, greedy, end tokens ignored. Figures are
medians of `--runs` rounds over all numbers of clients:

  tokens_per_s            output tokens over the whole time
  ttft, itl               time to first token and between tokens, ms: percentiles, longest
  weight_bytes_per_token  bytes of weights that steps read for each output token: steps times the
                          matrices' size in `--dtype` (by count of parameters), over output tokens

Other engines under the same load: compare_serving.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from comparing import drawing, results
from comparing.load_options import add_load_options, load_of
from peers.serving.harness import Load, Settings
from policies.output import Figures, Report, at_most, rounded

WARM_UP_TOKENS = 8


def run(options: argparse.Namespace, report: Report) -> Figures:
    """Figures by number of clients."""
    from comparing.weights import bytes_of_a_step
    from peers.serving.ours import Peer

    peer = Peer(
        Settings(
            model=options.model,
            dtype=options.dtype,
            num_threads=options.threads,
            max_num_seqs=max(options.concurrency),
            max_model_len=options.max_model_len,
            token_budget=options.token_budget,
        )
    )
    try:
        step_bytes = bytes_of_a_step(options.model, peer.llm.config().dtype)
        runs: dict[int, list[Figures]] = {level: [] for level in options.concurrency}
        warm_up = Load(max(runs), max(runs), 16, WARM_UP_TOKENS, options.vocab_size, 0)
        peer.measure(warm_up)
        for seed in range(1, 1 + options.runs):
            for level in options.concurrency:
                load = load_of(options, level, seed)
                num_steps = peer.llm.stats()["num_steps"]
                figures = peer.measure(load)
                num_steps = peer.llm.stats()["num_steps"] - num_steps
                num_tokens = load.num_requests * load.output_tokens
                figures["tokens_per_step"] = num_tokens / num_steps
                figures["weight_bytes_per_token"] = step_bytes * num_steps / num_tokens
                runs[level].append(figures)
                shown = {name: rounded(value) for name, value in figures.items()}
                report.show(f"{level} at once, run {seed}", shown)
        options.dtype = peer.llm.config().dtype
    finally:
        peer.close()
    return {str(level): results.medians(of_level) for level, of_level in runs.items()}


def check(points: Figures, report: Report) -> None:
    """A full batch is a full step: each weight is read once for all clients."""
    for level, figures in points.items():
        steps = int(level) / figures["tokens_per_step"]
        clients = f"{level} client{'s' if level != '1' else ''}"
        report.checks.append(at_most(f"{clients}: steps to tokens of a client", steps, "", 1.25))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as cbrs takes it")
    parser.add_argument("--dtype", default="auto", help="of weights and KV cache (default: auto)")
    parser.add_argument("--token-budget", type=int, help="of a step (default: the engine's)")
    add_load_options(parser)
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the result into this file")
    parser.add_argument("--json", action="store_true", help="print only the JSON line to stdout")
    options = parser.parse_args()
    options.concurrency = sorted(set(options.concurrency))
    return options


def main() -> None:
    options = parse()
    report = Report("serving", options)
    points = run(options, report)
    check(points, report)
    sizes = f"{options.prompt_tokens} prompt + {options.output_tokens} output tokens"
    title = f"{Path(options.model).name}, {options.dtype}: {sizes}"
    report.finish(points, lambda points, path: drawing.batching(points, title, path))


if __name__ == "__main__":
    main()
