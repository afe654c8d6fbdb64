"""How the plots of these benches look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

OURS, OTHER, THIRD, FOURTH = "#c0392b", "#2c6fbb", "#7f8c8d", "#27874a"
GOAL = {"color": "#444444", "linewidth": 1.0, "linestyle": "--"}


@contextmanager
def figure(
    path: Path, num_rows: int, num_columns: int, title: str, width: float = 5.2, height: float = 3.8
) -> Iterator[Any]:
    """A grid of axes, `[num_rows, num_columns]`, written to `path` at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (width * num_columns, height * num_rows + 0.4)
    drawing, axes = pyplot.subplots(num_rows, num_columns, figsize=size, dpi=150, squeeze=False)
    drawing.suptitle(title)
    yield axes
    for each in axes.flat:
        each.grid(True, which="major", alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
        if each.get_legend_handles_labels()[0]:
            each.legend(frameon=False, fontsize=8)
    drawing.tight_layout()
    drawing.savefig(path)
    pyplot.close(drawing)


def plain_ticks(axis: Any) -> None:
    """A logarithmic axis with ticks at 1, 2 and 5, written as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def distribution(axes: Any, values: Any, label: str, color: str) -> None:
    """The part of values at or above each value, so that tails are seen."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    share = 1 - np.arange(len(ordered)) / max(1, len(ordered))
    axes.step(ordered, share, where="post", label=label, color=color, linewidth=1.8)
