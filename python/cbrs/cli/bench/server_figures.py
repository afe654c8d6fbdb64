"""The table of what the load generator measured."""

from __future__ import annotations

from typing import Any

_LATENCIES = {
    "ttft_ms": "time to first token",
    "itl_ms": "inter-token latency",
    "tpot_ms": "time per output token",
    "e2e_ms": "end-to-end latency",
    "refusal_ms": "time to refusal",
    "lag_ms": "lag of the client",
}
_COLUMNS = ("p50", "p90", "p99", "max")


def to_table(levels: list[dict[str, Any]], rate: float | None) -> list[list[str]]:
    """Rows of cells, a column a level; latencies that no level has are left out."""
    rows = [
        _row("load", levels, lambda level: _load(level, rate)),
        _row("requests", levels, lambda level: str(level["num_requests"])),
        _row("failed", levels, lambda level: str(level["num_failed"])),
        _row("responses by status", levels, _statuses),
        _row("duration, s", levels, lambda level: f"{level['duration_s']:.2f}"),
        _row("requests/s", levels, lambda level: f"{level['requests_per_s']:.2f}"),
        _row("output tokens/s", levels, lambda level: f"{level['output_tokens_per_s']:.1f}"),
        _row("total tokens/s", levels, lambda level: f"{level['total_tokens_per_s']:.1f}"),
    ]
    for name, meaning in _LATENCIES.items():
        if all(level[name] is None for level in levels):
            continue
        for column in _COLUMNS:
            cells = (level[name] and level[name][column] for level in levels)
            rows.append([f"{meaning} {column}, ms", *map(_cell, cells)])
    if any(level["num_retries"] for level in levels):
        rows.append(_row("retries", levels, lambda level: str(level["num_retries"])))
    rows.append(_row("connections", levels, lambda level: str(level["num_connections"])))
    if any(level["events_per_read"] for level in levels):
        rows.append(_row("events per read", levels, lambda level: _cell(level["events_per_read"])))
    rows.append(
        _row(
            "client, % of a core",
            levels,
            lambda level: f"{100 * level['client']['busiest_thread_cpu']:.0f}",
        )
    )
    return rows


def _row(name: str, levels: list[dict[str, Any]], cell: Any) -> list[str]:
    return [name, *map(cell, levels)]


def _load(level: dict[str, Any], rate: float | None) -> str:
    if level["concurrency"] is not None:
        return f"{level['concurrency']} clients"
    return "trace" if rate is None else f"{rate:g}/s"


def _statuses(level: dict[str, Any]) -> str:
    counts = level["statuses"].items()
    return ", ".join(f"{'none' if status == '0' else status}: {count}" for status, count in counts)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
