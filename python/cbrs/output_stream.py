"""`OutputStream`: the outputs of one request as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from cbrs.errors import EngineClosedError
from cbrs.inbox import Inbox
from cbrs.updates import OutputAssembler

if TYPE_CHECKING:
    from cbrs._core import Update
    from cbrs.async_llm import AsyncLLM
    from cbrs.engine_thread import EngineThread
    from cbrs.logprobs import TokenTexts
    from cbrs.outputs import RequestOutput
    from cbrs.sampling_params import SamplingParams


class Submission(NamedTuple):
    """A prompt that is ready to be submitted."""

    prompt: str | None
    """The text that it was; None if it was token ids."""
    submit: Callable[..., int]
    """Submits it, with the keywords `index` and `channel`."""


class OutputStream:
    """The outputs of one request, for `async for`; at most one task may wait for the next.

    Closing it cancels the request: `aclose`, the end of the task that waits for an output, any
    error, and dropping it. It belongs to the event loop that asked for the first output.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        thread: EngineThread,
        texts: TokenTexts,
        prepare: Callable[[], Awaitable[Submission]],
        params: SamplingParams,
        inbox: Inbox,
    ) -> None:
        """Made by `AsyncLLM.generate`; `prepare` is awaited before the first output."""
        self._is_over = False
        self._is_reading = False
        # As long as somebody reads, the engine is in use.
        self._llm = llm
        self._thread = thread
        self._texts = texts
        self._prepare = prepare
        self._params = params
        self._inbox = inbox
        self._assembler: OutputAssembler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def request_id(self) -> str:
        """The id given to `generate`, or the generated one."""
        return self._inbox.request_id

    def __aiter__(self) -> OutputStream:
        """Returns itself."""
        return self

    async def __anext__(self) -> RequestOutput:
        """Returns the next output; raises as `AsyncLLM.generate` says."""
        if self._is_over:
            raise StopAsyncIteration
        if self._thread.is_foreign:
            self._thread.check()  # raises, and says what a forked child can do
        if self._is_reading:
            raise RuntimeError("another task is waiting for the next output of this request")
        self._is_reading = True
        try:
            assembler = self._assembler or await self._start()
            output = await self._read(assembler)
        except BaseException:
            self._close()
            raise
        finally:
            self._is_reading = False
        self._is_over = output.finished
        return output

    async def aclose(self) -> None:
        """Cancels the request unless it has ended; there are no further outputs."""
        self._close()

    async def _start(self) -> OutputAssembler:
        inbox, ports = self._inbox, self._thread.ports
        self._loop = asyncio.get_running_loop()
        self._thread.check()
        # The id is live while the prompt is prepared: `cancel` and `pause` find the request. What
        # they end then is submitted all the same, and cancelled by `Inbox.submit`.
        ports.ids.claim(inbox)
        prompt, submit = await self._prepare()
        kind = self._params.output_kind
        self._assembler = assembler = OutputAssembler(
            inbox.request_id, prompt, self._params.n, self._texts, keeps_all=kind != "delta"
        )
        # What is read at the end only is put together at once: updates take more memory.
        inbox.absorb = assembler.add if kind == "final_only" else None
        # From here on nothing is awaited until the request is submitted.
        if self._is_over:
            raise StopAsyncIteration
        port = ports.port(self._thread.check)
        self._thread.check()
        port.add(inbox)
        try:
            submission = partial(submit, index=inbox.index, channel=port.channel)
            inbox.submit(submission, self._thread.scheduler)
        except BaseException:
            port.remove(inbox)
            raise
        return assembler

    async def _read(self, assembler: OutputAssembler) -> RequestOutput:
        inbox = self._inbox
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the outputs of a request belong to the event loop that started it")
        while not inbox.is_readable and not self._is_over:
            await inbox.wait()
        if self._is_over:
            raise StopAsyncIteration
        is_delta = self._params.output_kind == "delta"
        updates = inbox.take_step() if is_delta else inbox.take_all()
        self._check(updates)
        if is_delta:
            return assembler.delta(updates)
        if inbox.absorb is None:
            for update in updates:
                assembler.add(update)
        return assembler.whole(updates[-1])

    def _check(self, updates: list[Update]) -> None:
        """Raises if the engine or its channel ended, and the request only with it."""
        is_final_only = self._params.output_kind == "final_only"
        if not updates or (is_final_only and not updates[-1].is_last):
            error = self._thread.error()
            raise error or EngineClosedError("the outputs of this request were cut off")
        if not self._inbox.is_cancelled:
            error = self._thread.error()
            if error and any(update.finish_reason == "cancelled" for update in updates):
                raise error

    def _close(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        inbox, thread = self._inbox, self._thread
        # In a forked child nothing of the engine may be touched: its locks may be held for ever.
        if not thread.is_foreign:
            inbox.cancel(thread.scheduler)
            thread.ports.ids.release(inbox)
            inbox.wake()

    def __del__(self) -> None:
        """Cancels the request unless it has ended."""
        # An object whose construction failed has no state.
        if getattr(self, "_is_over", True) is False:
            self._close()
