"""`LLM`: the Python engine for work that is at hand as a whole (see `LLM.generate`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, overload

from cbrs import scoring
from cbrs.base import BaseLLM, PauseMode, check_pause_mode, submission
from cbrs.driver import Call, Driver, Serve
from cbrs.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    closed_error,
    placed,
)
from cbrs.outputs import RequestOutput
from cbrs.progress import progress_bar
from cbrs.requests import Conversation, Prompt, as_conversations, as_prompts, params_for
from cbrs.sampling_params import SamplingParams
from cbrs.scoring import Score

if TYPE_CHECKING:
    import types


class _Item(NamedTuple):
    """One request of a call."""

    text: str | None
    """The prompt as a text; None if it was token ids."""
    prompt: Prompt
    """What is submitted."""
    params: SamplingParams


class LLM(BaseLLM):
    """A model and its engine, for use from ordinary Python code.

    ```
    with LLM("smollm2-135m-instruct") as llm:
        for output in llm.generate(["One, two,", "A, B,"], SamplingParams(temperature=0)):
            print(output.outputs[0].text)
    ```

    Any number of threads may call its methods at once; their requests share the batches. A Ctrl-C
    ends the call it interrupts and leaves the engine usable. After `close`, and in a child made by
    `fork`, every method but `close` raises `EngineClosedError`.
    """

    def _begin(self) -> None:
        self._driver: Driver | None = Driver(self.engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes every prompt and returns the results in the order of the prompts.

        `prompts` is a text, a list of texts, a list of token ids, or a list of such lists;
        `sampling_params` is one for all or one per prompt. The list may be longer than the queue:
        it is fed as room becomes free, within the rates of tenants, and its deadlines count from
        the moment at which a request is submitted. A request whose step failed, or whose deadline
        passed or cannot be met, comes back with finish reason `error` and its message in
        `RequestOutput.error` (`RequestOutput.raise_for_error` raises it); the others are not
        affected.

        Raises:
            InvalidRequestError: names the prompt and what is wrong; nothing keeps running.
            EngineClosedError: after `close`, or in a forked child.
            EngineDeadError: the engine is broken beyond repair; create a new one.
        """
        every_prompt, _ = as_prompts(prompts, "prompts")
        every_params = params_for(every_prompt, sampling_params)
        items = [
            _Item(prompt if isinstance(prompt, str) else None, prompt, params)
            for prompt, params in zip(every_prompt, every_params, strict=True)
        ]
        return self._run(items, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or each of several, through the model's chat template.

        A message is `{"role": ..., "content": ...}`. Raises as `generate` does, and
        `InvalidRequestError` if the template refuses a conversation or the model has none.
        """
        conversations = as_conversations(messages)
        items = []
        every_params = params_for(conversations, sampling_params)
        for i, (conversation, params) in enumerate(zip(conversations, every_params, strict=True)):
            try:
                text, token_ids = self._render(conversation, add_generation_prompt)
            except InvalidRequestError as error:
                raise placed(error, f"messages[{i}]") from None
            items.append(_Item(text, token_ids, params))
        return self._run(items, use_tqdm)

    @overload
    def score(self, prompt: str, continuation: str) -> Score: ...

    @overload
    def score(
        self, prompt: Prompt | Sequence[Prompt], continuation: Prompt | Sequence[Prompt]
    ) -> Score | list[Score]: ...

    def score(
        self, prompt: Prompt | Sequence[Prompt], continuation: Prompt | Sequence[Prompt]
    ) -> Score | list[Score]:
        """Returns how likely the model finds `continuation` after `prompt`.

        Both are texts or token ids; a text continuation is tokenized by itself, without special
        tokens. Lists give a list: one continuation per prompt, or one prompt for all. Together they
        may have one token less than `max_model_len`.

        Raises:
            InvalidRequestError: an empty or too long text.
            CbrsError: the step that computed it failed, or `pause("cancel")` ended it.
        """
        pairs, is_single = scoring.pairs(prompt, continuation)
        joined = [self._scored_ids(*pair) for pair in pairs]
        outputs = self._run([_Item(None, ids, scoring.PARAMS) for ids, _ in joined], False)
        scores = [
            Score.from_output(output, num_tokens)
            for output, (_, num_tokens) in zip(outputs, joined, strict=True)
        ]
        return scores[0] if is_single else scores

    def pause(self, mode: PauseMode = "wait") -> None:
        """Starts no further requests until `resume`, and returns when nothing is left running.

        What has started goes on to its end (`wait`), or all requests end as cancelled (`cancel`).
        Calls of `generate` stay open and queue up what they have. If another thread resumes
        meanwhile, it returns at once; a Ctrl-C leaves the engine paused.
        """
        driver = self._in_use
        check_pause_mode(mode)
        self.engine.scheduler.pause()
        driver.drain(cancel=mode == "cancel")

    def resume(self) -> None:
        """Ends a pause."""
        self.engine.scheduler.resume()

    def close(self) -> None:
        """Ends all requests, stops all threads and frees the model; calling it twice does no harm.

        A `generate` that runs in another thread raises `EngineClosedError`.
        """
        driver = self._driver
        if driver is None or self._is_foreign:
            return
        self._driver = self._engine = None
        driver.close()

    def __enter__(self) -> LLM:
        """Returns itself; the end of the block calls `close`."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """Calls `close`."""
        self.close()

    def _begin_serving(self) -> Callable[[], object]:
        driver, serve = self._in_use, Serve(self.engine.scheduler)

        def run() -> None:
            # After `close`, or the death of the engine, everybody is told where they ask.
            with suppress(EngineClosedError, EngineDeadError):
                driver.run(serve)

        thread = threading.Thread(target=run, name="cbrs-serve", daemon=True)
        thread.start()

        def end() -> None:
            serve.stop()
            # The garbage collector may call this anywhere.
            if threading.current_thread() is not thread:
                thread.join()

        return end

    @property
    def _in_use(self) -> Driver:
        driver = self._driver if self.engine else None
        # None if another thread closes it in this moment.
        if driver is None:
            raise closed_error(type(self).__name__)
        return driver

    def _run(self, items: Sequence[_Item], use_tqdm: bool) -> list[RequestOutput]:
        engine, driver = self.engine, self._in_use
        submissions = [submission(engine.processor, item.prompt, item.params) for item in items]
        call = Call(submissions, engine.scheduler)
        with progress_bar(len(items), use_tqdm) as on_progress:
            driver.run(call, on_progress)
        return [self._result(call, i, item) for i, item in enumerate(items)]

    def _result(self, call: Call, i: int, item: _Item) -> RequestOutput:
        refusal = call.refused.get(i)
        if refusal is None:
            return RequestOutput.from_finished(call.finished[i], item.text, self._token_texts)
        token_ids = self._ids(item.prompt, True)
        return RequestOutput.refused(item.text, token_ids, item.params.n, *refusal)
