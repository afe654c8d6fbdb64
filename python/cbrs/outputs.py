"""What `LLM.generate` returns, in the shape that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cbrs._core import FinishedRequest

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished output of a request."""

    index: int
    """Number of the choice; always 0 as long as each request has one."""
    text: str
    """The generated text, without the token or string that ended it."""
    token_ids: list[int]
    """The generated ids, the one that ended the output included."""
    finish_reason: FinishReason
    """`error` means that the step which computed it failed; see `RequestOutput.error`."""
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
    """From submission to the first token."""
    total_time_s: float
    """From submission to the end."""
    inter_token_latencies_s: list[float] = field(default_factory=list)
    """From each token to the next: one entry less than there are tokens."""

    @property
    def mean_inter_token_latency_s(self) -> float | None:
        """Mean of `inter_token_latencies_s`; None with fewer than two tokens."""
        latencies = self.inter_token_latencies_s
        return sum(latencies) / len(latencies) if latencies else None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one request."""

    request_id: str
    """The core's id of the request, as it stands in `Batch.request_ids`."""
    prompt: str | None
    """The prompt text; None if token ids were given."""
    prompt_token_ids: list[int]
    """The prompt as token ids."""
    outputs: list[CompletionOutput]
    """The generated outputs."""
    finished: bool
    """Always true for results of `LLM`."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    metrics: RequestMetrics
    """When it was queued, started and produced its tokens."""
    error: str | None = None
    """What went wrong, if the finish reason is `error`."""

    @classmethod
    def from_finished(cls, finished: FinishedRequest, prompt: str | None) -> RequestOutput:
        """Builds the result from what the output processor hands over."""
        output = finished.outputs[0]
        completion = CompletionOutput(
            index=output.index,
            text=output.text,
            token_ids=output.token_ids.tolist(),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
        return cls(
            request_id=str(finished.request_id),
            prompt=prompt,
            prompt_token_ids=finished.prompt_token_ids.tolist(),
            outputs=[completion],
            finished=True,
            num_cached_tokens=finished.num_cached_tokens,
            metrics=_metrics(finished),
            error=finished.error,
        )


def _metrics(finished: FinishedRequest) -> RequestMetrics:
    arrival = finished.arrival_time_s

    def since_arrival(time_s: float | None) -> float | None:
        return None if time_s is None else time_s - arrival

    return RequestMetrics(
        arrival_time_s=arrival,
        queue_time_s=since_arrival(finished.first_scheduled_time_s),
        time_to_first_token_s=since_arrival(finished.first_token_time_s),
        total_time_s=finished.finished_time_s - arrival,
        inter_token_latencies_s=finished.outputs[0].inter_token_latencies_s.tolist(),
    )
