"""Panels of scores over one parameter, for several figures."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recall_lab.figure import base, legends, style
from recall_lab.results import summarise

LENGTH = "task.length"
PANELS = 12
"""Most panels per figure."""
ACROSS = 3
"""Most panels per row."""


def draw_panels(subject: str, axis: str, panels: dict[str, pd.DataFrame], averaged: Sequence[str] = ()) -> Figure:
    """The scores on test data over the column `axis`, one line per series, with intervals over seeds as bars.

    subject   what the title says before "accuracy over …"
    panels    title of a panel → its rows: scores of all splits, chance, and sizes of the state
    averaged  parameters that are averaged over, which the title names
    """
    everything = pd.concat(panels.values())
    points = pd.concat(summarise(rows, ["series", axis]) for rows in panels.values())
    looks = style.looks(points["series"])
    labels = _labels(everything, list(looks))
    label = axis.removeprefix("task.")
    note = f"{base.replicates(points, 'bars')}\ndotted: chance\nin brackets: state size (elements)"
    parts = base.blocks(looks)
    lines = -(-len(panels) // ACROSS)
    columns = -(-len(panels) // lines)
    height = max(2.0 * lines, *(legends.height(part, note) for part in parts))
    continuous = (everything["metric"] == "r2").any()
    with style.style():
        made, axes = style.grid(lines * len(parts), columns, height * len(parts) + 0.2, sharey=True)
        for ax in axes.flat:
            ax.set_axis_off()
        for block, names in enumerate(parts):
            rows = axes[block * lines : (block + 1) * lines]
            for ax, (title, part) in zip(rows.flat, panels.items(), strict=False):
                ax.set_axis_on()
                _panel(ax, part, axis, {name: looks[name] for name in names})
                ax.set_title(title.replace(", ", "\n"), fontsize="medium", pad=14)
            used = [ax for ax in rows.flat if ax.axison]
            style.same_range(used)
            for ax in used[:-columns]:  # the panel below has the same label
                ax.set_xlabel("")
            for ax in rows[:, 0]:
                ax.set_ylabel("R²" if continuous else "accuracy per scored token")
            legends.series(rows[0, -1], {name: labels[name] for name in names}, looks, note)
        mean = f", mean over {' and '.join(averaged)}" if averaged else ""
        made.suptitle(f"{subject}: {'R²' if continuous else 'accuracy'} over {label}{mean}")
    return made


def _labels(part: pd.DataFrame, names: list[str]) -> dict[str, str]:
    """Series → label with the size of its state at the longest sequence, and that length if the size varies."""
    state = part[(part["metric"] == "state_elements") & (part["split"] == "test")]
    labels = {}
    for name in names:
        own = state[state["series"] == name]
        if own.empty:
            labels[name] = name
        elif LENGTH in own and own["value"].nunique() > 1:
            longest = own.loc[own[LENGTH].idxmax()]
            labels[name] = f"{name} ({longest['value']:,.0f} at n = {longest[LENGTH]:.0f})"
        else:
            labels[name] = f"{name} ({own['value'].iloc[0]:,.0f})"
    return labels


def _panel(ax: Axes, part: pd.DataFrame, axis: str, looks: dict[str, style.Look]) -> None:
    """Draws accuracy over the axis for the series in `looks`; shaded: values in training; dotted: chance."""
    points = summarise(part, ["series", axis])
    style.lines(ax, points, axis, looks)
    trained = part.loc[part["split"] == "validation", axis].dropna()
    if axis == LENGTH:
        style.length_axis(ax, points[axis], trained)
    else:
        style.number_axis(ax, points[axis], axis.removeprefix("task.").replace("_", " "), trained)
    chance = part.loc[(part["metric"] == "chance") & (part["split"] == "test"), "value"].max()
    if (part["metric"] == "r2").any():
        chance = 0.0
    style.accuracy_axis(ax, None if pd.isna(chance) else float(chance))
