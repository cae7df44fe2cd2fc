"""Learning rate: validation accuracy over the rates that were tried, with the chosen one of each series marked."""

from collections.abc import Iterable, Iterator, Mapping

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import Transform

from recall_lab.figure import base, legends, style
from recall_lab.results import rates

EVERY_RUN = True
"""The figure shows the runs that lost the selection, too."""

MARKS = {False: ("o", "chosen"), True: ("s", "chosen, at the edge\nof the grid")}
"""Whether the chosen rate is at the edge of its grid → the frame around its point, and its label."""


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("learning_rate_TASK", figure) per task with several learning rates: the validation score of each series,
    mean over cells, one panel per ten series.

    Bars: interval over seeds; series are shifted sideways a little, so that each can be seen. Framed: the rate that
    `results.select` chooses; by a square where it is the lowest or highest of its grid, so that a better rate may lie
    beyond it.
    """
    for task, points in rates(table).groupby("task"):
        looks = style.looks(points["series"])
        parts = base.blocks(looks)
        note = base.replicates(points, "bars")
        continuous = bool((table.loc[table["task"] == task, "metric"] == "r2").any())
        marks = sorted(set(points.loc[points["chosen"], "edge"].tolist()))
        labels = [MARKS[edge][1] for edge in marks]
        height = max(2.3, *(legends.height([*names, *labels], note) for names in parts))
        with style.style():
            made, axes = style.grid(len(parts), 1, height * len(parts), sharex=True, sharey=True)
            for ax, names in zip(axes[:, 0], parts, strict=True):
                own = points[points["series"].isin(names)]
                shifts = style.lines(ax, own, "train.lr", {name: looks[name] for name in names})
                _frames(ax, own, looks, shifts)
                _axis(ax, points["train.lr"])
                if not continuous:
                    style.accuracy_axis(ax)
                ax.set_ylabel(f"validation {'R²' if continuous else 'accuracy'}, mean over cells")
                legends.add(ax, _handles(names, looks, marks), note)
            axes[-1, 0].set_xlabel("learning rate (train.lr)")
            axes[0, 0].set_title(f"{task}: accuracy by learning rate")
        yield f"learning_rate_{task}", made


def _frames(ax: Axes, points: pd.DataFrame, looks: Mapping[str, style.Look], shifts: Mapping[str, Transform]) -> None:
    """Frames the chosen rate of each series in the colour of the series."""
    columns = ["series", "train.lr", "mean", "edge"]
    for name, rate, mean, edge in points.loc[points["chosen"], columns].itertuples(index=False):
        frame = _frame(edge, looks[name].colour, [rate], [mean])
        ax.add_line(frame).set_transform(shifts[name])


def _frame(edge: bool, colour: style.Colour, x: list[float], y: list[float]) -> Line2D:
    marker, label = MARKS[edge]
    return Line2D(
        x, y, marker=marker, markersize=8, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1.2,
        linestyle="none", label=label, clip_on=False,
    )  # fmt: skip


def _axis(ax: Axes, values: pd.Series) -> None:
    """A logarithmic axis with a tick at each rate."""
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(sorted(values.unique())))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _handles(names: list[str], looks: Mapping[str, style.Look], marks: Iterable[bool]) -> list[Artist]:
    lines = [legends.line(looks[name], name) for name in names]
    return [*lines, *(_frame(edge, (0.2, 0.2, 0.2), [], []) for edge in marks)]
