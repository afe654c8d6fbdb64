"""What `LLM.generate` and `AsyncLLM.generate` give back, in the shape that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from cbrs.errors import request_error
from cbrs.logprobs import Logprob, TokenTexts, to_dicts

if TYPE_CHECKING:
    from cbrs._core import FinishedChoice, FinishedRequest

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the `n` outputs of a request."""

    index: int
    """Number of the choice, 0 to `n - 1`."""
    text: str
    """The generated text, without the token or string that ended it; of a delta, what is new."""
    token_ids: list[int]
    """The generated ids, the one that ended the output included; of a delta, what is new."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of all tokens so far; None unless `logprobs` was asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of `token_ids`, the token and the most likely ones; None unless asked for."""
    finish_reason: FinishReason | None = None
    """None while the output goes on. `error` means that the step which computed it failed or its
    deadline passed; see `RequestOutput.error`."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the output; None for the model's end tokens."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to one request, in seconds; None = it never came that far."""

    arrival_time_s: float
    """When it was submitted, on the scheduler's monotonic clock."""
    queue_time_s: float | None
    """From submission to its first step."""
    time_to_first_token_s: float | None
    """From submission to the first token of any choice."""
    total_time_s: float
    """From submission to the end, or to this output of a stream."""
    inter_token_latencies_s: list[float] = field(default_factory=list)
    """From each token of a choice to its next, one choice after the other; empty before the end."""

    @classmethod
    def from_times(
        cls,
        arrival_s: float,
        first_scheduled_s: float | None,
        first_token_s: float | None,
        last_s: float,
        inter_token_latencies_s: list[float],
    ) -> RequestMetrics:
        """Builds them from points in time on the scheduler's clock."""

        def since_arrival(time_s: float | None) -> float | None:
            return None if time_s is None else time_s - arrival_s

        return cls(
            arrival_time_s=arrival_s,
            queue_time_s=since_arrival(first_scheduled_s),
            time_to_first_token_s=since_arrival(first_token_s),
            total_time_s=last_s - arrival_s,
            inter_token_latencies_s=inter_token_latencies_s,
        )

    @property
    def mean_inter_token_latency_s(self) -> float | None:
        """Mean of `inter_token_latencies_s`; None if there are none."""
        latencies = self.inter_token_latencies_s
        return sum(latencies) / len(latencies) if latencies else None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one request, or what there is of it so far."""

    request_id: str
    """The id given to `AsyncLLM.generate`, or a generated one; for `LLM` the core's number, as it
    stands in `Batch.request_ids` ("" if the core refused the request)."""
    prompt: str | None
    """The prompt text; None if token ids were given."""
    prompt_token_ids: list[int]
    """The prompt as token ids, after truncation."""
    outputs: list[CompletionOutput]
    """The choices in their order; of a delta, those that have something new."""
    finished: bool
    """Whether all choices have ended. Always true for results of `LLM`."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    metrics: RequestMetrics
    """When it was queued, started and produced its tokens."""
    error: str | None = None
    """What went wrong, if a finish reason is `error`."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each token of the prompt, the token and the most likely ones; None for the first token,
    and None altogether unless asked for. Of deltas, the first has it."""

    def raise_for_error(self) -> None:
        """Raises what went wrong with the request, if a finish reason is `error`.

        Raises:
            DeadlineExceededError: its deadline passed.
            CbrsError: anything else, such as a step that failed.
        """
        if self.error is not None:
            raise request_error(self.error)

    @classmethod
    def refused(
        cls,
        prompt: str | None,
        prompt_token_ids: list[int],
        num_choices: int,
        error: str,
        time_s: float,
    ) -> RequestOutput:
        """Builds the result of a request that was refused at `time_s`; it has no id."""
        choices = [
            CompletionOutput(index=index, text="", token_ids=[], finish_reason="error")
            for index in range(num_choices)
        ]
        return cls(
            request_id="",
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=choices,
            finished=True,
            num_cached_tokens=0,
            metrics=RequestMetrics.from_times(time_s, None, None, time_s, []),
            error=error,
        )

    @classmethod
    def from_finished(
        cls, finished: FinishedRequest, prompt: str | None, texts: TokenTexts
    ) -> RequestOutput:
        """Builds the result from what the output processor hands over."""
        prompt_logprobs = finished.prompt_logprobs
        return cls(
            request_id=str(finished.request_id),
            prompt=prompt,
            prompt_token_ids=finished.prompt_token_ids.tolist(),
            outputs=[_completion(choice, texts) for choice in finished.outputs],
            finished=True,
            num_cached_tokens=finished.num_cached_tokens,
            metrics=_metrics(finished),
            error=finished.error,
            prompt_logprobs=None
            if prompt_logprobs is None
            else [None, *to_dicts(prompt_logprobs, texts)],
        )


def _completion(choice: FinishedChoice, texts: TokenTexts) -> CompletionOutput:
    logprobs = choice.logprobs
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids.tolist(),
        cumulative_logprob=choice.cumulative_logprob,
        logprobs=None if logprobs is None else to_dicts(logprobs, texts),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )


def _metrics(finished: FinishedRequest) -> RequestMetrics:
    latencies: list[float] = []
    for choice in finished.outputs:
        latencies += choice.inter_token_latencies_s.tolist()
    return RequestMetrics.from_times(
        finished.arrival_time_s,
        finished.first_scheduled_time_s,
        finished.first_token_time_s,
        finished.finished_time_s,
        latencies,
    )
