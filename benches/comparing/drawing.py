"""Plots of `serving.py` and `compare_serving.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policies import plots
from policies.output import Figures

from .kinds import LABELS, OF_CBRS, OVER_HTTP, QUANTIZED
from .results import Results

COLOURS = ["#2c6fbb", "#27874a", "#8e5ea2", "#d08a1d", "#7f8c8d", "#444444"]
PANELS = {
    "tokens_per_s": "output tokens/s",
    "ttft_p99_ms": "time to first token, p99, ms",
    "itl_p99_ms": "time between tokens, p99, ms",
}


def clients_axis(axes: Any, levels: list[int]) -> None:
    """Numbers of clients as powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [str(level) for level in levels])
    axes.set_xlabel("clients")


def comparison(results: Results, bounds: Figures, title: str, path: Path) -> None:
    """Throughput and latencies over the number of clients, a line for each engine.

    `bounds` are the most tokens/s by number of clients, if they are known.
    """
    shown = {name: result for name, result in results.items() if result.get("points")}
    colours = iter(COLOURS * 2)
    styles: dict[str, dict[str, Any]] = {}
    for name in shown:
        ours = name in OF_CBRS
        styles[name] = {"color": plots.OURS if ours else next(colours)}
        styles[name]["linewidth"] = 2.6 if ours else 1.6
        styles[name]["linestyle"] = "--" if name in OVER_HTTP else "-"
        styles[name]["marker"] = "s" if name in QUANTIZED else "o"
    with plots.figure(path, 1, len(PANELS), title, 4.4, 3.8) as axes:
        for panel, (key, label) in zip(axes[0], PANELS.items(), strict=True):
            for name, result in shown.items():
                levels = [int(level) for level in result["points"]]
                values = [point[key] for point in result["points"].values()]
                # Static batches have tokens without anything in between.
                text = f"{LABELS[name]} {result['version']}"
                panel.plot(levels, values, label=text, **styles[name])
            every = sorted({int(level) for one in shown.values() for level in one["points"]})
            clients_axis(panel, every)
            panel.set_title(label, fontsize=10)
            if key == "tokens_per_s":
                if bounds:
                    levels = [int(level) for level in bounds]
                    style = {"color": "#999999", "linestyle": ":", "linewidth": 1.4}
                    panel.plot(levels, list(bounds.values()), label="bound, 16 bits", **style)
                panel.set_ylim(bottom=0)
            else:
                panel.set_yscale("log")
                plots.plain_ticks(panel.yaxis)


def batching(points: Figures, title: str, path: Path) -> None:
    """Why batching pays: tokens/s, and bytes of weights that are read for each token."""
    levels = [int(level) for level in points]
    rates = [point["tokens_per_s"] for point in points.values()]
    megabytes = [point["weight_bytes_per_token"] / 1e6 for point in points.values()]
    with plots.figure(path, 1, 2, title, 4.6, 3.6) as axes:
        left, right = axes[0]
        left.plot(levels, rates, marker="o", color=plots.OURS, linewidth=2.2)
        left.set_ylim(bottom=0)
        left.set_title("output tokens/s", fontsize=10)
        right.plot(levels, megabytes, marker="o", color=plots.OTHER, linewidth=2.2)
        if all(megabytes):
            right.set_yscale("log")
            plots.plain_ticks(right.yaxis)
        right.set_title("MB of weights read for each output token", fontsize=10)
        for panel in (left, right):
            clients_axis(panel, levels)
