"""The plot of a sweep: throughput against latency, drawn with matplotlib (extra `viz`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cbrs.cli.common import InputError
from cbrs.demo.colours import decode_colour, prefill_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from cbrs.cli.bench.figures import Level

_INK, _MUTED, _GRID = "#1f2328", "#59636e", "#e4e8ec"
_SUFFIXES = (".png", ".svg", ".pdf")
_PANELS = {"itl": "inter-token latency", "ttft": "time to first token"}
_COLOURS = {"itl": 1, "ttft": 0}
# A latency that spans more than this factor is drawn on a logarithmic axis.
_MAX_LINEAR_SPAN = 12.0


def check_plot(path: Path) -> None:
    """Finds out before the measurement whether the plot can be drawn after it.

    Raises:
        InputError: no such folder, or a kind of file that is not drawn.
        ImportError: the extra `viz` is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(f"--plot {path}: give a file that ends in {', '.join(_SUFFIXES)}")
    if not path.parent.is_dir():
        raise InputError(f"--plot {path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError('a plot needs matplotlib: pip install "cbrs[viz]"') from error


def draw_plot(levels: Sequence[Level], subtitle: str, path: Path) -> None:
    """Draws output tokens per second against two latencies, a point a level, and writes the file.

    A level without any finished request is left out.
    """
    # Figure and not pyplot: pyplot would pick a GUI back end and keep process-wide state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 5.2), facecolor="white")
    axes = figure.subplots(1, len(_PANELS), sharey=True)
    for panel, name in zip(axes, _PANELS, strict=True):
        _draw_panel(panel, levels, name)
    axes[0].set_ylabel("output tokens/s, all clients", color=_MUTED, fontsize=10)
    _decorate(figure, subtitle)
    figure.savefig(path, dpi=140)


def _draw_panel(panel: Axes, levels: Sequence[Level], name: str) -> None:
    drawn = [(level, level.latencies_ms[name]) for level in levels]
    drawn = [(level, latency) for level, latency in drawn if latency]
    medians = [latency["p50"] for _, latency in drawn]
    tails = [latency["p99"] for _, latency in drawn]
    rates = [level.output_tokens_per_s for level, _ in drawn]
    dark, light = prefill_colour(_COLOURS[name]), decode_colour(_COLOURS[name])
    panel.hlines(rates, medians, tails, color=light, linewidth=2.5, zorder=2)
    panel.plot(tails, rates, linestyle="", marker="|", markersize=9, color=light, zorder=2)
    panel.plot(medians, rates, color=dark, linewidth=1.6, zorder=3)
    panel.plot(medians, rates, "o", color=dark, markersize=7, markeredgecolor="white", zorder=4)
    for (level, _), median, rate in zip(drawn, medians, rates, strict=True):
        panel.annotate(
            str(level.concurrency),
            (median, rate),
            xytext=(-7, 7),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=_INK,
        )
    _style(panel, name, [*medians, *tails], max(rates, default=1.0))


def _style(panel: Axes, name: str, values: Sequence[float], max_rate: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = min(values, default=1.0), max(values, default=1.0)
    if low > 0 and high / low > _MAX_LINEAR_SPAN:
        panel.set_xscale("log")
        panel.set_xlim(low / 1.6, high * 1.3)
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.xaxis.set_minor_formatter(NullFormatter())
    else:
        panel.set_xlim(0, high * 1.08)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    panel.set_ylim(0, max_rate * 1.14)
    panel.set_title(_PANELS[name], loc="left", fontsize=11, color=_INK, pad=8)
    panel.set_xlabel("milliseconds", color=_MUTED, fontsize=10)
    panel.grid(color=_GRID, linewidth=0.8, which="major")
    panel.set_axisbelow(True)
    panel.tick_params(length=0, labelcolor=_MUTED, labelsize=9, which="both")
    for side, spine in panel.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_MUTED)


def _decorate(figure: Figure, subtitle: str) -> None:
    figure.suptitle(
        "Throughput against latency",
        x=0.012,
        y=0.98,
        ha="left",
        fontsize=14,
        fontweight="bold",
        color=_INK,
    )
    figure.text(0.012, 0.9, subtitle, ha="left", fontsize=10, color=_MUTED)
    figure.text(
        0.012,
        0.022,
        "Numbers: clients in a closed loop. Points: medians; their lines end at the 99th "
        "percentile. Up and to the left is better.",
        ha="left",
        fontsize=9,
        color=_MUTED,
    )
    figure.tight_layout(rect=(0.0, 0.055, 1.0, 0.91), w_pad=2.5)
