"""Top-1 versus error: the mechanism with the smaller error does not always recall more pairs."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter

from recall_lab.figure import base, laws, legends, style
from recall_lab.results import average

LEAST = 0.01
"""Smaller errors are drawn at this value."""


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("error_vs_top1", figure) if the table has keyed read-outs of the oracle: one path per series as the
    number of pairs grows, error on x and top-1 on y, one panel per d_key. Up and to the left is better."""
    rows = laws.readings(table)
    if rows.empty:
        return
    widths = sorted(rows["oracle.d_key"].unique().tolist())
    shown = base.alike(rows, ["metric", "oracle.d_key", "pairs"])
    looks = style.looks(shown)
    at = ["series", "oracle.d_key", "pairs"]
    top1, error = (average(rows[rows["metric"] == metric], at) for metric in ("top1", "error"))
    both = top1.merge(error, on=at, suffixes=("_top1", "_error")).sort_values("pairs")
    title = "along a path: more pairs\nlarge marker: 2 d_key pairs\n"
    title += f"errors below {LEAST:g}: at the left edge\npoints: {base.replicates(top1)}"
    parts = base.blocks(shown)
    height = max(2.6, *(legends.height([shown[name] for name in part], title) for part in parts))
    with style.style():
        made, axes = style.grid(len(parts), len(widths), height * len(parts), sharex=True, sharey=True)
        for row, part in zip(axes, parts, strict=True):
            for ax, width in zip(row, widths, strict=True):
                for name in part:
                    line = both[(both["series"] == name) & (both["oracle.d_key"] == width)]
                    _path(ax, line, looks[name], 2 * width)
                ax.set_xscale("log")
                ax.xaxis.set_major_locator(FixedLocator([0.01, 0.1, 1, 10]))
                ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                style.accuracy_axis(ax)
                ax.set_xlim(LEAST / 1.3, None)
                ax.set_title(f"d_key = {width:.0f}")
            row[0].set_ylabel("top-1 of the read-out")
            legends.series(row[-1], {name: shown[name] for name in part}, looks, title)
        for ax in axes[-1]:
            ax.set_xlabel("squared error / ‖v‖²")
    yield "error_vs_top1", made


def _path(ax: Axes, line: pd.DataFrame, look: style.Look, marked: float) -> None:
    """Draws the path, with a larger marker at `marked` pairs."""
    x, y = line["mean_error"].clip(lower=LEAST), line["mean_top1"]
    ax.plot(x, y, color=look.colour, linewidth=1, alpha=0.55)
    large = line["pairs"] == marked
    ax.scatter(x[~large], y[~large], s=6, color=look.colour, marker=look.marker, linewidths=0.8)
    ax.scatter(x[large], y[large], s=36, color=look.colour, marker=look.marker, linewidths=1, zorder=3)
