"""`cbrs demo`: the same requests under two policies, as figures and as a picture."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cbrs.errors import InvalidRequestError
from cbrs.table import format_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cbrs._core import FinishedRequest, Tokenizer
    from cbrs.demo.html import Answer
    from cbrs.demo.timeline import PolicyRun
    from cbrs.demo.workload import DemoRequest

DEFAULT_OUT = Path("cbrs-demo")
# A small budget keeps prompt chunks as small as they would be next to a real load of decodes, and
# makes them visible: a long prompt takes several iterations.
_MAX_NUM_BATCHED_TOKENS = 48
_MAX_MODEL_LEN = 1024
_POLICIES = {"static": "static", "continuous": "fcfs"}
# The requests whose answers are shown, by their place in the workload.
_SHOWN = (1, 17)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `cbrs demo`."""
    parser.add_argument(
        "--model",
        default="smollm2-135m-instruct",
        help="known name, folder, .gguf file or null (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_OUT,
        metavar="DIR",
        help="where the picture goes (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as the last line")
    parser.add_argument(
        "--max-num-seqs",
        type=_positive_int,
        default=8,
        metavar="N",
        help="slots (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="decides the gaps between arrivals (default: 0)"
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: auto)")
    parser.add_argument(
        "--num-threads", type=_positive_int, metavar="N", help="CPU threads (default: one per core)"
    )


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not >= 1")
    return value


def run_demo(options: argparse.Namespace) -> int:
    """Runs the workload under both policies, prints the figures and writes the picture."""
    from cbrs.demo.workload import make_workload

    options.out.mkdir(parents=True, exist_ok=True)
    workload = make_workload(max_num_seqs=options.max_num_seqs, seed=options.seed)
    runs: dict[str, PolicyRun] = {}
    results: dict[str, list[FinishedRequest]] = {}
    for name, policy in _POLICIES.items():
        runs[name], results[name] = _run_policy(name, policy, workload, options)
    table = _table(runs, results)
    answers = _answers(workload, results["continuous"])
    print(format_table(table))
    for answer in answers:
        print(f"\n> {answer.prompt}\n{answer.text.strip()}")
    print()
    _write_pictures(list(runs.values()), workload, table, answers, options)
    if options.json:
        print(json.dumps({name: run.to_dict() for name, run in runs.items()}))
    return 0


def _run_policy(
    name: str, policy: str, workload: "Sequence[DemoRequest]", options: argparse.Namespace
) -> "tuple[PolicyRun, list[FinishedRequest]]":
    try:
        from tqdm import tqdm

        from cbrs.assembly import build_engine
    except ModuleNotFoundError as error:
        raise ImportError(f'{error}; the demo needs: pip install "cbrs[engine]"') from error
    from cbrs.config import EngineConfig
    from cbrs.demo.play import Player

    title = f"{name} batching"
    print(f"{title}: loading {options.model}", file=sys.stderr)
    config = EngineConfig(
        model=options.model,
        dtype=options.dtype,
        num_threads=options.num_threads,
        policy=policy,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=max(_MAX_NUM_BATCHED_TOKENS, options.max_num_seqs),
        max_model_len=_MAX_MODEL_LEN,
    )
    engine, tokenizer = build_engine(config)
    try:
        player = Player(engine, workload, [_prompt_ids(tokenizer, item) for item in workload])
        with tqdm(total=len(workload), desc=title, unit=" requests", file=sys.stderr) as progress:
            run = player.play(title, progress.update)
        return run, player.results
    finally:
        engine.close()


def _prompt_ids(tokenizer: "Tokenizer | None", request: "DemoRequest") -> list[int]:
    if tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer, so it cannot read the demo's text")
    text = tokenizer.apply_chat_template(request.messages)
    return tokenizer.encode(text, add_special_tokens=False)


def _table(
    runs: "dict[str, PolicyRun]", results: "dict[str, list[FinishedRequest]]"
) -> list[list[str]]:
    """Rows of cells, the header first; a column a policy."""
    columns = list(runs.values())
    num_equal = sum(
        first.outputs[0].token_ids.tolist() == second.outputs[0].token_ids.tolist()
        for first, second in zip(*results.values(), strict=True)
    )
    ttft = [run.time_to_first_token for run in columns]
    itl = [run.inter_token_latency for run in columns]
    total = len(columns[0].requests)
    return [
        ["", *runs],
        ["slot occupancy", *(f"{run.occupancy:.1%}" for run in columns)],
        ["iterations", *(str(len(run.iterations)) for run in columns)],
        ["output tokens/s", *(f"{run.output_tokens_per_s:.1f}" for run in columns)],
        ["time to first token p50, ms", *(f"{value.p50:.0f}" for value in ttft)],
        ["time to first token p99, ms", *(f"{value.p99:.0f}" for value in ttft)],
        ["inter-token latency p50, ms", *(f"{value.p50:.1f}" for value in itl)],
        ["inter-token latency p99, ms", *(f"{value.p99:.1f}" for value in itl)],
        ["prefix-cache hits, tokens", *(str(run.prefix_cache_hit_tokens) for run in columns)],
        ["answers equal in both", "", f"{num_equal} of {total}"],
    ]


def _answers(
    workload: "Sequence[DemoRequest]", results: "Sequence[FinishedRequest]"
) -> "list[Answer]":
    from cbrs.demo.html import Answer

    return [Answer(workload[index].question, results[index].outputs[0].text) for index in _SHOWN]


def _write_pictures(
    runs: "list[PolicyRun]",
    workload: "Sequence[DemoRequest]",
    table: list[list[str]],
    answers: "Sequence[Answer]",
    options: argparse.Namespace,
) -> None:
    """Writes the HTML page and, if matplotlib is there, the PNG; prints the paths."""
    from cbrs.demo.html import render_html
    from cbrs.demo.png import draw_png

    title = f"The same {len(workload)} requests under static and under continuous batching"
    html_path = options.out / "timeline.html"
    html_path.write_text(
        render_html(
            runs,
            title=title,
            subtitle=f"{options.model}, {options.max_num_seqs} slots, seed {options.seed}",
            table=table,
            prompts=[request.question for request in workload],
            answers=answers,
        ),
        encoding="utf-8",
    )
    print(f"page: {html_path}")
    png_path = options.out / "timeline.png"
    try:
        draw_png(runs, title, png_path)
    except ImportError:
        print("no PNG, which needs matplotlib: pip install 'cbrs[viz]'")
    else:
        print(f"picture: {png_path}")
