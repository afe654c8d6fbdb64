"""Options that several commands share: the model, sampling, and the engine."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from cbrs.cli.common import add_offline_option
from cbrs.config import EngineConfig
from cbrs.sampling_params import SamplingParams

_INT_OPTIONS = {
    "num_threads": "CPU threads",
    "tensor_parallel_size": "GPUs that share the model, one process each",
    "num_blocks": "KV blocks in the pool",
    "kv_cache_bytes": "size of the KV pool (default: a quarter of the free memory, at most 4 GiB)",
    "block_size": "tokens per KV block",
    "max_num_seqs": "sequences that run at once",
    "max_num_batched_tokens": "token budget of one step (default: 512 on the CPU, else 2048;"
    " at least twice max-num-seqs)",
    "max_prefill_chunk_tokens": "prompt tokens of one sequence in one step",
    "max_model_len": "prompt plus output at most",
}


def add_model_argument(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Adds the positional argument that names the model, and `--offline`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if is_optional else None,
        help="known name, folder, .gguf file, hub id or null",
    )
    add_offline_option(parser)


def add_sampling_options(parser: argparse.ArgumentParser, default_max_tokens: int) -> None:
    """Adds the options that are fields of `SamplingParams`; what is not given is None."""
    group = parser.add_argument_group("sampling")
    default = SamplingParams()
    for name, kind, meaning in (
        ("max_tokens", int, f"output tokens at most (default: {default_max_tokens}, or what fits)"),
        ("temperature", float, f"0 is greedy (default: {default.temperature})"),
        ("top_k", int, "keep only the N most likely tokens (default: all)"),
        ("top_p", float, f"keep tokens that together have this probability ({default.top_p})"),
        ("min_p", float, f"drop tokens less likely than this share of the best ({default.min_p})"),
        ("seed", int, "the same seed gives the same text"),
        ("min_tokens", int, f"output tokens at least ({default.min_tokens})"),
        ("presence_penalty", float, "lowers what was generated before, once each"),
        ("frequency_penalty", float, "lowers what was generated before, for each time"),
        ("repetition_penalty", float, "above 1 lowers what the prompt or the output has already"),
    ):
        option, metavar = "--" + name.replace("_", "-"), "N" if kind is int else "X"
        group.add_argument(option, type=kind, metavar=metavar, help=meaning)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the output before this; repeatable"
    )
    group.add_argument(
        "--bad-word",
        action="append",
        dest="bad_words",
        metavar="TEXT",
        help="never generate this; repeatable",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_const",
        const=True,
        help="do not end at the model's end tokens",
    )


def add_engine_options(parser: argparse.ArgumentParser, **notes: str) -> None:
    """Adds the options that are fields of `EngineConfig`; what is not given is None.

    `notes` replace the default that the help tells, by name of the field.
    """
    group = parser.add_argument_group("engine")
    default = EngineConfig()
    policy = notes.get("policy", default.policy)
    group.add_argument(
        "--tokenizer",
        metavar="NAME|PATH",
        help="tokenizer and chat template: known name, folder or .gguf (default: the model's)",
    )
    group.add_argument("--dtype", help="auto, float32 or bfloat16 (default: auto)")
    group.add_argument(
        "--kv-cache-dtype",
        help="of keys and values: auto (that of the weights), float32, bfloat16 or int8"
        " (default: auto)",
    )
    group.add_argument(
        "--quantization", metavar="int8", help="keep the weights in 8 bits (default: in dtype)"
    )
    group.add_argument("--device", help="auto, cpu or cuda (default: auto)")
    for name, meaning in _INT_OPTIONS.items():
        note = notes.get(name, getattr(default, name))
        shown = meaning if note is None else f"{meaning} (default: {note})"
        group.add_argument("--" + name.replace("_", "-"), type=int, metavar="N", help=shown)
    group.add_argument(
        "--policy",
        metavar="NAME|FILE.toml",
        help=f"who runs next: fair, fcfs, static, or a file of rules (default: {policy})",
    )
    group.add_argument(
        "--target-itl-ms",
        type=float,
        metavar="X",
        help="milliseconds between two tokens that the steps aim at (default: no target)",
    )
    group.add_argument(
        "--prefix-caching",
        dest="enable_prefix_caching",
        action=argparse.BooleanOptionalAction,
        help="reuse KV blocks between prompts that begin alike (default: yes)",
    )


def given(arguments: argparse.Namespace, cls: type[Any], but: str = "") -> dict[str, Any]:
    """Returns the options that were given and are fields of `cls`, except `but`."""
    values = {item.name: getattr(arguments, item.name, None) for item in fields(cls)}
    return {name: value for name, value in values.items() if value is not None and name != but}
