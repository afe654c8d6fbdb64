"""`cbrs generate`: completes prompts from the command line, a file or stdin."""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import asdict, replace
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
    from collections.abc import Sequence

    from cbrs.cli.common import Commands
    from cbrs.llm import LLM
    from cbrs.logprobs import Logprob
    from cbrs.outputs import CompletionOutput, RequestOutput

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
    parser.add_argument("--n", type=int, metavar="N", help="outputs of each prompt (default: 1)")
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json, log-probabilities of each token and the N most likely ones",
    )
    add_sampling_options(parser, _DEFAULT_MAX_TOKENS)
    add_engine_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    items = read_prompts(arguments.prompts, arguments.file, as_chat=arguments.chat)
    base = SamplingParams(**given(arguments, SamplingParams))
    if not arguments.json:
        _refuse_logprobs(base, items)
    from cbrs.llm import LLM

    with LLM(**given(arguments, EngineConfig, but="seed")) as llm:
        prompts = [_to_token_ids(item, llm) for item in items]
        limit = llm.config().max_model_len
        started = time.monotonic()
        try:
            params = [
                _bounded(replace(base, **item.sampling), len(prompt), limit)
                for item, prompt in zip(items, prompts, strict=True)
            ]
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


def _refuse_logprobs(base: SamplingParams, items: list[PromptItem]) -> None:
    """Refuses what only the JSON output shows."""
    if base.logprobs is not None:
        raise InputError("--logprobs needs --json")
    for i, item in enumerate(items, start=1):
        for name in ("logprobs", "prompt_logprobs"):
            if item.sampling.get(name) is not None:
                raise InputError(f"{name} of prompt {i} needs --json")


def _to_token_ids(item: PromptItem, llm: LLM) -> list[int]:
    if isinstance(item.content, str):
        return llm.tokenizer.encode(item.content)
    text = llm.tokenizer.apply_chat_template(item.content)
    return llm.tokenizer.encode(text, add_special_tokens=False)


def _bounded(params: SamplingParams, num_prompt_tokens: int, limit: int) -> SamplingParams:
    """Gives a request without `max_tokens` the default; a prompt that leaves no room is refused."""
    kept = params.truncate_prompt_tokens
    if isinstance(kept, int) and kept > 0:  # -1 keeps what leaves room for `max_tokens`
        num_prompt_tokens = min(kept, num_prompt_tokens)
    room = limit - num_prompt_tokens
    if params.max_tokens is not None or room < 1:
        return params
    return replace(params, max_tokens=min(_DEFAULT_MAX_TOKENS, room))


def _log_totals(outputs: list[RequestOutput], elapsed_s: float) -> None:
    num_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    logger.info(
        "%d requests, %d output tokens in %.2f s: %.1f tokens/s",
        len(outputs),
        num_tokens,
        elapsed_s,
        num_tokens / elapsed_s,
    )


def _to_json(index: int, item: PromptItem, output: RequestOutput) -> dict[str, Any]:
    """The first output stands beside the prompt; `outputs` has all if there are several."""
    metrics = output.metrics
    is_text = isinstance(item.content, str)
    choices = [_choice_to_json(choice) for choice in output.outputs]
    return {
        "index": index,
        **({} if item.id is None else {"id": item.id}),
        "prompt" if is_text else "messages": item.content,
        **choices[0],
        **({"outputs": choices} if len(choices) > 1 else {}),
        **_logprobs_to_json("prompt_logprobs", output.prompt_logprobs),
        "error": output.error,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "queue_time_s": metrics.queue_time_s,
        "time_to_first_token_s": metrics.time_to_first_token_s,
        "mean_inter_token_latency_s": metrics.mean_inter_token_latency_s,
    }


def _choice_to_json(choice: CompletionOutput) -> dict[str, Any]:
    return {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        **_logprobs_to_json("logprobs", choice.logprobs),
    }


def _logprobs_to_json(
    name: str, logprobs: Sequence[dict[int, Logprob] | None] | None
) -> dict[str, Any]:
    """A list for each token: itself first, then the most likely ones; nothing if not asked for."""
    if logprobs is None:
        return {}
    tokens = [
        row and [{"token_id": token_id, **asdict(value)} for token_id, value in row.items()]
        for row in logprobs
    ]
    return {name: tokens}


def _print_text(index: int, item: PromptItem, output: RequestOutput, *, is_only: bool) -> None:
    """Prints the text alone for a single prompt, else below a line that says which prompt it is."""
    if not is_only:
        content = item.content if isinstance(item.content, str) else item.content[-1]["content"]
        print(f"[{index + 1}] {content}")
    for choice in output.outputs:
        mark = f"({choice.index + 1}) " if len(output.outputs) > 1 else ""
        print(f"{mark}{choice.text}")
