"""What a simulation saw: one record per request, per step and per output token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .workload import SECOND_NS, Int64Array, Stream

Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
NEVER = -1


class Requests:
    """One entry per request, streams one after the other; `NEVER` = it has not happened.

    Times are virtual nanoseconds; steps are numbers of plans.
    """

    def __init__(self, streams: list[Stream]) -> None:
        num_requests = sum(map(len, streams))

        def never() -> Int64Array:
            return np.full(num_requests, NEVER, dtype=np.int64)

        self.stream: Int64Array = np.repeat(np.arange(len(streams)), list(map(len, streams)))
        self.num_prompt_tokens = np.concatenate([each.num_prompt_tokens for each in streams])
        self.length = np.concatenate([each.num_output_tokens for each in streams])
        self.submitted_ns = never()
        # Plans made before the request was submitted, and the plan with its first chunk.
        self.submitted_step = never()
        self.first_step = never()
        self.last_step = never()
        self.first_planned_ns = never()
        self.first_token_ns = never()
        self.ended_ns = never()
        self.num_tokens: Int64Array = np.zeros(num_requests, dtype=np.int64)
        # Most steps between two in which it ran, without and with losing its row in between.
        self.longest_pause: Int64Array = np.zeros(num_requests, dtype=np.int64)
        self.longest_absence: Int64Array = np.zeros(num_requests, dtype=np.int64)
        self.is_expired: BoolArray = np.zeros(num_requests, dtype=np.bool_)
        # The first time that it came, and when it was told to come again.
        self.refused_ns = never()
        self.promised_ns = never()
        self.is_refused_again: BoolArray = np.zeros(num_requests, dtype=np.bool_)

    def of(self, stream: int) -> Int64Array:
        """Indices of the requests of a stream."""
        return np.flatnonzero(self.stream == stream)


@dataclass
class Steps:
    """One entry per step that ran something."""

    start_ns: list[int] = field(default_factory=list)
    duration_ns: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_seqs: list[int] = field(default_factory=list)
    num_held_rows: list[int] = field(default_factory=list)
    watched: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class Run:
    """The records of a simulation; `event_*` have one entry per output token, in order of time."""

    streams: list[Stream]
    requests: Requests
    steps: Steps
    event_request: Int64Array
    event_ns: Int64Array
    end_ns: int
    stats: dict[str, int | float]
    refusal_ns: Int64Array

    def stream(self, name: str) -> int:
        """Number of a stream."""
        return [stream.name for stream in self.streams].index(name)

    def of(self, name: str) -> Int64Array:
        """Indices of the requests of a stream."""
        return self.requests.of(self.stream(name))

    def ttft_s(self, indices: Int64Array) -> Float64Array:
        """Seconds from submission to first token of those that have one."""
        first = self.requests.first_token_ns[indices]
        seconds: Float64Array = (first - self.requests.submitted_ns[indices]) / SECOND_NS
        has_one: BoolArray = first != NEVER
        return seconds[has_one]

    def first_chunk_steps(self, indices: Int64Array) -> Int64Array:
        """Steps planned from submission to the first chunk, that one included; those that ran."""
        first = self.requests.first_step[indices]
        waited: Int64Array = first - self.requests.submitted_step[indices]
        has_one: BoolArray = first != NEVER
        return waited[has_one]

    def gaps(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Nanoseconds between neighbouring tokens of a request, the request, and when it ended."""
        order = np.argsort(self.event_request, kind="stable")
        request, at = self.event_request[order], self.event_ns[order]
        is_same = request[1:] == request[:-1]
        return np.diff(at)[is_same], request[1:][is_same], at[1:][is_same]

    def itl_s(self, indices: Int64Array) -> Float64Array:
        """Seconds between neighbouring tokens of some requests."""
        gaps, request, _ = self.gaps()
        seconds: Float64Array = gaps / SECOND_NS
        return seconds[np.isin(request, indices)]

    def durations_s(self) -> Float64Array:
        """Seconds of each step."""
        return np.asarray(self.steps.duration_ns, dtype=np.float64) / SECOND_NS

    def output_tokens(self, name: str | None = None, from_ns: int = 0, until_ns: int = 0) -> int:
        """Output tokens of a stream (None = of all) from one time until another (0 = the end)."""
        is_inside = (self.event_ns > from_ns) & (self.event_ns <= (until_ns or self.end_ns))
        if name is not None:
            is_inside &= self.requests.stream[self.event_request] == self.stream(name)
        return int(np.count_nonzero(is_inside))

    def service(self, name: str, from_ns: int, until_ns: int) -> int:
        """Weighted service of a stream in a span of time: prompt tokens 1, output tokens 2."""
        requests = self.requests
        first = requests.first_token_ns
        of_stream = requests.stream == self.stream(name)
        is_inside = of_stream & (first > from_ns) & (first <= until_ns)
        num_prompt_tokens = int(requests.num_prompt_tokens[is_inside].sum())
        return num_prompt_tokens + 2 * self.output_tokens(name, from_ns, until_ns)

    def mean_over_time(self, values: list[int] | list[float], from_ns: int, until_ns: int) -> float:
        """Mean of a figure of each step, weighted by the steps' durations."""
        start = np.asarray(self.steps.start_ns)
        is_inside = (start >= from_ns) & (start < until_ns)
        weights = np.asarray(self.steps.duration_ns)[is_inside]
        return float(np.average(np.asarray(values)[is_inside], weights=weights))
