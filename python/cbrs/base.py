"""What `LLM` and `AsyncLLM` have in common: the model, its settings, its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

# Read by OpenMP when torch is loaded: idle threads sleep instead of spinning. While anything else
# wants a core, spinning ones make a step several times slower. An own choice of the user stands.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        'cbrs.LLM needs torch, which is not installed: pip install "cbrs[engine]"'
    ) from error

from cbrs.assembly import build_engine, policy_in_force
from cbrs.config import (
    DEFAULT_MODEL,
    Dtype,
    EffectiveConfig,
    EngineConfig,
    Quantization,
)
from cbrs.errors import InvalidRequestError, closed_error, forked_error
from cbrs.logprobs import TokenTexts
from cbrs.requests import Conversation, Prompt

if TYPE_CHECKING:
    from cbrs._core import OutputProcessor, Tokenizer
    from cbrs.engine import Engine
    from cbrs.sampling_params import SamplingParams
    from cbrs.serving import RunningServer


PauseMode = Literal["wait", "cancel"]


class BaseLLM:
    """A loaded model and its engine.

    Every method but `close` raises `EngineClosedError` after it, and in a child made by `fork`: the
    engine belongs to the process that made it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        dtype: Dtype = "auto",
        quantization: Quantization | None = None,
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
            quantization=quantization,
            device=device,
            num_threads=num_threads,
            **engine_options,
        )
        self._pid = os.getpid()
        engine, self._tokenizer = build_engine(config)
        self._engine: Engine | None = engine
        self._token_texts = TokenTexts(self._tokenizer)
        self._begin()

    def _begin(self) -> None:
        """Makes what runs the engine."""
        raise NotImplementedError

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._engine is None

    @property
    def engine(self) -> Engine:
        """The engine, for tests and tools; nothing else may step it while requests run."""
        engine = self._engine
        if engine is None:
            raise closed_error(type(self).__name__)
        if self._is_foreign:
            raise forked_error(type(self).__name__, self._pid)
        return engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; `InvalidRequestError` if it has none."""
        engine = self.engine
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"{engine.config.model} has no tokenizer; give prompts as token ids"
            )
        return self._tokenizer

    def config(self) -> EffectiveConfig:
        """Returns the settings in effect: every field is decided."""
        return self.engine.config

    def stats(self) -> dict[str, int | float]:
        """Returns the scheduler's gauges and counters by name; never waits for a step.

        Rates are requests per second, times end with their unit; `load` is arrivals over what the
        engine can serve.
        """
        return self.engine.scheduler.stats()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Splits `text` into token ids, with those that the model wants around every prompt."""
        return self.tokenizer.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of a whole sequence of token ids."""
        return self.tokenizer.decode(ids, skip_special_tokens)

    def serve_in_background(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        served_model_name: str | None = None,
        **options: Any,
    ) -> RunningServer:
        """Serves this model over HTTP, on threads of its own, until the result is closed.

        Port 0 is one that is free: `RunningServer.url` tells it. Own requests go on beside it.
        `options` are further ones of `RunningServer`: `api_keys`, `limits`, `access_log` and so on.

        Raises:
            ValueError: the address is unusable, or not loopback without keys; a limit or a key is.
            OSError: the address cannot be had.
        """
        from cbrs.serving import RunningServer

        names = () if served_model_name is None else (served_model_name,)
        on_close = self._begin_serving()
        try:
            return RunningServer(
                self,
                host=host,
                port=port,
                served_model_names=names,
                on_close=on_close,
                **options,
            )
        except BaseException:
            if on_close is not None:
                on_close()
            raise

    def _begin_serving(self) -> Callable[[], object] | None:
        """Sees to it that the engine is stepped; returns what ends that, if it has to end."""
        return None

    def set_policy(
        self, policy: str | os.PathLike[str] | dict[str, Any] = "fcfs", **rules: Any
    ) -> None:
        """Replaces the policy while requests run; arguments as in `EngineConfig`, from any thread.

        Class, deadlines, caps, rates and bounds of the queue hold for requests that come from now
        on; weights and bounds on what runs hold for all from the next step on.

        Raises:
            ValueError: names the setting that is wrong, or cannot change while the engine runs
                (`fairness`, `order`, `admission`, all of `static`); everything stays as it was.
        """
        engine = self.engine
        engine.scheduler.set_policy(policy, **rules)
        settings = engine.scheduler.policy_settings
        engine.config = replace(engine.config, **policy_in_force(settings))

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; what runs goes on."""
        self.engine.scheduler.reset_prefix_cache()

    @property
    def _is_foreign(self) -> bool:
        return os.getpid() != self._pid

    def _render(
        self, conversation: Conversation, add_generation_prompt: bool
    ) -> tuple[str, list[int]]:
        """Returns a conversation as the model's prompt, as text and as token ids."""
        tokenizer = self.tokenizer
        messages = [dict(message) for message in conversation]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt)
        # The template writes the special tokens itself: encoding must not add them again.
        return text, tokenizer.encode(text, add_special_tokens=False)

    def _scored_ids(self, prompt: Prompt, continuation: Prompt) -> tuple[list[int], int]:
        """Returns prompt and continuation as one list of ids, and how many the latter has."""
        start = self._ids(prompt, True)
        end = self._ids(continuation, False)
        for name, ids in (("prompt", start), ("continuation", end)):
            if not ids:
                error = InvalidRequestError(f"the {name} is empty; scoring needs a token of it")
                error.param = name
                raise error
        return start + end, len(end)

    def _ids(self, prompt: Prompt, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt, add_special_tokens)
        return list(prompt)


def submission(
    processor: OutputProcessor, prompt: Prompt, params: SamplingParams
) -> Callable[..., int]:
    """Returns what submits `prompt`; it takes the keyword `index` (and `channel`)."""
    arguments = params.to_submit_arguments()
    if isinstance(prompt, str):
        return partial(processor.submit_text, prompt, **arguments)
    return partial(processor.submit, prompt, **arguments)


def check_pause_mode(mode: str) -> None:
    """Raises `ValueError` for anything but the two modes."""
    if mode not in get_args(PauseMode):
        raise ValueError(f"mode is {mode!r}; choose one of {', '.join(get_args(PauseMode))}")
