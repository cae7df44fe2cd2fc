"""Static sparse caches: recall versus the share B/n of the tokens that a query attends to, by policy."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from recall_lab.figure import base, legends, style
from recall_lab.results import average
from recall_lab.theory import budget

BY_QUERY = {"softmax", "top_k", "paged"}
"""Mechanisms that choose tokens by the query; all other policies are blind to it."""

BUDGET = "mixer.budget"
Dashes = Literal["-", "--", ":"]
PANELS = ("trained softmax weights", "trained with the policy")


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("static_sparse_TASK", figure) where several policies were measured at several shares: accuracy over B/n.

    Left: on the weights of trained softmax models (probe policies). Right: models trained with a policy, at the largest
    length, with softmax at B = n and linear attention at its state's size as a share of softmax's. One row per cell.
    Solid: the query chooses among the tokens kept. Dashed: blind to the query. Thin: B/n, the share of equally likely
    pairs that B tokens hold, plus chance on the rest. A short convolution lets several tokens hold a pair.
    """
    if not {"task.length", "task", "metric"} <= set(table):
        return
    for task, rows in table[table["task.length"].notna()].groupby("task"):
        rows = _filled(rows)
        panels = {title: found for title, found in zip(PANELS, (_on_weights(rows), _trained(rows)), strict=True)
                  if found["x"].nunique() > 1}  # fmt: skip
        if panels:
            chance = rows.loc[rows["metric"] == "chance", "value"].max()
            yield f"static_sparse_{task}", _figure(str(task), panels, float(chance))


def _filled(table: pd.DataFrame) -> pd.DataFrame:
    """The table, with "all" where a parameter of the task is null in some cells only: a cell of its own, not a gap."""
    gaps = [name for name in table if str(name).startswith("task.") and 0 < table[name].count() < len(table)]
    return table.assign(**{str(name): table[name].map(_word) for name in gaps})


def _word(value: object) -> str:
    if isinstance(value, float | int):
        return "all" if value != value else f"{value:g}"
    return "all" if value is None else str(value)


def _on_weights(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the probe policies; x is B/n."""
    rows = table[table["metric"] == "policy_accuracy"]
    if rows.empty:
        return rows.assign(x=0.0)
    rows = base.along(rows)
    several = rows["series"].nunique() > 1
    names = rows["policy"] + (" on " + rows["series"] if several else "")
    return rows.assign(series=names, x=rows["share"])


def _trained(table: pd.DataFrame) -> pd.DataFrame:
    """The scores of models trained with one of several policies, of softmax and of linear attention; x is B/n."""
    tested = table[table["split"] == "test"]
    tested = tested[tested["trained_as"].isna()] if "trained_as" in tested else tested
    rows = tested[tested["metric"] == "accuracy"]
    if BUDGET not in rows or rows.loc[rows[BUDGET].notna(), "mixer"].nunique() < 2:
        return rows[:0].assign(x=0.0)
    rows = rows[rows["task.length"] == rows.loc[rows[BUDGET].notna(), "task.length"].max()]
    size = tested[tested["metric"] == "state_elements"].groupby(["run", "mixer", "task.length"])["value"].max()
    own = pd.Series(size.reindex(rows.set_index(["run", "mixer", "task.length"]).index).to_numpy(), rows.index)
    whole = own[rows["mixer"] == "softmax"].max()
    x = (rows[BUDGET] / rows["task.length"]).clip(upper=1)
    x = x.mask(rows["mixer"] == "softmax", 1.0).mask(rows["mixer"] == "linear", own / whole)
    rows = base.by_width(rows.assign(x=x)[x.notna()], BUDGET)
    mechanisms = rows["series"].map(style.mechanism)
    alone = rows.groupby(mechanisms)["series"].transform("nunique") == 1
    return rows.assign(series=rows["series"].mask(alone, mechanisms))


def _figure(task: str, panels: dict[str, pd.DataFrame], chance: float) -> Figure:
    rows = pd.concat(panels.values())
    cells = base.free(rows, ["series", "x"])
    points = {title: average(part, ["series", "x", *cells]) for title, part in panels.items()}
    every = pd.concat(points.values())
    looks, facets = style.looks(every["series"]), list(base.facets(every, cells))
    law = f"thin: B/n of the pairs held,\nthe rest guessed\nat chance, {chance:.2g} (dotted)"
    note = f"{base.replicates(every, 'bars')}\n{law}"
    handles = _legend(looks)
    height = max(2.4, legends.height([str(one.get_label()) for one in handles], note))
    with style.style():
        made, axes = style.grid(len(facets), len(panels), height * len(facets), sharey=True)
        for column, (title, found) in zip(axes.T, points.items(), strict=True):
            parts = base.facets(found, cells)
            for ax, cell in zip(column, facets, strict=True):
                _panel(ax, parts.get(cell, found[:0]), looks, chance)
                ticks = sorted(every.loc[every["series"].map(style.mechanism) != "linear", "x"].unique())
                style.log2_axis(ax, ticks)
                ax.set_xticks(ticks, [str(Fraction(tick).limit_denominator(1024)) for tick in ticks])
                ax.set_title(f"{title}\n{cell}" if cell else title, fontsize="medium")
            column[-1].set_xlabel("share B/n attended to")
        for ax in axes[:, 0]:
            ax.set_ylabel("accuracy per scored token")
        legends.add(axes[0, -1], handles, note)
        made.suptitle(f"{task}: a small share, or blind to the query?")
    return made


def _panel(ax: Axes, points: pd.DataFrame, looks: dict[str, style.Look], chance: float) -> None:
    share = np.geomspace(points["x"].min(), 1, 100) if len(points) else np.ones(1)
    style.lines(ax, points, "x", looks)
    for line in ax.lines:
        line.set_linestyle(_dashes(str(line.get_label())))
    ax.plot(share, budget.static_recall(share, 1, 1 / chance), color="0.5", linewidth=0.8, zorder=1)
    style.accuracy_axis(ax, chance)


def _dashes(series: str) -> Dashes:
    """Solid where the query chooses, dotted for linear attention, dashed for policies that are blind to the query."""
    name = style.mechanism(series)
    return "-" if name in BY_QUERY else ":" if name == "linear" else "--"


def _legend(looks: dict[str, style.Look]) -> list[Line2D]:
    """Handles of the legend: the series, in groups under their titles."""
    groups: dict[Dashes, str] = {
        "-": "the query chooses",
        "--": "blind to the query",
        ":": "a state, at its share of softmax's",
    }
    handles = []
    for dashes, title in groups.items():
        names = [name for name in looks if _dashes(name) == dashes]
        handles += [Line2D([], [], linestyle="none", label=title)] if names else []
        handles += [legends.line(looks[name], name, dashes) for name in names]
    return handles
