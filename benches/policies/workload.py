"""Streams of requests: when they arrive, how long they are, and what they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .profiles import MAX_OUTPUT_TOKENS, MEDIAN_OUTPUT_TOKENS, NUM_PROMPT_TOKENS

Int64Array = npt.NDArray[np.int64]
SECOND_NS = 1_000_000_000
# Of the logarithm of the outputs' lengths.
OUTPUT_SIGMA = 0.7


@dataclass
class Stream:
    """Requests of one sort, all with the same parameters; arrays have one entry per request.

    Open loop: `arrival_ns` says when each is submitted. Closed loop: `num_in_flight` are submitted
    at the start and another one whenever one of them ends; `arrival_ns` is not looked at. The
    scheduler knows `max_tokens`, of all or of each; the simulated model ends each request after its
    `num_output_tokens`.
    """

    name: str
    arrival_ns: Int64Array
    num_output_tokens: Int64Array
    num_prompt_tokens: Int64Array
    max_tokens: int | Int64Array | None = MAX_OUTPUT_TOKENS
    num_in_flight: int = 0
    parameters: Mapping[str, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.arrival_ns)


def output_lengths(
    random: np.random.Generator,
    num_requests: int,
    median: float = MEDIAN_OUTPUT_TOKENS,
    at_most: int = MAX_OUTPUT_TOKENS,
) -> Int64Array:
    """Log-normal around `median`, from 1 to `at_most`."""
    lengths = median * np.exp(OUTPUT_SIGMA * random.standard_normal(num_requests))
    return np.clip(lengths.round(), 1, at_most).astype(np.int64)


def poisson(
    random: np.random.Generator, rate: float, from_s: float = 0.0, until_s: float = 0.0
) -> Int64Array:
    """Arrival times in nanoseconds, `rate` per second from `from_s` until `until_s`."""
    expected = rate * (until_s - from_s)
    gaps = random.exponential(1 / rate, size=int(expected + 6 * expected**0.5 + 20))
    times = from_s + np.cumsum(gaps)
    assert times[-1] > until_s, "too few gaps were drawn"
    return (times[times < until_s] * SECOND_NS).astype(np.int64)


def open_loop(
    name: str,
    random: np.random.Generator,
    arrival_ns: Int64Array,
    *,
    median: float = MEDIAN_OUTPUT_TOKENS,
    max_tokens: int | None = MAX_OUTPUT_TOKENS,
    at_most: int = MAX_OUTPUT_TOKENS,
    **parameters: object,
) -> Stream:
    """Prompts of 256 tokens that arrive at given times; `parameters` are those of `submit`."""
    return Stream(
        name,
        arrival_ns,
        output_lengths(random, len(arrival_ns), median, at_most),
        np.full(len(arrival_ns), NUM_PROMPT_TOKENS, dtype=np.int64),
        max_tokens=max_tokens,
        parameters=parameters,
    )


def closed_loop(
    name: str,
    random: np.random.Generator,
    num_requests: int,
    num_in_flight: int,
    *,
    median: float = MEDIAN_OUTPUT_TOKENS,
    max_tokens: int | None = MAX_OUTPUT_TOKENS,
    **parameters: object,
) -> Stream:
    """Prompts of 256 tokens, always `num_in_flight` of them submitted and not ended."""
    arrival_ns = np.zeros(num_requests, dtype=np.int64)
    stream = open_loop(name, random, arrival_ns, median=median, max_tokens=max_tokens)
    stream.parameters = parameters
    stream.num_in_flight = num_in_flight
    return stream
