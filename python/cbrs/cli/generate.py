"""`cbrs generate`: completes prompts from the command line, a file or stdin."""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from cbrs.cli.common import InputError, add_command
from cbrs.cli.prompts import PromptItem, read_prompts
from cbrs.config import EngineConfig
from cbrs.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cbrs.cli.common import Commands
    from cbrs.llm import LLM
    from cbrs.outputs import RequestOutput

logger = logging.getLogger("cbrs")

_EXAMPLE = "cbrs generate smollm2-135m-instruct --prompt 'The capital of France is' --max-tokens 8"
# Without a bound, a model that does not end by itself would run until its context is full.
_DEFAULT_MAX_TOKENS = 256
_INT_OPTIONS = {
    "num_threads": "CPU threads",
    "num_blocks": "KV blocks in the pool",
    "kv_cache_bytes": "size of the KV pool (default: a quarter of the free memory, at most 4 GiB)",
    "block_size": "tokens per KV block",
    "max_num_seqs": "sequences that run at once",
    "max_num_batched_tokens": "token budget of one step",
    "max_prefill_chunk_tokens": "prompt tokens of one sequence in one step",
    "max_model_len": "prompt plus output at most",
}


def add_parser(commands: Commands) -> None:
    """Adds the command `generate`."""
    parser = add_command(commands, "generate", "complete prompts", _EXAMPLE, _run)
    parser.add_argument("model", metavar="MODEL", help="known name, folder, .gguf file or null")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt", action="append", dest="prompts", metavar="TEXT", help="a prompt; repeatable"
    )
    source.add_argument(
        "--file",
        metavar="PATH",
        help="one prompt a line, or JSONL with `prompt` or `messages` and sampling parameters; "
        "- is stdin",
    )
    parser.add_argument("--chat", action="store_true", help="send each prompt as a user's message")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    _add_sampling_options(parser)
    _add_engine_options(parser)


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    default = SamplingParams()
    for name, kind, meaning in (
        (
            "max_tokens",
            int,
            f"output tokens at most (default: {_DEFAULT_MAX_TOKENS}, or what fits)",
        ),
        ("temperature", float, f"0 is greedy (default: {default.temperature})"),
        ("top_k", int, "keep only the N most likely tokens (default: all)"),
        ("top_p", float, f"keep tokens that together have this probability ({default.top_p})"),
        ("min_p", float, f"drop tokens less likely than this share of the best ({default.min_p})"),
        ("seed", int, "the same seed gives the same text"),
    ):
        option, metavar = "--" + name.replace("_", "-"), "N" if kind is int else "X"
        group.add_argument(option, type=kind, metavar=metavar, help=meaning)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the output before this; repeatable"
    )
    group.add_argument(
        "--ignore-eos",
        action="store_const",
        const=True,
        help="do not end at the model's end tokens",
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    default = EngineConfig()
    group.add_argument("--dtype", help="auto, float32 or bfloat16 (default: auto)")
    group.add_argument("--device", help="auto, cpu or cuda (default: auto)")
    for name, meaning in _INT_OPTIONS.items():
        value = getattr(default, name)
        shown = meaning if value is None else f"{meaning} (default: {value})"
        group.add_argument("--" + name.replace("_", "-"), type=int, metavar="N", help=shown)
    group.add_argument("--policy", help=f"fcfs or static (default: {default.policy})")
    group.add_argument(
        "--no-prefix-caching",
        dest="enable_prefix_caching",
        action="store_const",
        const=False,
        help="do not reuse KV blocks between prompts that begin alike",
    )


def _run(arguments: argparse.Namespace) -> int:
    items = read_prompts(arguments.prompts, arguments.file, as_chat=arguments.chat)
    base = SamplingParams(**_given(arguments, SamplingParams))
    from cbrs.llm import LLM

    with LLM(**_given(arguments, EngineConfig, but="seed")) as llm:
        prompts = [_to_token_ids(item, llm) for item in items]
        params = [
            _bounded(replace(base, **item.sampling), llm.config().max_model_len - len(prompt))
            for item, prompt in zip(items, prompts, strict=True)
        ]
        started = time.monotonic()
        try:
            outputs = llm.generate(prompts, params)
        except TypeError as error:  # a line of the file gave a parameter a value of another type
            raise InputError(str(error)) from error
        _log_totals(outputs, time.monotonic() - started)
    for i, (item, output) in enumerate(zip(items, outputs, strict=True)):
        if arguments.json:
            print(json.dumps(_to_json(i, item, output), ensure_ascii=False))
        else:
            _print_text(i, item, output, is_only=len(items) == 1)
    failed = [output for output in outputs if output.error is not None]
    for output in failed:
        logger.error("a request failed: %s", output.error)
    return 1 if failed else 0


def _given(arguments: argparse.Namespace, cls: type[Any], but: str = "") -> dict[str, Any]:
    """Returns the options that were given and are fields of `cls`."""
    values = {item.name: getattr(arguments, item.name, None) for item in fields(cls)}
    return {name: value for name, value in values.items() if value is not None and name != but}


def _to_token_ids(item: PromptItem, llm: LLM) -> list[int]:
    if isinstance(item.content, str):
        return llm.tokenizer.encode(item.content)
    text = llm.tokenizer.apply_chat_template(item.content)
    return llm.tokenizer.encode(text, add_special_tokens=False)


def _bounded(params: SamplingParams, room: int) -> SamplingParams:
    """Gives a request without `max_tokens` the default; a prompt that leaves no room is refused."""
    if params.max_tokens is not None or room < 1:
        return params
    return replace(params, max_tokens=min(_DEFAULT_MAX_TOKENS, room))


def _log_totals(outputs: list[RequestOutput], elapsed_s: float) -> None:
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    logger.info(
        "%d requests, %d output tokens in %.2f s: %.1f tokens/s",
        len(outputs),
        num_tokens,
        elapsed_s,
        num_tokens / elapsed_s,
    )


def _to_json(index: int, item: PromptItem, output: RequestOutput) -> dict[str, Any]:
    completion, metrics = output.outputs[0], output.metrics
    is_text = isinstance(item.content, str)
    return {
        "index": index,
        **({} if item.id is None else {"id": item.id}),
        "prompt" if is_text else "messages": item.content,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "error": output.error,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "queue_time_s": metrics.queue_time_s,
        "time_to_first_token_s": metrics.time_to_first_token_s,
        "mean_inter_token_latency_s": metrics.mean_inter_token_latency_s,
    }


def _print_text(index: int, item: PromptItem, output: RequestOutput, *, is_only: bool) -> None:
    """Prints the text alone for a single prompt, else below a line that says which prompt it is."""
    if not is_only:
        content = item.content if isinstance(item.content, str) else item.content[-1]["content"]
        print(f"[{index + 1}] {content}")
    print(output.outputs[0].text)
