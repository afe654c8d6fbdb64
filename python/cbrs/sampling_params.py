"""`SamplingParams`: how the tokens of a request are chosen, when it ends, and what comes back."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from cbrs.errors import InvalidRequestError

OutputKind = Literal["cumulative", "delta", "final_only"]
Priority = Literal["interactive", "standard", "batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen, when it ends, how soon, and what comes back.

    The names are those of vLLM. Values are checked once, by the core, when the request is
    submitted: a wrong one is an `InvalidRequestError` whose `param` names the field, one of another
    type a `TypeError`. Two defaults are worth knowing: `temperature` is 1.0 (as in vLLM: drawn at
    random, not greedy), and without `max_tokens` a request may run until the context is full (vLLM
    stops after 16 tokens).
    """

    n: int = 1
    """Independent outputs for the prompt, 1 to 128."""
    temperature: float = 1.0
    """0 is greedy: always the most likely token. >= 0."""
    top_k: int = 0
    """Keep only the `top_k` most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that together have this probability, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than `min_p` times the most likely one, in [0, 1]."""
    seed: int | None = None
    """64 bits. The same seed gives the same tokens, whatever else runs; None = drawn from the
    engine's."""
    presence_penalty: float = 0.0
    """Taken once from the logit of every token that was generated before, -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it was generated before, -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that the prompt or the output has
    already, > 0; above 1 they become less likely."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids: up to 1,024 of them, each -100 to 100."""
    bad_words: str | Sequence[str] | None = None
    """Texts that must not be generated: up to 256, each of 1 to 256 characters. The token that
    would complete one is excluded."""
    max_tokens: int | None = None
    """Output tokens at most, >= 1; without it what fits into `max_model_len`."""
    min_tokens: int = 0
    """Output tokens at least: before so many there are no end tokens and no stop string is found.
    At most `max_tokens`."""
    stop: str | Sequence[str] | None = None
    """Strings that end the output, up to 16 of 1 to 256 characters; the text ends before them."""
    include_stop_str_in_output: bool = False
    """Let the text end with the stop string instead of before it."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the output besides the model's own end tokens."""
    ignore_eos: bool = False
    """Do not end at the model's end tokens."""
    logprobs: int | None = None
    """Log-probabilities of each output token and of so many of the most likely ones, 0 to 20. They
    are the model's own, before penalties, bias and temperature."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, 0 to 20."""
    truncate_prompt_tokens: int | None = None
    """Keep only so many tokens at the end of the prompt, >= 1; -1 keeps what fits."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """False makes no text: only token ids. There are no stop strings then."""
    output_kind: OutputKind = "cumulative"
    """What each output of `AsyncLLM` holds: everything so far (`cumulative`), what is new
    (`delta`), or everything, once, at the end (`final_only`). `LLM` returns whole results."""
    tenant: str | None = None
    """Whom the request belongs to, up to 256 bytes; tenants never share cached prefixes."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with the same salt, up to 256 bytes."""
    priority: Priority | None = None
    """Class of the request: `interactive` is served first, `batch` takes what is left and may
    pause; None = the tenant's class, or `standard`."""
    ttft_deadline_ms: float | None = None
    """Milliseconds from its submission after which the request ends with an error if it still
    waits, 0.001 to 1e9; one that cannot be met is refused at once. None = the tenant's or the
    class's, or no deadline."""
    deadline_ms: float | None = None
    """Milliseconds from its submission after which the request ends with an error, running or not,
    0.001 to 1e9; it keeps what it has produced. None as above."""
    target_itl_ms: float | None = None
    """Longest time between two of its tokens, in milliseconds, that the engine aims at by giving
    other prompts less of each step, 0.001 to 1e9. None = the tenant's, the class's or the
    engine's, or no target."""

    def __post_init__(self) -> None:
        """Checks what never reaches the core.

        Raises:
            InvalidRequestError: `output_kind` is none of the three.
        """
        if self.output_kind not in get_args(OutputKind):
            error = InvalidRequestError(
                f"output_kind is {self.output_kind!r}; choose one of "
                f"{', '.join(get_args(OutputKind))}"
            )
            error.param = "output_kind"
            raise error

    def to_submit_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of `OutputProcessor.submit` that are not at their default.

        They are the fields of this class without `output_kind`.
        """
        return {
            name: value
            for name, default in _SUBMITTED
            if (value := getattr(self, name)) is not default
        }


_SUBMITTED = tuple(
    (field.name, field.default) for field in fields(SamplingParams) if field.name != "output_kind"
)
