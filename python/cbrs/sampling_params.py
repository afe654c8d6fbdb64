"""`SamplingParams`: how the tokens of a request are chosen and when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it ends.

    The names are those of vLLM. Values are checked once, by the core, when the request is
    submitted. Two defaults are worth knowing: `temperature` is 1.0 (as in vLLM: drawn at random,
    not greedy), and without `max_tokens` a request may run until the context is full (vLLM stops
    after 16 tokens).
    """

    temperature: float = 1.0
    """0 is greedy: always the most likely token."""
    top_k: int = 0
    """Keep only the `top_k` most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that together have this probability, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than `min_p` times the most likely one, in [0, 1]."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else runs; None = drawn from the engine's."""
    max_tokens: int | None = None
    """Output tokens at most; without it what fits into `max_model_len`."""
    stop: str | Sequence[str] | None = None
    """Strings that end the output; the text ends before them."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the output besides the model's own end tokens."""
    ignore_eos: bool = False
    """Do not end at the model's end tokens."""
    tenant: str | None = None
    """Whom the request belongs to; tenants never share cached prefixes."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with the same salt."""

    def to_submit_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of `OutputProcessor.submit`."""
        arguments = {field.name: getattr(self, field.name) for field in fields(self)}
        stop = self.stop
        arguments["stop"] = [] if stop is None else [stop] if isinstance(stop, str) else list(stop)
        arguments["stop_token_ids"] = list(self.stop_token_ids or ())
        return arguments
