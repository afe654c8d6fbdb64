"""`AsyncLLM`: the engine for asyncio programs (see `AsyncLLM.generate`)."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, overload

from cbrs import scoring
from cbrs.base import BaseLLM, PauseMode, check_pause_mode, submission
from cbrs.engine_thread import EngineThread
from cbrs.inbox import Inbox
from cbrs.output_stream import OutputStream, Submission
from cbrs.requests import Conversation, Prompt, check_conversation, check_params
from cbrs.sampling_params import SamplingParams
from cbrs.scoring import Score

if TYPE_CHECKING:
    import types

    from cbrs.engine import Engine

# Longer texts, in characters, are tokenized by a thread of the loop's pool: a text of this length
# holds the loop up for a few milliseconds.
_MAX_INLINE_CHARS = 2_048
# A pause looks this often whether anything is left running.
_PAUSE_INTERVAL_S = 0.005


class AsyncLLM(BaseLLM):
    """A model and its engine, for use from asyncio.

    ```
    async with AsyncLLM("smollm2-135m-instruct") as llm:
        params = SamplingParams(max_tokens=20, output_kind="delta")
        async for output in llm.generate("One, two,", params):
            print(output.outputs[0].text, end="", flush=True)
    ```

    Any number of event loops and threads may use it at once; their requests share the batches. One
    thread of its own runs the model. Making one loads the model and takes as long as that. Dropping
    the last reference ends it like `aclose`; after that, and in a child made by `fork`, everything
    but `aclose` raises `EngineClosedError`.
    """

    def _begin(self) -> None:
        self._numbers = itertools.count()
        self._thread = EngineThread(super().engine)
        # Called when the last reference is dropped; the thread itself looks after the exit.
        self._stop = weakref.finalize(self, self._thread.stop)
        self._stop.atexit = False

    @property
    def engine(self) -> Engine:
        """The engine, for tests and tools; its thread steps it, and nobody else may.

        Raises:
            EngineClosedError: after `aclose`, or in a forked child.
            EngineDeadError: the engine is broken beyond repair; create a new one.
        """
        engine = super().engine
        self._thread.check()
        return engine

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> OutputStream:
        """Completes a text or a list of token ids: `async for output in llm.generate(...)`.

        What an output holds, `SamplingParams.output_kind` says: everything so far (those that came
        together are one), what one step brought, or everything at the end. The last one has
        `finished`. A request whose step failed or whose deadline passed ends with finish reason
        `error` and its message in `RequestOutput.error`, as with `LLM`
        (`RequestOutput.raise_for_error` raises it); one that `cancel` ended, with `cancelled`.

        The request is submitted when the first output is asked for. Leaving the loop, `aclose`, or
        the end of the task that waits for an output cancel it. `request_id` is any text that no
        live request has; without one, it is generated.

        Raises, when the first output is asked for:
            InvalidRequestError: what is wrong with the prompt, a parameter or the id.
            OverloadedError: the queue is full, the tenant is over its rate, or the deadline cannot
                be met; `retry_after_s` says when to try again (None = that does not help).

        Raises, at any output:
            EngineClosedError: `aclose` was called, or this is a forked child.
            EngineDeadError: the engine is broken beyond repair; create a new one.
        """
        prepare = partial(self._prepare, prompt, sampling_params)
        return self._stream(prepare, sampling_params, request_id)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> OutputStream:
        """Answers a conversation through the model's chat template; as `generate` otherwise.

        A message is `{"role": ..., "content": ...}`.
        """
        prepare = partial(self._prepare_chat, messages, sampling_params, add_generation_prompt)
        return self._stream(prepare, sampling_params, request_id)

    def cancel(self, request_id: str) -> bool:
        """Ends a request as `cancelled`; returns whether one of this id was live.

        Any thread; returns at once. The id may be given to a new request right away.
        """
        engine = self.engine
        inbox = self._thread.ports.ids.pop(request_id)
        if inbox is None:
            return False
        inbox.cancel(engine.scheduler)
        return True

    @overload
    async def score(self, prompt: str, continuation: str) -> Score: ...

    @overload
    async def score(
        self, prompt: Prompt | Sequence[Prompt], continuation: Prompt | Sequence[Prompt]
    ) -> Score | list[Score]: ...

    async def score(
        self, prompt: Prompt | Sequence[Prompt], continuation: Prompt | Sequence[Prompt]
    ) -> Score | list[Score]:
        """Returns how likely the model finds `continuation` after `prompt`.

        Both are texts or token ids; a text continuation is tokenized by itself, without special
        tokens. Lists give a list: one continuation per prompt, or one prompt for all. Together they
        may have one token less than `max_model_len`.

        Raises:
            InvalidRequestError: an empty or too long text.
            OverloadedError: the queue is full; `retry_after_s` says when to try again.
            CbrsError: the step that computed it failed, or `pause("cancel")` ended it.
        """
        self._thread.check()
        pairs, is_single = scoring.pairs(prompt, continuation)
        tasks = [asyncio.ensure_future(self._score(*pair)) for pair in pairs]
        try:
            scores = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return scores[0] if is_single else scores

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Starts no further requests until `resume`, and returns when nothing is left running.

        What has started goes on to its end (`wait`), or all requests end as cancelled (`cancel`).
        New requests queue up. It also returns if `resume` is called meanwhile.
        """
        scheduler = self.engine.scheduler
        check_pause_mode(mode)
        scheduler.pause()
        if mode == "cancel":
            for inbox in self._thread.ports.ids.live():
                inbox.cancel(scheduler)
        # What has started and lost its row gets one as soon as nothing else runs.
        while scheduler.is_paused() and self.stats()["num_running"] > 0:
            await asyncio.sleep(_PAUSE_INTERVAL_S)

    async def resume(self) -> None:
        """Ends a pause."""
        self.engine.scheduler.resume()

    async def aclose(self) -> None:
        """Ends all requests, stops all threads and frees the model; calling it twice does no harm.

        Whoever waits for an output, in any event loop, gets `EngineClosedError`.
        """
        if self._is_foreign:
            return
        self._engine = None
        self._stop()
        await asyncio.shield(asyncio.wrap_future(self._thread.ended))
        self._thread.join()  # which has nothing left to do

    async def __aenter__(self) -> AsyncLLM:
        """Returns itself; the end of the block calls `aclose`."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """Calls `aclose`."""
        await self.aclose()

    def _stream(
        self,
        prepare: Callable[[], Awaitable[Submission]],
        sampling_params: SamplingParams | None,
        request_id: str | None,
    ) -> OutputStream:
        params = sampling_params or SamplingParams()
        check_params(params)
        index = next(self._numbers)
        name = f"cbrs-{index}" if request_id is None else request_id
        if not isinstance(name, str):
            raise TypeError(f"request_id must be a text, not {type(name).__name__}")
        inbox = Inbox(name, index, params.output_kind == "final_only")
        return OutputStream(self, self._thread, self._token_texts, prepare, params, inbox)

    async def _prepare(self, prompt: Prompt, params: SamplingParams | None) -> Submission:
        processor, params = self.engine.processor, params or SamplingParams()
        text = prompt if isinstance(prompt, str) else None
        if text is not None and len(text) > _MAX_INLINE_CHARS:
            prompt = await asyncio.to_thread(self.encode, text)
        return Submission(text, submission(processor, prompt, params))

    async def _prepare_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None,
        add_generation_prompt: bool,
    ) -> Submission:
        processor = self.engine.processor
        check_conversation(messages)
        # A template may take as long as it likes.
        text, token_ids = await asyncio.to_thread(self._render, messages, add_generation_prompt)
        return Submission(text, submission(processor, token_ids, params or SamplingParams()))

    async def _score(self, prompt: Prompt, continuation: Prompt) -> Score:
        token_ids, num_tokens = await asyncio.to_thread(self._scored_ids, prompt, continuation)
        async for output in self.generate(token_ids, scoring.PARAMS):
            if output.finished:
                return Score.from_output(output, num_tokens)
        raise AssertionError("a stream ends with a finished output")
