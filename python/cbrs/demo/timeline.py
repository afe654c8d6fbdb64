"""What a demo run did, iteration by iteration, and the figures that follow from it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Work:
    """What one sequence did in one iteration."""

    row: int
    """Slot of the sequence, in `[0, max_num_seqs)`."""
    request: int
    """Index of the request in the workload."""
    num_tokens: int
    """Tokens that were run for it."""
    phase: Phase
    """`prefill` as long as prompt tokens are run, the last chunk included."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Consecutive iterations in which one slot did the same kind of work for one request."""

    row: int
    request: int
    phase: Phase
    first: int
    """First iteration, counted from 0."""
    length: int
    """Number of iterations."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When one request got its tokens."""

    arrival_iteration: int
    num_output_tokens: int
    num_cached_tokens: int
    time_to_first_token_s: float
    inter_token_latencies_s: list[float]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Median and tail of a set of durations, in milliseconds."""

    p50: float
    p99: float

    @classmethod
    def of_seconds(cls, durations_s: Iterable[float]) -> "Percentiles":
        """The percentiles of durations given in seconds; both 0 if there are none."""
        values_ms = np.fromiter(durations_s, dtype=np.float64) * 1e3
        if values_ms.size == 0:
            return cls(0.0, 0.0)
        p50, p99 = np.percentile(values_ms, [50, 99])
        return cls(float(p50), float(p99))

    def to_dict(self) -> dict[str, float]:
        """As in the JSON output."""
        return {"p50": round(self.p50, 3), "p99": round(self.p99, 3)}


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """The whole workload under one policy."""

    name: str
    """What it is called in the table and in the picture."""
    max_num_seqs: int
    iterations: list[list[Work]]
    """Per iteration, what each sequence in the batch did; an empty batch is no iteration."""
    requests: list[RequestTimes]
    """By index of the request in the workload."""
    duration_s: float

    @property
    def occupancy(self) -> float:
        """Sequence-steps that did work / (`max_num_seqs` x iterations), in [0, 1]."""
        worked = sum(len(iteration) for iteration in self.iterations)
        offered = self.max_num_seqs * len(self.iterations)
        return worked / offered if offered else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of all requests over the duration of the run."""
        tokens = sum(request.num_output_tokens for request in self.requests)
        return tokens / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def prefix_cache_hit_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache instead of being computed."""
        return sum(request.num_cached_tokens for request in self.requests)

    @property
    def time_to_first_token(self) -> Percentiles:
        """Over all requests, from arrival."""
        return Percentiles.of_seconds(request.time_to_first_token_s for request in self.requests)

    @property
    def inter_token_latency(self) -> Percentiles:
        """Over all pairs of consecutive tokens of all requests."""
        return Percentiles.of_seconds(
            latency for request in self.requests for latency in request.inter_token_latencies_s
        )

    @property
    def caption(self) -> str:
        """One line that gives the run's figures."""
        return (
            f"{self.name}: {self.occupancy:.1%} of the slot-steps busy, "
            f"{len(self.iterations)} iterations, "
            f"{self.output_tokens_per_s:.0f} output tokens/s, "
            f"first token after {self.time_to_first_token.p50 / 1e3:.1f} s (median)"
        )

    def to_dict(self) -> dict[str, object]:
        """As in the JSON output."""
        return {
            "occupancy": round(self.occupancy, 4),
            "iterations": len(self.iterations),
            "output_tokens_per_s": round(self.output_tokens_per_s, 2),
            "ttft_ms": self.time_to_first_token.to_dict(),
            "itl_ms": self.inter_token_latency.to_dict(),
            "prefix_cache_hit_tokens": self.prefix_cache_hit_tokens,
        }

    def bars(self) -> list[Bar]:
        """The work merged into bars, by slot and then by time: what a picture draws."""
        return [bar for row in range(self.max_num_seqs) for bar in self._bars_of_row(row)]

    def _bars_of_row(self, row: int) -> Iterator[Bar]:
        open_bar: Bar | None = None
        for index, iteration in enumerate(self.iterations):
            work = next((work for work in iteration if work.row == row), None)
            if open_bar is not None and work is not None and _continues(open_bar, work):
                open_bar = Bar(
                    row,
                    work.request,
                    work.phase,
                    open_bar.first,
                    open_bar.length + 1,
                    open_bar.num_tokens + work.num_tokens,
                )
                continue
            if open_bar is not None:
                yield open_bar
            open_bar = (
                None
                if work is None
                else Bar(row, work.request, work.phase, index, 1, work.num_tokens)
            )
        if open_bar is not None:
            yield open_bar


def _continues(bar: Bar, work: Work) -> bool:
    return (bar.request, bar.phase) == (work.request, work.phase)


def work_of_batch(
    row_ids: npt.NDArray[np.int32],
    requests: Iterable[int],
    query_start: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    num_prompt_tokens: Iterable[int],
) -> list[Work]:
    """Reads one batch's arrays; they are valid only until its commit, so values are copied."""
    num_tokens = np.diff(query_start)
    num_computed = seq_lens - num_tokens
    return [
        Work(row, request, count, "prefill" if computed < prompt else "decode")
        for row, request, count, computed, prompt in zip(
            row_ids.tolist(),
            requests,
            num_tokens.tolist(),
            num_computed.tolist(),
            num_prompt_tokens,
            strict=True,
        )
    ]
