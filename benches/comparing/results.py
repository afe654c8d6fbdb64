"""From runs to figures, ratios, checks and a table."""

from __future__ import annotations

import statistics
from typing import Any

from policies.output import Check, Figures, at_least, at_most, rounded

OURS, OURS_HTTP = "cbrs", "cbrs_http"
# What the project wants at each number of clients, times the best peer with 16-bit weights.
THROUGHPUT_GOALS = {1: 1.1, 8: 1.25, 32: 1.25, 64: 1.25}
LATENCY_LEVELS = (32, 64)
ITL_GOAL, TTFT_GOAL = 0.5, 1.0

Results = dict[str, dict[str, Any]]
"""By contender: what it is, and `points`: figures by number of clients."""


def medians(runs: list[Figures]) -> Figures:
    """Of each figure the median, and all rates."""
    figures: Figures = {
        name: rounded(statistics.median(run[name] for run in runs)) for name in runs[0]
    }
    return {**figures, "runs_tokens_per_s": [rounded(run["tokens_per_s"]) for run in runs]}


def measured(results: Results, level: int) -> dict[str, Figures]:
    """Figures of those that have some at this number of clients."""
    return {
        name: result["points"][str(level)]
        for name, result in results.items()
        if str(level) in result.get("points", {})
    }


def ours_for(peer: str, points: dict[str, Figures], over_http: set[str]) -> Figures | None:
    """Figures of cbrs that were taken the same way as those of a peer."""
    return points.get(OURS_HTTP if peer in over_http else OURS)


def ratios(results: Results, levels: list[int], over_http: set[str]) -> dict[str, Figures]:
    """By peer and number of clients: tokens/s of cbrs to those of the peer, and latencies."""
    table: dict[str, Figures] = {}
    for level in levels:
        points = measured(results, level)
        for peer, figures in points.items():
            ours = ours_for(peer, points, over_http)
            if peer in (OURS, OURS_HTTP) or ours is None:
                continue
            table.setdefault(peer, {})[str(level)] = {
                name: rounded(ours[name] / figures[name]) if figures[name] else None
                for name in ("tokens_per_s", "itl_p99_ms", "ttft_p99_ms")
            }
    return table


def best_peers(results: Results, levels: list[int]) -> dict[str, str]:
    """By number of clients: the peer with the most tokens/s."""
    best = {}
    for level in levels:
        peers = {
            name: figures["tokens_per_s"]
            for name, figures in measured(results, level).items()
            if name not in (OURS, OURS_HTTP)
        }
        if peers:
            best[str(level)] = max(peers, key=peers.__getitem__)
    return best


def checks(results: Results, levels: list[int], over_http: set[str]) -> list[Check]:
    """The goals, for the levels that have one and at which a peer was measured."""
    table, best = ratios(results, levels, over_http), best_peers(results, levels)
    entries = []
    for level in levels:
        of_level = {peer: row[str(level)] for peer, row in table.items() if str(level) in row}
        if not of_level:
            continue
        clients = f"{level} client{'s' if level > 1 else ''}"
        if goal := THROUGHPUT_GOALS.get(level):
            ratio = min(row["tokens_per_s"] for row in of_level.values())
            entries.append(at_least(f"{clients}: tokens/s to the best peer's", ratio, "", goal))
        fastest = of_level.get(best[str(level)])
        if level in LATENCY_LEVELS and fastest:
            names = {"itl_p99_ms": ("ITL p99", ITL_GOAL), "ttft_p99_ms": ("TTFT p99", TTFT_GOAL)}
            for key, (name, limit) in names.items():
                if fastest[key] is not None:
                    entry = at_most(
                        f"{clients}: {name} to that of the peer with the most tokens/s",
                        fastest[key],
                        "",
                        limit,
                    )
                    entries.append(entry)
    return entries


def table(results: Results, levels: list[int], labels: dict[str, str], over_http: set[str]) -> str:
    """Tokens/s (cbrs to the peer), then TTFT and ITL as p50/p99 in ms, as a Markdown table."""
    header = ["output tokens/s (cbrs to it) · TTFT p50/p99 · ITL p50/p99, ms"]
    header += [f"{level} client{'s' if level > 1 else ''}" for level in levels]
    rows = [header, ["---"] * len(header)]
    factors = ratios(results, levels, over_http)
    for name, result in results.items():
        label = f"{labels[name]} {result.get('version', '')}".strip()
        problem = {key: result[key] for key in ("absent", "failed") if key in result}
        reason = "; ".join(f"{key}: {value}" for key, value in problem.items())
        points = result.get("points", {})
        cells = [
            _cell(points[str(level)], factors.get(name, {}).get(str(level)))
            if str(level) in points
            else reason
            for level in levels
        ]
        rows.append([label, *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell(figures: Figures, factors: Figures | None) -> str:
    factor = f" ({factors['tokens_per_s']:.2f}x)" if factors else ""
    latencies = (
        f"{figures[f'{kind}_p50_ms']:.3g}/{figures[f'{kind}_p99_ms']:.3g}"
        for kind in ("ttft", "itl")
    )
    return f"{figures['tokens_per_s']:.4g}{factor} · " + " · ".join(latencies)
