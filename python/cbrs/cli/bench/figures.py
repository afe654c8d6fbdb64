"""What clients saw of one load, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class ClientTimes:
    """When one request was sent and when its tokens reached the client, in seconds of one clock."""

    num_prompt_tokens: int
    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Time and number of tokens of each output that had any."""
    error: str | None = None
    """Why the request failed; its times are then in no figure."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens that arrived."""
        return sum(count for _, count in self.arrivals)

    @property
    def time_to_first_token_s(self) -> float:
        """From sending to the first token."""
        return self.arrivals[0][0] - self.sent_s

    @property
    def end_to_end_latency_s(self) -> float:
        """From sending to the last token."""
        return self.arrivals[-1][0] - self.sent_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean time from one token to the next; None with fewer than two tokens."""
        num_gaps = self.num_output_tokens - 1
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / num_gaps if num_gaps > 0 else None

    def inter_token_latencies_s(self) -> list[float]:
        """From each token to the next; 0 between tokens that arrived together."""
        gaps: list[float] = []
        last_s: float | None = None
        for time_s, count in self.arrivals:
            gaps += ([] if last_s is None else [time_s - last_s]) + [0.0] * (count - 1)
            last_s = time_s
        return gaps


@dataclass(frozen=True, slots=True)
class Level:
    """All requests of one concurrency."""

    concurrency: int
    duration_s: float
    """From sending the first request to the end of the last."""
    requests: list[ClientTimes]

    @property
    def succeeded(self) -> list[ClientTimes]:
        """The requests that ended well and produced something: the ones that count."""
        return [request for request in self.requests if request.error is None and request.arrivals]

    @property
    def errors(self) -> list[str]:
        """What failed."""
        return [request.error for request in self.requests if request.error is not None]

    @property
    def requests_per_s(self) -> float:
        """Requests that ended well, over the duration."""
        return len(self.succeeded) / self.duration_s

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of requests that ended well, over the duration."""
        return sum(request.num_output_tokens for request in self.succeeded) / self.duration_s

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and output tokens of requests that ended well, over the duration."""
        num_prompt_tokens = sum(request.num_prompt_tokens for request in self.succeeded)
        return num_prompt_tokens / self.duration_s + self.output_tokens_per_s

    @property
    def latencies_ms(self) -> dict[str, dict[str, float]]:
        """Mean and percentiles of each latency, in milliseconds, by its name."""
        done = self.succeeded
        tpot = (request.time_per_output_token_s for request in done)
        return {
            "ttft": _summary(request.time_to_first_token_s for request in done),
            "itl": _summary(gap for request in done for gap in request.inter_token_latencies_s()),
            "tpot": _summary(value for value in tpot if value is not None),
            "e2e": _summary(request.end_to_end_latency_s for request in done),
        }

    def to_dict(self) -> dict[str, Any]:
        """As in the JSON output."""
        latencies = {f"{name}_ms": values for name, values in self.latencies_ms.items()}
        return {
            "concurrency": self.concurrency,
            "num_requests": len(self.requests),
            "num_failed": len(self.errors),
            "num_prompt_tokens": sum(request.num_prompt_tokens for request in self.succeeded),
            "num_output_tokens": sum(request.num_output_tokens for request in self.succeeded),
            "duration_s": round(self.duration_s, 4),
            "requests_per_s": round(self.requests_per_s, 4),
            "output_tokens_per_s": round(self.output_tokens_per_s, 3),
            "total_tokens_per_s": round(self.total_tokens_per_s, 3),
            **latencies,
        }


def to_table(levels: list[Level]) -> list[list[str]]:
    """Rows of cells, a column a level; the first column names the figures."""
    latencies = [level.latencies_ms for level in levels]
    rows = [
        ["concurrency", *(str(level.concurrency) for level in levels)],
        ["requests", *(str(len(level.requests)) for level in levels)],
        ["requests/s", *(f"{level.requests_per_s:.2f}" for level in levels)],
        ["output tokens/s", *(f"{level.output_tokens_per_s:.1f}" for level in levels)],
        ["total tokens/s", *(f"{level.total_tokens_per_s:.1f}" for level in levels)],
    ]
    for name, meaning in _MEANINGS.items():
        for percentile in PERCENTILES:
            key = f"p{percentile}"
            cells = [_cell(values[name].get(key)) for values in latencies]
            rows.append([f"{meaning} {key}, ms", *cells])
    return rows


_MEANINGS = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end-to-end latency",
}


def _cell(value_ms: float | None) -> str:
    return "-" if value_ms is None else f"{value_ms:.1f}"


def _summary(durations_s: Iterable[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds; empty if there is nothing to summarise."""
    values_ms = np.fromiter(durations_s, dtype=np.float64) * 1e3
    if values_ms.size == 0:
        return {}
    percentiles = np.percentile(values_ms, PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, percentiles, strict=True)}
    return {
        name: round(value, 3) for name, value in {"mean": float(values_ms.mean()), **named}.items()
    }
