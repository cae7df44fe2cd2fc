"""Sliding windows on mqar: measured accuracy against the coverage law, which has no free parameter."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from recall_lab.figure import base, legends, style
from recall_lab.figure.coverage import BUDGET, CELL, CONVOLUTION, law, windows
from recall_lab.results import summarise


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("window_coverage", figure) for one-layer models with a sliding window on mqar. Top: accuracy over the
    window size w, with the coverage law. Bottom: accuracy versus the law. One column per width of the convolution.

    The law: an answer is correct if the window covers its pair; otherwise it is guessed among V/2 values. A pair can be
    read at the position of the value or, through a convolution of width c, up to c − 2 positions later. A trained model
    is therefore between the law at w and the law at w + c − 2 (band). Bars: interval over seeds.
    """
    table = windows(table)
    if table.empty:
        return
    points = summarise(base.along(table, BUDGET, CONVOLUTION), ["series", CONVOLUTION, BUDGET, *CELL], ("accuracy",))
    if points.empty or points[BUDGET].nunique() < 2:
        return
    groups = points.groupby(["series", CONVOLUTION])
    columns = sorted(groups, key=lambda group: (style.rank(group[0][0]), group[0][1]))
    cells = points[CELL].drop_duplicates().sort_values(CELL)
    colours = dict(zip(cells.itertuples(index=False, name=None), style.shades(len(cells)), strict=True))
    with style.style():
        made, axes = style.grid(2, len(columns), 4.6, sharey=True)
        for (above, below), ((series, width), part) in zip(axes.T, columns, strict=True):
            _column(above, below, part, colours)
            title = f"short convolution of width c = {width:.0f}"
            above.set_title(title if points["series"].nunique() == 1 else f"{series}\n{title}")
        for ax in axes[:, 0]:
            ax.set_ylabel("accuracy per scored token")
        handles = [
            Line2D([], [], color=colour, marker="o", linestyle="none", label=f"n = {cell[1]:.0f}, {cell[2]:.0f} pairs")
            for cell, colour in colours.items()
        ]
        note = f"lines: the law at w\nbands: up to w + c − 2\npoints: {base.replicates(points, 'bars')}"
        legends.add(axes[0, -1], handles, note)
    yield "window_coverage", made


def _column(above: Axes, below: Axes, part: pd.DataFrame, colours: dict[tuple[float, ...], style.Colour]) -> None:
    """Draws the two panels of one width of the convolution: accuracy and law over w, and accuracy versus the law."""
    for cell, colour in colours.items():
        own = part[(part[CELL] == list(cell)).all(axis=1)].sort_values(BUDGET)
        if own.empty:
            continue
        facts = dict(zip(CELL, cell, strict=True)) | {CONVOLUTION: own[CONVOLUTION].iloc[0]}
        sizes = np.unique(np.geomspace(own[BUDGET].min(), own[BUDGET].max(), 40).round())
        early, late = np.array([law(facts | {BUDGET: w}) for w in sizes]).T
        above.plot(sizes, early, color=colour, linewidth=1)
        above.fill_between(sizes, early, late, color=colour, alpha=0.18, linewidth=0)
        error = [own["mean"] - own["low"], own["high"] - own["mean"]]
        expected = [law(facts | {BUDGET: w})[0] for w in own[BUDGET]]
        for ax, x in ((above, own[BUDGET]), (below, expected)):
            ax.errorbar(x, own["mean"], error, color=colour, marker="o", markersize=3.5, linestyle="none", capsize=2)
    below.axline((0, 0), slope=1, color="0.5", linewidth=1, zorder=0)
    style.length_axis(above, part[BUDGET])
    above.set_xlabel("window w (tokens)")
    below.set_xlabel("coverage law at w")
    for ax in (above, below):
        style.accuracy_axis(ax)
