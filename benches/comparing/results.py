"""From runs to figures, ratios, checks and a table."""

from __future__ import annotations

import statistics
from typing import Any

from policies.output import Check, Figures, at_least, at_most, rounded

from .kinds import INT8, LABELS, OF_CBRS, OURS, QUANTIZED, twin_for

# What the project wants at each number of clients, times the best peer: of those with 16-bit
# weights for `cbrs`, of all for `cbrs_int8`.
THROUGHPUT_GOALS = {
    OURS: {1: 1.1, 8: 1.25, 32: 1.25, 64: 1.25},
    INT8: {1: 1.3, 8: 1.4, 32: 1.5, 64: 1.6},
}
LATENCY_LEVELS = (32, 64)
ITL_GOAL, TTFT_GOAL = 0.5, 1.0
BOUND_GOAL = 0.85

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


def ratios(results: Results, levels: list[int], mode: str = OURS) -> dict[str, Figures]:
    """By peer and number of clients: tokens/s of cbrs to those of the peer, and latencies.

    Cbrs in a mode (`cbrs`, `cbrs_int8`) is held against a peer the way that peer is measured.
    """
    table: dict[str, Figures] = {}
    for level in levels:
        points = measured(results, level)
        for peer in peers_of(mode, points):
            ours, figures = points.get(twin_for(mode, peer)), points[peer]
            if ours is not None:
                table.setdefault(peer, {})[str(level)] = {
                    name: rounded(ours[name] / figures[name]) if figures[name] else None
                    for name in ("tokens_per_s", "itl_p99_ms", "ttft_p99_ms")
                }
    return table


def peers_of(mode: str, points: dict[str, Figures]) -> list[str]:
    """Those that cbrs in this mode is held against, of those that have figures."""
    left_out = OF_CBRS | (QUANTIZED if mode == OURS else frozenset())
    return [name for name in points if name not in left_out]


def parts_of_fastest(results: Results, level: int) -> dict[str, float]:
    """By peer: its tokens/s to those of the fastest peer, with 16-bit weights if it has such.

    So the best peer of each mode of cbrs is never far behind, and cbrs itself is no part of it.
    """
    points = measured(results, level)
    parts = {}
    for mode in (INT8, OURS):
        rates = {name: points[name]["tokens_per_s"] for name in peers_of(mode, points)}
        parts |= {name: rate / max(rates.values()) for name, rate in rates.items()}
    return parts


def best_peers(results: Results, levels: list[int], mode: str = OURS) -> dict[str, str]:
    """By number of clients: the peer with the most tokens/s."""
    best = {}
    for level in levels:
        points = measured(results, level)
        peers = {name: points[name]["tokens_per_s"] for name in peers_of(mode, points)}
        if peers:
            best[str(level)] = max(peers, key=peers.__getitem__)
    return best


def checks(results: Results, levels: list[int], bounds: Figures | None = None) -> list[Check]:
    """The goals, for the modes and levels that have one and at which a peer was measured.

    `bounds` are the tokens/s of `cbrs` at most, by number of clients.
    """
    entries = []
    for mode in THROUGHPUT_GOALS:
        for level in levels:
            entries += _checks_of_level(results, level, mode)
    for level, bound in (bounds or {}).items():
        if ours := measured(results, int(level)).get(OURS):
            name = f"{_clients(int(level))}: tokens/s to the bound of the same run (aim)"
            entries.append(at_least(name, ours["tokens_per_s"] / bound, "", BOUND_GOAL))
    return entries


def _checks_of_level(results: Results, level: int, mode: str) -> list[Check]:
    of_level = {peer: row[str(level)] for peer, row in ratios(results, [level], mode).items()}
    if not of_level:
        return []
    best = best_peers(results, [level], mode)[str(level)]
    prefix = f"{LABELS[mode]}, {_clients(level)}"
    entries = []
    if goal := THROUGHPUT_GOALS[mode].get(level):
        ratio = min(row["tokens_per_s"] for row in of_level.values())
        entries.append(at_least(f"{prefix}: tokens/s to the best peer's", ratio, "", goal))
    fastest = of_level.get(best)
    if level in LATENCY_LEVELS and fastest:
        names = {"itl_p99_ms": ("ITL p99", ITL_GOAL), "ttft_p99_ms": ("TTFT p99", TTFT_GOAL)}
        for key, (name, limit) in names.items():
            if fastest[key] is not None:
                shown = f"{prefix}: {name} to that of the peer with the most tokens/s"
                entries.append(at_most(shown, fastest[key], "", limit))
    return entries


def _clients(level: int) -> str:
    return f"{level} client{'s' if level > 1 else ''}"


def table(results: Results, levels: list[int]) -> str:
    """Tokens/s (cbrs to the peer), then TTFT and ITL as p50/p99 in ms, as a Markdown table.

    Beside a quantized peer stands the ratio of `cbrs_int8`, if that was measured.
    """
    header = ["output tokens/s (cbrs to it) · TTFT p50/p99 · ITL p50/p99, ms"]
    header += [_clients(level) for level in levels]
    rows = [header, ["---"] * len(header)]
    factors = ratios(results, levels, INT8) | ratios(results, levels, OURS)
    for name, result in results.items():
        label = f"{LABELS[name]} {result.get('version', '')}".strip()
        problem = {key: result[key] for key in ("absent", "failed", "left_out") if key in result}
        reason = "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in problem.items())
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
