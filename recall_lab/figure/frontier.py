"""The recall–memory frontier: accuracy versus the size of the state, by mechanism."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recall_lab.figure import base, legends, style
from recall_lab.figure.coverage import BUDGET, CELL, CONVOLUTION, law, windows
from recall_lab.results import SCORES, average

PUBLISHED = {
    "gla": [(4.8e3, 0.53), (18e3, 0.77), (68e3, 0.95)],
    "mamba2": [(8e3, 0.52), (98e3, 0.84)],
    "delta_rule": [(9e3, 0.79), (34e3, 0.96), (133e3, 0.995)],
    "gated_delta": [(17e3, 0.89), (67e3, 0.988)],
    "based": [(9e3, 0.67), (80e3, 0.985)],
}
"""Mechanism → (elements of the state, mean accuracy over PUBLISHED_CELLS), read off the recall–memory figure of Zoology
(Arora et al., arXiv 2312.04927) to within .02."""

PUBLISHED_CELLS = {(8192, 64, 4), (8192, 64, 8), (8192, 64, 16), (8192, 128, 32), (8192, 256, 64), (8192, 512, 128),
                   (8192, 1024, 256)}  # fmt: skip
"""(vocabulary, length, pairs) of the cells that the published points are averaged over."""


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("frontier_TASK", figure) where a mechanism was trained with several sizes of its state: the accuracy per
    scored token (R² if targets are continuous), averaged over the tested cells, versus the number of elements of the
    state at the end of the longest sequence.

    One line per series, over d_key or, where it varies, over the budget of a cache; only cells in which all runs were
    tested count. Bars: interval over seeds. Thin lines: the coverage law of one layer with a sliding window on mqar, if
    a pair is read at the position of its value, and if it is read as late as the short convolution allows. Hollow
    markers: published results, shown if the cells are the same.
    """
    if "state_elements" not in set(table["metric"]):
        return
    own = table[(table["split"] == "test") & (table["trained_as"].isna() if "trained_as" in table else True)]
    for task, part in own.groupby("task"):
        rows = _shared(part[part["metric"].isin(SCORES)])
        elements = part[part["metric"] == "state_elements"].groupby("run")["value"].max()
        rows = rows.assign(elements=rows["run"].map(elements)).dropna(subset="elements")
        if rows.empty:
            continue
        rows = _by_size(rows)
        points = average(rows, ["series", "elements"])
        if (points.groupby("series")["elements"].nunique() > 1).any():
            chance = part.loc[part["metric"] == "chance", "value"]
            yield f"frontier_{task}", _figure(str(task), rows, points, None if chance.empty else float(chance.max()))


def _shared(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the cells that every run was tested in: means over different cells could not be compared."""
    cells = [name for name in rows if name.startswith("task.")]
    if rows.empty or not cells:
        return rows
    return rows[rows.groupby(cells, dropna=False)["run"].transform("nunique") == rows["run"].nunique()]


def _by_size(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with series named without what varies the size of the state: the budget, or else the width."""
    parts = []
    for _, own in rows.groupby("mixer"):
        varied = BUDGET in own and own[BUDGET].nunique() > 1
        parts.append(base.along(own, BUDGET) if varied else base.by_width(own))
    return pd.concat(parts)


def _figure(task: str, rows: pd.DataFrame, points: pd.DataFrame, chance: float | None) -> Figure:
    looks = style.looks(points["series"])
    laws = {name: found for name in looks if not (found := _coverage(rows[rows["series"] == name])).empty}
    published = {name: PUBLISHED[style.mechanism(name)] for name in looks if style.mechanism(name) in PUBLISHED}
    published = published if _cells(rows) == PUBLISHED_CELLS else {}
    notes = [base.replicates(points, "bars"), *(["thin: coverage law of a window"] if laws else []),
             *(["hollow: published"] if published else [])]  # fmt: skip
    note = "\n".join(notes)
    parts = base.blocks(looks)
    height = max(2.8, *(legends.height(part, note) for part in parts))
    longest = f" at n = {rows['task.length'].max():g}" if "task.length" in rows else ""
    count = len(rows.drop_duplicates([name for name in rows if name.startswith("task.")]))
    with style.style():
        made, axes = style.grid(len(parts), 1, height * len(parts), sharex=True, sharey=True)
        for ax, names in zip(axes[:, 0], parts, strict=True):
            style.lines(ax, points, "elements", {name: looks[name] for name in names})
            for name in names:
                for end in ("early", "late") if name in laws else ():
                    ax.plot(laws[name]["elements"], laws[name][end], color=looks[name].colour, linewidth=0.8)
                for x, y in published.get(name, ()):
                    ax.plot(x, y, color=looks[name].colour, marker=looks[name].marker, fillstyle="none")
            _axes(ax, points["elements"], chance)
            average_over = f"mean over {count} cells" if count > 1 else "one cell"
            ax.set_ylabel(f"{'R²' if (rows['metric'] == 'r2').any() else 'accuracy per scored token'}\n{average_over}")
            legends.series(ax, {name: name for name in names}, looks, note)
        axes[-1, 0].set_xlabel(f"state size (elements){longest}")
        made.suptitle(f"{task}: recall and size of the state")
    return made


def _axes(ax: Axes, elements: pd.Series, chance: float | None) -> None:
    low, high = np.log2([elements.min(), elements.max()])
    style.log2_axis(ax, 2.0 ** np.arange(np.floor(low), np.ceil(high) + 1))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    style.accuracy_axis(ax, chance)


def _cells(rows: pd.DataFrame) -> set[tuple[float, ...]]:
    """(vocabulary, length, pairs) of every tested cell, where the task has these parameters."""
    names = ["task.vocab", "task.length", "task.pairs"]
    return set(rows[names].itertuples(index=False, name=None)) if set(names) <= set(rows) else set()


def _coverage(rows: pd.DataFrame) -> pd.DataFrame:
    """The coverage law between the smallest and the largest budget of a series: columns elements, early, late (see
    `coverage.law`), averaged over its cells. Empty where the law does not apply."""
    rows = windows(rows)
    if rows.empty:
        return pd.DataFrame()
    known = rows.groupby(BUDGET)["elements"].first()
    sizes = np.unique(np.geomspace(known.index.min(), known.index.max(), 40).round())
    cells = rows[[*CELL, CONVOLUTION]].drop_duplicates().to_dict("records")
    means = [np.mean([law({**cell, BUDGET: w}) for cell in cells], axis=0) for w in sizes]
    # The state grows by the same amount with every token of the cache.
    elements = np.interp(sizes, known.index, known)
    return pd.DataFrame({"elements": elements, "early": np.array(means)[:, 0], "late": np.array(means)[:, 1]})
