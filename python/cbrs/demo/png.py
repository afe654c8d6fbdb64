"""The picture as a PNG, drawn with matplotlib (extra `viz`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cbrs.demo.colours import decode_colour, prefill_colour
from cbrs.demo.timeline import PolicyRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _MUTED, _HOLE, _HOLE_LINE = "#1f2328", "#59636e", "#eceff2", "#c3cad1"
_BAR_HEIGHT = 0.78
# A label needs about this much of the width of the picture to be readable inside its bar.
_LABEL_SHARE = 0.014


def draw_png(runs: Sequence[PolicyRun], title: str, path: Path) -> None:
    """Draws one panel a run, on one scale, and writes the file.

    Raises `ImportError` without matplotlib.
    """
    # Figure and not pyplot: pyplot would pick a GUI back end and keep process-wide state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = max(run.max_num_seqs for run in runs)
    panel_height = max(1.6, 0.30 * rows + 0.5)
    figure = Figure(figsize=(12.5, 1.7 + len(runs) * (panel_height + 0.75)), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    end = max(len(run.iterations) for run in runs)
    for panel, run in zip(axes, runs, strict=True):
        _draw_panel(panel, run, end)
    axes[-1].set_xlabel("model iteration", color=_MUTED, fontsize=10)
    _decorate(figure, title)
    figure.savefig(path, dpi=130)


def _draw_panel(panel: "Axes", run: PolicyRun, end: int) -> None:
    _draw_holes(panel, run)
    for bar in run.bars():
        is_prefill = bar.phase == "prefill"
        panel.broken_barh(
            [(bar.first, bar.length)],
            (bar.row - _BAR_HEIGHT / 2, _BAR_HEIGHT),
            facecolors=prefill_colour(bar.request) if is_prefill else decode_colour(bar.request),
            edgecolors="white",
            linewidth=0.5,
        )
        if not is_prefill and bar.length >= _LABEL_SHARE * end:
            middle = bar.first + bar.length / 2
            panel.text(
                middle,
                bar.row,
                str(bar.request + 1),
                ha="center",
                va="center",
                fontsize=8,
                color=_INK,
            )
    _draw_arrivals(panel, run)
    panel.axvline(len(run.iterations), color=_MUTED, linewidth=1, linestyle=(0, (3, 2)))
    panel.set_xlim(0, end * 1.005)
    panel.set_ylim(run.max_num_seqs - 0.45, -1.35)
    panel.set_yticks(
        [-0.95, *range(run.max_num_seqs)],
        ["arrivals", *(f"slot {row}" for row in range(run.max_num_seqs))],
        fontsize=8,
        color=_MUTED,
    )
    panel.tick_params(length=0, labelcolor=_MUTED)
    for spine in panel.spines.values():
        spine.set_visible(False)
    panel.set_title(run.caption, loc="left", fontsize=11, color=_INK, pad=6)


def _draw_holes(panel: "Axes", run: PolicyRun) -> None:
    """Paints every slot as empty for the whole run; the bars then cover what was used."""
    for row in range(run.max_num_seqs):
        panel.broken_barh(
            [(0, len(run.iterations))],
            (row - _BAR_HEIGHT / 2, _BAR_HEIGHT),
            facecolors=_HOLE,
            edgecolors=_HOLE_LINE,
            hatch="////",
            linewidth=0,
        )


def _draw_arrivals(panel: "Axes", run: PolicyRun) -> None:
    for number, request in enumerate(run.requests):
        panel.plot(
            request.arrival_iteration,
            -0.95,
            marker="v",
            markersize=5,
            color=prefill_colour(number),
            markeredgewidth=0,
            clip_on=False,
        )


def _decorate(figure: "Figure", title: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure.suptitle(title, x=0.012, y=0.985, ha="left", fontsize=14, fontweight="bold", color=_INK)
    figure.legend(
        handles=[
            Patch(facecolor=prefill_colour(0), label="prefill (dark tone of the request's colour)"),
            Patch(facecolor=decode_colour(0), label="decode (light tone, with its number)"),
            Patch(
                facecolor=_HOLE, edgecolor=_HOLE_LINE, hatch="////", linewidth=0, label="empty slot"
            ),
            Line2D(
                [], [], marker="v", linestyle="", color=prefill_colour(0), label="request arrives"
            ),
        ],
        loc="lower left",
        bbox_to_anchor=(0.008, 0.0),
        ncols=4,
        frameon=False,
        fontsize=9,
        labelcolor=_MUTED,
    )
    figure.tight_layout(rect=(0.0, 0.045, 1.0, 0.985))
