"""Error against top-1: the memory with the smaller error need not be the one that answers right more often."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import style
from recall_lab.results import average

LEAST = 0.01
"""Errors below this are drawn here."""


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """One path a series as pairs are added, error on x and top-1 on y; a panel a key width. Up and left is better."""
    rows = style.readings(table)
    if rows.empty:
        return
    widths = sorted(rows["oracle.d_key"].unique())
    with style.style():
        shown = style.alike(rows, ["metric", "oracle.d_key", "pairs"])
        made, axes = style.figure(
            3.4 * len(widths) + 1.4, style.beside(3.9, shown), ncols=len(widths), squeeze=False, sharey=True
        )
        for ax, width in zip(axes[0], widths, strict=True):
            part = rows[rows["oracle.d_key"] == width]
            top1, error = (average(part[part["metric"] == metric], ["series", "pairs"]) for metric in ("top1", "error"))
            both = top1.merge(error, on=["series", "pairs"], suffixes=("_top1", "_error")).sort_values("pairs")
            twice = 2 * width
            for name in shown:
                line = both[both["series"] == name]
                colour, marker = style.look(name)
                x = line["mean_error"].clip(lower=LEAST)
                ax.plot(x, line["mean_top1"], color=colour, linewidth=1, alpha=0.55)
                at = line["pairs"] == twice
                ax.scatter(x[~at], line["mean_top1"][~at], s=9, color=colour, marker=marker, linewidths=0.8)
                ax.scatter(x[at], line["mean_top1"][at], s=70, color=colour, marker=marker, linewidths=1.2, zorder=3)
            ax.set_xscale("log")
            style.accuracy_axis(ax)
            ax.set_xlim(LEAST / 1.3, None)
            ax.set_xlabel("squared error of the read-out")
            ax.set_title(f"d_key = {width:.0f}; large: {twice:.0f} pairs")
        axes[0][0].set_ylabel("top-1 of the read-out")
        style.legend(made, shown, f"pairs grow along a path;\nerrors below {LEAST:g} stand at the edge")
    yield "error_vs_top1", made
