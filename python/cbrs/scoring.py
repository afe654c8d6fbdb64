"""`Score`: how likely a model finds a text, as `LLM.score` and `AsyncLLM.score` return it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cbrs.errors import CbrsError, InvalidRequestError, placed, request_error
from cbrs.outputs import RequestOutput
from cbrs.requests import Prompt, as_prompts
from cbrs.sampling_params import SamplingParams

PARAMS = SamplingParams(
    temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind="final_only"
)
"""What a scored text is submitted with: the one token that comes out of it is not used."""

Prompts: TypeAlias = Prompt | Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is after its prompt."""

    logprob: float
    """Natural logarithm of the probability of the whole continuation."""
    token_logprobs: list[float]
    """The same of each token of it; they sum up to `logprob`."""
    token_ids: list[int]
    """The continuation as token ids."""
    is_greedy: bool
    """Whether each of its tokens is the most likely one, so that greedy decoding would give it."""

    @classmethod
    def from_output(cls, output: RequestOutput, num_continuation_tokens: int) -> Score:
        """Reads the last tokens' log-probabilities from the result of a prompt with `PARAMS`.

        Raises:
            CbrsError: the step that computed them failed, or the request was cancelled
                (`DeadlineExceededError` if the engine's deadline passed).
        """
        if output.outputs[0].finish_reason == "cancelled":
            raise CbrsError(
                "the text was not scored: it was cancelled; score it again after `resume`"
            )
        if output.error is not None or output.prompt_logprobs is None:
            raise placed(request_error(str(output.error)), "the text could not be scored")
        token_ids = output.prompt_token_ids[-num_continuation_tokens:]
        rows = output.prompt_logprobs[-num_continuation_tokens:]
        entries = [row[token] for row, token in zip(rows, token_ids, strict=True) if row]
        logprobs = [entry.logprob for entry in entries]
        return cls(
            logprob=sum(logprobs),
            token_logprobs=logprobs,
            token_ids=token_ids,
            is_greedy=all(entry.rank == 1 for entry in entries),
        )


def pairs(prompt: Prompts, continuation: Prompts) -> tuple[list[tuple[Prompt, Prompt]], bool]:
    """Returns the pairs to score, and whether a single one was given.

    One prompt goes with every continuation.

    Raises:
        InvalidRequestError: two lists of different lengths.
    """
    prompts, is_one_prompt = as_prompts(prompt, "prompt")
    continuations, is_single = as_prompts(continuation, "continuation")
    if is_one_prompt:
        prompts = prompts * len(continuations)
    if len(prompts) != len(continuations):
        raise InvalidRequestError(
            f"there are {len(prompts)} prompts, but {len(continuations)} continuations; give one "
            "continuation per prompt, or one prompt for all"
        )
    return list(zip(prompts, continuations, strict=True)), is_single and is_one_prompt
