"""A conversation with a model: its messages, and the turn that is under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from cbrs.errors import InvalidRequestError
from cbrs.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cbrs.async_llm import AsyncLLM
    from cbrs.outputs import FinishReason

_SAMPLING_NAMES = frozenset(field.name for field in fields(SamplingParams))


class TurnError(Exception):
    """A turn got no answer; the conversation is as it was before. The message is one line."""


class Conversation:
    """What was said so far; a turn adds to it when it has ended well or was stopped."""

    def __init__(self, llm: AsyncLLM, params: SamplingParams, system: str | None) -> None:
        """`max_tokens` of `params` is lowered where less room is left."""
        self.llm = llm
        self.params = params
        self.system = system
        self._said: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forgets what was said, not the system message."""
        self._said.clear()

    def turn(self, text: str) -> Turn:
        """Returns the turn that asks `text`; nothing is said yet."""
        return Turn(self, text)

    def messages(self, text: str) -> list[dict[str, str]]:
        """Returns what was said and then `text`, as messages for the chat template."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self._said, {"role": "user", "content": text}]

    def add(self, question: str, answer: str) -> None:
        """Keeps a question and its answer."""
        self._said += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]


class Turn:
    """One question and its answer, as far as it has come."""

    def __init__(self, conversation: Conversation, question: str) -> None:
        """Made by `Conversation.turn`."""
        self._conversation = conversation
        self._question = question
        self._started = time.monotonic()
        self._first_token_s: float | None = None
        self._last_token_s = 0.0
        self.text = ""
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.is_stopped = False
        self.is_ended = False

    async def stream(self, show: Callable[[str], None]) -> None:
        """Generates the answer and calls `show` with each piece of it.

        A cancellation ends the request in the engine; `stop` then keeps what has come.

        Raises:
            TurnError: there is no answer, and why.
            InvalidRequestError: no turn can have one, because a sampling parameter is wrong.
        """
        prompt, params = self._prepare()
        stream = self._conversation.llm.generate(prompt, params)
        error: str | None = None
        try:
            async for output in stream:
                (completion,) = output.outputs
                self._count(len(completion.token_ids))
                self.finish_reason = completion.finish_reason
                error = output.error
                if completion.text:
                    self.text += completion.text
                    show(completion.text)
                # Where more is there already, nothing waits, and a cancellation would not come in.
                await asyncio.sleep(0)
        except InvalidRequestError as refusal:
            if refusal.param in _SAMPLING_NAMES:
                raise  # it would be refused at every turn
            raise TurnError(f"refused: {_one_line(refusal)}") from None
        finally:
            await stream.aclose()
        if self.finish_reason == "error":
            raise TurnError(f"the answer failed and is forgotten: {error}")
        self._end()

    def stop(self) -> None:
        """Keeps the answer as far as it has come; a question without any answer is forgotten."""
        if not self.is_ended:
            self.is_stopped = True
            self._end()

    def summary(self) -> str:
        """Says how fast it was."""
        if self._first_token_s is None:
            return "no tokens"
        seconds = self._last_token_s - self._first_token_s
        rate = f"{(self.num_tokens - 1) / seconds:.1f}" if seconds > 0 else "-"
        return f"{self.num_tokens} tokens, first after {self._first_token_s:.2f} s, {rate} tokens/s"

    def _prepare(self) -> tuple[list[int], SamplingParams]:
        """Returns the prompt and parameters whose `max_tokens` fits."""
        conversation = self._conversation
        tokenizer = conversation.llm.tokenizer
        try:
            text = tokenizer.apply_chat_template(conversation.messages(self._question))
            # The template writes the special tokens itself: encoding must not add them again.
            prompt = tokenizer.encode(text, add_special_tokens=False)
        except (InvalidRequestError, UnicodeEncodeError) as refusal:
            raise TurnError(f"refused: {_one_line(refusal)}") from None
        limit = conversation.llm.config().max_model_len
        room = limit - len(prompt)
        if room < 1:
            raise TurnError(
                f"the conversation has grown to {len(prompt)} tokens, and the context holds "
                f"{limit}, the answer included; /reset starts a new one"
            )
        params = conversation.params
        given = room if params.max_tokens is None else params.max_tokens
        return prompt, replace(params, max_tokens=min(given, room))

    def _count(self, num_tokens: int) -> None:
        if num_tokens > 0:
            self.num_tokens += num_tokens
            self._last_token_s = time.monotonic() - self._started
            if self._first_token_s is None:
                self._first_token_s = self._last_token_s

    def _end(self) -> None:
        self.is_ended = True
        if self.text or not self.is_stopped:
            self._conversation.add(self._question, self.text)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
