"""Accuracy by a property of each answer: its age, its depth, the number of rebindings of its key."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recall_lab.figure import base, legends, style
from recall_lab.results import average

METRIC = "accuracy_by_"
VALUES = 16
"""Largest number of distinct values of a factor that are drawn as points of their own. More values, and fractional ones
such as means of bins, are binned: by half octaves of value + 1, or by tenths if no value exceeds 1."""

LAWS = {"rebindings": ("dashed: equal weight on all values of a key", lambda times: 1 / (1 + times))}
"""Factor → note in the legend, and closed form of the accuracy as a function of the factor."""


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("accuracy_by_FACTOR_TASK", figure) for every factor by which the probe retrieval split its answers.

    The answers of all test cells of a run are pooled, each with equal weight. Bars: interval, for points with at least
    `style.FEW` answers.
    """
    split = table[table["metric"].str.startswith(METRIC)]
    for (task, metric), rows in split.groupby(["task", "metric"]):
        factor = metric.removeprefix(METRIC)
        if factor in rows and rows[factor].notna().any():
            yield f"{metric}_{task}", _figure(f"{task}: accuracy by {factor}", rows, factor)


def _figure(title: str, rows: pd.DataFrame, factor: str) -> Figure:
    points = _pooled(rows, factor)
    looks = style.looks(points["series"])
    parts = base.blocks(looks)
    text, law = LAWS.get(factor, ("", None))
    note = "\n".join(filter(None, (base.replicates(points, "bars"), text)))
    height = max(2.3, *(legends.height(part, note) for part in parts))
    with style.style():
        made, axes = style.grid(len(parts), 1, height * len(parts), sharex=True)
        for ax, names in zip(axes[:, 0], parts, strict=True):
            style.lines(ax, points, factor, {name: looks[name] for name in names})
            _axes(ax, points[factor], factor)
            if law is not None:
                x = np.linspace(points[factor].min(), points[factor].max(), 200)
                ax.plot(x, law(x), color="0.4", linestyle="--", linewidth=1, zorder=1)
            legends.series(ax, {name: name for name in names}, looks, note)
        axes[0, 0].set_title(title)
    return made


def _pooled(rows: pd.DataFrame, factor: str) -> pd.DataFrame:
    """Accuracy per series and value or bin of the factor; the column `factor` holds the mean value in the bin."""
    values = rows[factor]
    integers = (values == values.round()).all()
    if values.nunique() <= VALUES and (integers or values.max() <= 1):
        level = values
    else:
        level = values.round(1) if values.max() <= 1 else np.floor(2 * np.log2(values.clip(lower=0) + 1))
    rows = rows.assign(level=level, right=rows["value"] * rows["count"], at=values * rows["count"])
    sums = base.totals(rows, ["run", "series", "level"], ["right", "count", "at"])
    points = average(sums.assign(value=sums["right"] / sums["count"]), ["series", "level"])
    total = sums.groupby(["series", "level"])[["at", "count"]].sum().reset_index()
    points = points.merge(total, on=["series", "level"])
    points[factor] = points["at"] / points["count"]
    few = points["count"] < style.FEW
    points.loc[few, ["low", "high"]] = np.nan
    return points


def _axes(ax: Axes, values: pd.Series, factor: str) -> None:
    positive = values.min() > 0 and values.max() >= 8 * values.min()
    if positive:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        ax.xaxis.set_major_locator(MaxNLocator(integer=bool(values.max() > 1)))
    ax.set_xlabel({"age": "age (tokens from the answer's position to the query)"}.get(factor, factor))
    ax.set_ylabel("accuracy per scored token")
    style.accuracy_axis(ax)
