"""Reads what `cbrs generate` is to complete: options, text lines or JSONL."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cbrs.cli.common import InputError
from cbrs.sampling_params import SamplingParams

Messages = list[dict[str, str]]

# `output_kind` says how results come back, which is not for a line of a file to decide.
_SAMPLING_KEYS = frozenset(item.name for item in fields(SamplingParams)) - {"output_kind"}
_KEYS = _SAMPLING_KEYS | {"prompt", "messages", "id"}


@dataclass(frozen=True, slots=True)
class PromptItem:
    """One thing to complete: a text, or the messages of a conversation."""

    content: str | Messages
    id: Any = None
    """What the line called itself; comes back in the JSON output."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters of this prompt alone."""


def read_prompts(prompts: list[str] | None, file: str | None, *, as_chat: bool) -> list[PromptItem]:
    """Returns the prompts of the command line, or those of `file` (`-` is stdin).

    A file is JSONL if its name ends in `.jsonl` or its first line is a JSON object; otherwise every
    line that is not blank is a prompt. `as_chat` turns texts into a user's message.

    Raises:
        InputError: names the file and the line.
    """
    if prompts is not None:
        items = [PromptItem(_checked_text(text, "--prompt")) for text in prompts]
    else:
        items = _read_file(file or "-")
    return [_to_conversation(item) for item in items] if as_chat else items


def _read_file(path: str) -> list[PromptItem]:
    name = "stdin" if path == "-" else path
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8: byte {error.start} cannot be decoded") from None
    # Not splitlines(), which also splits at characters that belong to a prompt (form feed, U+2028).
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1)]
    lines = [(number, line) for number, line in lines if line.strip()]
    if not lines:
        raise InputError(f"{name} holds no prompt")
    if path.endswith(".jsonl") or _is_object(lines[0][1]):
        return [_parse_line(line, f"{name}, line {number}") for number, line in lines]
    return [PromptItem(line) for _, line in lines]


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _parse_line(line: str, where: str) -> PromptItem:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{where}: a JSON {type(value).__name__}, not an object")
    unknown = sorted(set(value) - _KEYS)
    if unknown:
        raise InputError(
            f"{where}: unknown key {unknown[0]!r}; known keys: {', '.join(sorted(_KEYS))}"
        )
    if ("prompt" in value) == ("messages" in value):
        raise InputError(f"{where}: give either `prompt` or `messages`")
    if "prompt" in value:
        content: str | Messages = _checked_text(value["prompt"], where)
    else:
        content = _checked_messages(value["messages"], where)
    sampling = {key: value[key] for key in value if key in _SAMPLING_KEYS}
    return PromptItem(content, value.get("id"), sampling)


def _checked_text(text: object, where: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"{where}: prompt is a {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: the prompt is not valid Unicode") from None
    return text


def _checked_messages(messages: object, where: str) -> Messages:
    is_valid = (
        isinstance(messages, list)
        and len(messages) > 0
        and all(
            isinstance(message, dict)
            and message.keys() == {"role", "content"}
            and all(isinstance(text, str) for text in message.values())
            for message in messages
        )
    )
    if not is_valid:
        raise InputError(
            f"{where}: messages must be a list of objects with `role` and `content`, both strings"
        )
    return messages  # type: ignore[return-value]


def _to_conversation(item: PromptItem) -> PromptItem:
    if isinstance(item.content, list):
        return item
    return PromptItem([{"role": "user", "content": item.content}], item.id, item.sampling)
