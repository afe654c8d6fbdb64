"""What callers may give as prompts, conversations and parameters, brought into one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from cbrs.errors import InvalidRequestError
from cbrs.sampling_params import SamplingParams

TokenIds: TypeAlias = Sequence[int]
Prompt: TypeAlias = str | TokenIds
Message: TypeAlias = Mapping[str, Any]
Conversation: TypeAlias = Sequence[Message]


def as_prompts(prompts: Prompt | Sequence[Prompt], name: str) -> tuple[list[Prompt], bool]:
    """Returns the prompts as a list, and whether a single one was given.

    Raises:
        TypeError: `name` is no text, list of token ids, or list of either.
    """
    if isinstance(prompts, str):
        return [prompts], True
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping | bytes):
        raise TypeError(
            f"{name} is a {type(prompts).__name__}; give a text, a list of texts, "
            "a list of token ids, or a list of such lists"
        )
    items: list[Any] = list(prompts)
    if items and isinstance(items[0], Integral):
        return [items], True
    return items, False


def as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Returns the conversations as a list of lists of messages.

    Raises:
        TypeError: `messages` is neither a conversation nor a list of them.
    """
    items: list[Any] = list(messages)
    conversations = [items] if items and isinstance(items[0], Mapping) else items
    for conversation in conversations:
        check_conversation(conversation)
    return conversations


def check_conversation(conversation: Conversation) -> None:
    """Checks that every message is a mapping; what is in it, the chat template checks.

    Raises:
        TypeError: says what a conversation looks like.
    """
    is_list = isinstance(conversation, Iterable) and not isinstance(conversation, Mapping)
    if not is_list or not all(isinstance(message, Mapping) for message in conversation):
        raise TypeError(
            "messages must be a list of {'role': ..., 'content': ...}, or a list of such lists"
        )


def params_for(
    items: Sequence[object], given: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams]:
    """Returns one `SamplingParams` per item.

    Raises:
        InvalidRequestError: a list of another length than there are prompts.
        TypeError: something else than `SamplingParams` was given.
    """
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * len(items)
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(f"sampling_params must be SamplingParams, not {type(given).__name__}")
    if len(given) != len(items):
        raise InvalidRequestError(
            f"sampling_params has {len(given)} entries, but there are {len(items)} prompts; "
            "give one for all or one per prompt"
        )
    for params in given:
        check_params(params)
    return given


def check_params(params: object) -> None:
    """Raises `TypeError` for anything but `SamplingParams`."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
