"""`cbrs generate`: completes prompts from the command line, a file or stdin."""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cbrs.cli.common import InputError, add_command
from cbrs.cli.options import (
    add_engine_options,
    add_model_argument,
    add_sampling_options,
    given,
)
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


def add_parser(commands: Commands) -> None:
    """Adds the command `generate`."""
    parser = add_command(commands, "generate", "complete prompts", _EXAMPLE, _run)
    add_model_argument(parser)
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
    add_sampling_options(parser, _DEFAULT_MAX_TOKENS)
    add_engine_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    items = read_prompts(arguments.prompts, arguments.file, as_chat=arguments.chat)
    base = SamplingParams(**given(arguments, SamplingParams))
    from cbrs.llm import LLM

    with LLM(**given(arguments, EngineConfig, but="seed")) as llm:
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
