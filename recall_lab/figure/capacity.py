"""Capacity: top-1 and error of the read-out of random pairs versus their number, measured and predicted."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from recall_lab.figure import base, laws, legends, style
from recall_lab.results import average

LABELS = {"top1": "top-1 of the read-out", "error": "squared error / ‖v‖²"}


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("capacity", figure) if the table has keyed read-outs of the oracle (state_retention).

    Top-1 and error over pairs/d_key, one column per d_key. Points: mean over seeds; bars: interval; solid lines:
    closed form where one exists (see `laws`), else dotted lines join the points. Series that are equal everywhere share
    a line.
    """
    rows = laws.readings(table)
    if rows.empty:
        return
    widths = sorted(rows["oracle.d_key"].unique().tolist())
    shown = base.alike(rows, ["metric", "oracle.d_key", "pairs"])
    looks = style.looks(shown)
    points = average(rows, ["series", "metric", "oracle.d_key", "pairs"])
    among = " or ".join(f"{value:.0f}" for value in sorted(rows["oracle.candidates"].unique().tolist()))
    title = f"points: {base.replicates(points, 'bars')}\n{among} candidates\nsolid lines: theory\ndotted: no theory"
    parts = base.blocks(shown)
    height = max(3.6, *(legends.height([shown[name] for name in part], title) for part in parts))
    with style.style():
        made, axes = style.grid(2 * len(parts), len(widths), height * len(parts), sharex=True, sharey="row")
        for block, part in enumerate(parts):
            for row, metric in zip(axes[2 * block : 2 * block + 2], LABELS, strict=True):
                for ax, width in zip(row, widths, strict=True):
                    here = (points["metric"] == metric) & (points["oracle.d_key"] == width)
                    for name in part:
                        line = points[here & (points["series"] == name)].sort_values("pairs")
                        if not line.empty:
                            law = laws.of_equal(rows[rows["oracle.d_key"] == width], shown[name])
                            _series(ax, line, law, metric, looks[name], width)
                    _axes(ax, points.loc[here, "pairs"] / width, metric)
                row[0].set_ylabel(LABELS[metric])
                if metric == "error":
                    row[0].set_ylim(bottom=-0.01)  # when all columns are drawn: they share the axis
            labels = {name: shown[name] for name in part}
            legends.series(axes[2 * block, -1], labels, looks, title)
        for ax, width in zip(axes[0], widths, strict=True):
            ax.set_title(f"d_key = {width:.0f}")
        for ax in axes[-1]:
            ax.set_xlabel("pairs / d_key")
    yield "capacity", made


def _series(ax: Axes, line: pd.DataFrame, law: laws.Law | None, metric: str, look: style.Look, width: float) -> None:
    """Draws points with bars and the closed form; without one, a dotted line joins the points."""
    x = line["pairs"] / width
    n = np.unique(np.geomspace(line["pairs"].min(), line["pairs"].max(), 24).astype(int))
    found = [law.mean(metric, count) for count in n.tolist()] if law else []
    predicted = [value for value in found if value is not None]
    ax.plot(
        x, line["mean"], color=look.colour, marker=look.marker, markersize=3.5, clip_on=False,
        linestyle="none" if predicted else ":", linewidth=1,
    )  # fmt: skip
    ax.vlines(x, line["low"], line["high"], color=look.colour, linewidth=0.8)
    if predicted:
        ax.plot(n / width, predicted, color=look.colour, linewidth=0.9, zorder=1.5)


def _axes(ax: Axes, load: pd.Series, metric: str) -> None:
    """x: pairs/d_key, on a log₂ axis with ticks at powers of two. y: top-1 from 0 to 1, or error, linear below 0.1."""
    ax.set_xscale("log", base=2)
    if len(load):
        ax.xaxis.set_major_locator(FixedLocator(sorted(2.0 ** np.unique(np.round(np.log2(load))))))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(_label))
    if metric == "top1":
        style.accuracy_axis(ax)
    else:
        ax.set_yscale("symlog", linthresh=0.1, linscale=0.4)
        ax.yaxis.set_major_locator(FixedLocator([0, 0.1, 0.3, 1, 3, 10]))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.axvline(1, color="0.85", linewidth=1, zorder=0)


def _label(load: float, _: int | None = None) -> str:
    """The text at powers of four: 1/4, 1, 4."""
    if round(np.log2(load)) % 2:
        return ""
    return f"{load:g}" if load >= 1 else f"1/{1 / load:g}"
