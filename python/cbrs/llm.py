"""`LLM`: the Python engine for work that is at hand as a whole (see `LLM.generate`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

# Read by OpenMP when torch is loaded: idle threads sleep instead of spinning. While anything else
# wants a core, spinning ones make a step several times slower. An own choice of the user stands.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        'cbrs.LLM needs torch, which is not installed: pip install "cbrs[engine]"'
    ) from error

from cbrs.assembly import build_engine
from cbrs.config import DEFAULT_MODEL, Dtype, EffectiveConfig, EngineConfig
from cbrs.driver import Call, Driver
from cbrs.errors import EngineClosedError, InvalidRequestError, placed
from cbrs.outputs import RequestOutput
from cbrs.progress import progress_bar
from cbrs.sampling_params import SamplingParams

if TYPE_CHECKING:
    import types

    from cbrs._core import OutputProcessor, Tokenizer
    from cbrs.engine import Engine

TokenIds: TypeAlias = Sequence[int]
Prompt: TypeAlias = str | TokenIds
Message: TypeAlias = Mapping[str, str]
Conversation: TypeAlias = Sequence[Message]


class LLM:
    """A model and its engine, for use from ordinary Python code.

    ```
    with LLM("smollm2-135m-instruct") as llm:
        for output in llm.generate(["One, two,", "A, B,"], SamplingParams(temperature=0)):
            print(output.outputs[0].text)
    ```

    Any number of threads may call `generate` and `chat` at once; their requests share the batches.
    A Ctrl-C ends the call it interrupts and leaves the engine usable. A child made by `fork` cannot
    use the `LLM` of its parent.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        dtype: Dtype = "auto",
        device: str = "auto",
        num_threads: int | None = None,
        **engine_options: Any,
    ) -> None:
        """Loads `model` and allocates the KV pool; all options are fields of `EngineConfig`.

        Raises:
            ModelLoadError: names the file and what is wrong in it.
            ValueError: an option is out of range (`InvalidRequestError` if the core says so).
            TypeError: an option does not exist.
        """
        config = EngineConfig(
            model=os.fspath(model),
            dtype=dtype,
            device=device,
            num_threads=num_threads,
            **engine_options,
        )
        self._pid = os.getpid()
        engine, self._tokenizer = build_engine(config)
        self._config = engine.config
        self._engine: Engine | None = engine
        self._driver: Driver | None = Driver(engine)

    @property
    def config(self) -> EffectiveConfig:
        """The settings in effect: every field is decided."""
        return self._config

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._driver is None

    @property
    def engine(self) -> Engine:
        """The engine, for a loop of your own; not while `generate` runs."""
        return self._in_use()[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; `InvalidRequestError` if it has none."""
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"{self._config.model} has no tokenizer; give prompts as token ids"
            )
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes every prompt and returns the results in the order of the prompts.

        `prompts` is a text, a list of texts, a list of token ids, or a list of such lists;
        `sampling_params` is one for all or one per prompt. The list may be longer than the queue:
        it is fed as room becomes free. A request whose step failed comes back with finish reason
        `error` and its message in `RequestOutput.error`; the others are not affected.

        Raises:
            InvalidRequestError: names the prompt and what is wrong; nothing keeps running.
            EngineClosedError: after `close`, or in a forked child.
            EngineDeadError: the engine is broken beyond repair; create a new one.
        """
        engine, driver = self._in_use()
        items = _as_list(prompts)
        submissions = [
            _submission(engine.processor, prompt, params)
            for prompt, params in zip(items, _params_for(items, sampling_params), strict=True)
        ]
        texts = [prompt if isinstance(prompt, str) else None for prompt in items]
        return _run(driver, submissions, texts, use_tqdm)

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
        engine, driver = self._in_use()
        conversations = _as_conversations(messages)
        tokenizer = self.tokenizer
        submissions, texts = [], []
        every_params = _params_for(conversations, sampling_params)
        for i, (conversation, params) in enumerate(zip(conversations, every_params, strict=True)):
            try:
                text = tokenizer.apply_chat_template(
                    [dict(message) for message in conversation], add_generation_prompt
                )
            except InvalidRequestError as error:
                raise placed(error, f"messages[{i}]") from None
            # The template writes the special tokens itself: encoding must not add them again.
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            submissions.append(_submission(engine.processor, token_ids, params))
            texts.append(text)
        return _run(driver, submissions, texts, use_tqdm)

    def stats(self) -> dict[str, Any]:
        """Returns the scheduler's gauges and counters; never waits for a step."""
        engine, _ = self._in_use()
        return engine.scheduler.stats()

    def close(self) -> None:
        """Ends all requests, stops all threads and frees the model; calling it twice does no harm.

        A `generate` that runs in another thread raises `EngineClosedError`.
        """
        driver = self._driver
        if driver is None or os.getpid() != self._pid:
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

    def _in_use(self) -> tuple[Engine, Driver]:
        engine, driver = self._engine, self._driver
        if engine is None or driver is None:
            raise EngineClosedError("this LLM is closed; create a new one")
        if os.getpid() != self._pid:
            raise EngineClosedError(
                f"this LLM belongs to process {self._pid} and cannot be used in its forked child "
                f"{os.getpid()}; create a new one here"
            )
        return engine, driver


def _run(
    driver: Driver,
    submissions: list[Callable[..., int]],
    texts: Sequence[str | None],
    use_tqdm: bool,
) -> list[RequestOutput]:
    call = Call(submissions)
    with progress_bar(len(submissions), use_tqdm) as on_progress:
        driver.run(call, on_progress)
    return [RequestOutput.from_finished(call.finished[i], text) for i, text in enumerate(texts)]


def _submission(
    processor: OutputProcessor, prompt: Prompt, params: SamplingParams
) -> Callable[..., int]:
    arguments = params.to_submit_arguments()
    if isinstance(prompt, str):
        return partial(processor.submit_text, prompt, **arguments)
    return partial(processor.submit, prompt, **arguments)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping | bytes):
        raise TypeError(
            f"prompts is a {type(prompts).__name__}; give a text, a list of texts, "
            "a list of token ids, or a list of such lists"
        )
    items: list[Any] = list(prompts)
    if items and isinstance(items[0], Integral):
        return [items]
    return items


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    items: list[Any] = list(messages)
    conversations = [items] if items and isinstance(items[0], Mapping) else items
    for conversation in conversations:
        if not all(isinstance(message, Mapping) for message in conversation):
            raise TypeError(
                "messages must be a list of {'role': ..., 'content': ...}, or a list of such lists"
            )
    return conversations


def _params_for(
    items: Sequence[object], given: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * len(items)
    if len(given) != len(items):
        raise InvalidRequestError(
            f"sampling_params has {len(given)} entries, but there are {len(items)} prompts; "
            "give one for all or one per prompt"
        )
    return given
