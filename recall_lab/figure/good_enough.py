"""Good enough: by task, how much more a growing state recalls than a fixed one."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recall_lab import results
from recall_lab.families import best, members
from recall_lab.figure import base, style

EVERY_TASK = True
MARGIN = 0.02
"""Half width of the grey band: differences that claim 7 calls good enough."""


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("good_enough", figure) if mechanisms of both families were trained on several tasks: the test score of
    the best mechanism with a growing state minus that of the best with a fixed state, by task; one point per cell of
    the trained range, the larger cells darker. Both are chosen by their mean validation score over these cells.

    Bars: interval over seeds, paired. Grey: differences of at most .02.
    """
    rows = table[table["metric"].isin(results.SCORES) & table["split"].isin(["validation", "test"])]
    compared = {str(task): found for task, part in rows.groupby("task") if (found := _compare(part)) is not None}
    if len(compared) < 2:
        return
    order = sorted(compared, key=lambda task: compared[task]["mean"].max())
    count = max(len(found) for found in compared.values())
    with style.style():
        made, axes = style.grid(1, 1, 0.42 * len(order) + 1, width=style.PAGE)
        ax = axes[0, 0]
        ax.axvspan(-MARGIN, MARGIN, color="0.9", zorder=0)
        ax.axvline(0, color="0.6", linewidth=1, zorder=1)
        for row, task in enumerate(order):
            _row(ax, row, compared[task], count)
        labels = [f"{task}\n{' − '.join(compared[task].attrs['names'])}" for task in order]
        ax.set_yticks(range(len(order)), labels, fontsize="small")
        ax.set_ylim(-0.6, len(order) - 0.4)
        ax.set_xlabel("test score of the best growing state − best fixed state")
        note = base.replicates(pd.concat(compared.values()), "bars")
        ax.set_title(
            f"{note}; grey: ±{MARGIN:g}\none point per cell of the trained range, dark: the largest", fontsize="small"
        )
    yield "good_enough", made


def _row(ax: Axes, row: int, points: pd.DataFrame, count: int) -> None:
    """The points of one task, one below the other in the order of their size."""
    colours = style.shades(count)[-len(points) :]
    for number, (colour, point) in enumerate(zip(colours, points.itertuples(), strict=True)):
        y = row + 0.5 * (0.5 - (number + 0.5) / len(points))
        ax.plot([point.low, point.high], [y, y], color=colour, linewidth=1.5, zorder=2)
        ax.plot([point.mean], [y], color=colour, marker="o", markersize=3.5, zorder=3)


def _compare(rows: pd.DataFrame) -> pd.DataFrame | None:
    """Columns mean, low, high, runs of the difference in each cell of the trained range, in the order of their length;
    the attribute "names" holds the two series. None where a family is missing."""
    validation, test = (rows[rows["split"] == split] for split in ("validation", "test"))
    names = [best(members(validation, family)) for family in ("growing", "fixed")]
    if None in names:
        return None
    cells = [name for name in validation if name.startswith("task.") and validation[name].notna().all()]
    cells.sort(key=lambda name: name != "task.length")
    keys = [*cells, *(name for name in results.REPLICATES if name in rows)]
    growing, fixed = (test[test["series"] == name].groupby(keys)["value"].mean() for name in names)
    difference = (growing - fixed).dropna()
    found = []
    for _, cell in validation[cells].drop_duplicates().sort_values(cells).iterrows():
        here = difference[[key[: len(cells)] == tuple(cell) for key in difference.index]]
        if len(here):
            found.append((here.mean(), *results.interval(here), len(here)))
    made = pd.DataFrame(found, columns=["mean", "low", "high", "runs"])
    made.attrs["names"] = names
    return None if made.empty else made
