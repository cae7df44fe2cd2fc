"""Retrieval: accuracy over the sequence length, and over every other numeric parameter of the task that varies."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recall_lab.figure import base, legends, style
from recall_lab.results import SCORES, summarise

LENGTH = "task.length"
PANELS = 12
"""Most panels per figure. With more, accuracy is averaged over some parameters, which the title names."""
ACROSS = 3
"""Most panels per row."""


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("retrieval_TASK", figure) per task: accuracy per scored token (R² if targets are continuous) over n; and
    ("retrieval_TASK_by_PARAMETER", figure) for every numeric parameter that varies at one length: pairs, depth, data …
    Of several tasks, ("retrieval", figure) shows those in which nothing but the length varies, one panel per task.

    One line per series, with the intervals over seeds as bars; one panel per combination of the other parameters that
    vary. The legend gives the number of elements of the state at the longest sequence.
    """
    scored = table[table["metric"].isin(SCORES) & (table["split"] == "test")]
    alone: dict[str, pd.DataFrame] = {}
    for task in sorted(set(scored["task"])):
        part = table[(table["task"] == task) & table["metric"].isin((*SCORES, "chance", "state_elements"))]
        test = scored[scored["task"] == task]
        numbers = [name for name in test if name.startswith("task.") and _is_number(test[name])]
        has_length = LENGTH in numbers
        if has_length:
            part, test = part[part[LENGTH].notna()], test[test[LENGTH].notna()]
            varied = [name for name in base.free(test, [LENGTH]) if name in numbers]
        else:
            varied = [name for name in numbers if test[name].nunique() > 1]
        if has_length and (test[LENGTH].nunique() > 1 or not varied):
            yield f"retrieval_{task}", _over_length(str(task), part, test, varied)
            if not base.free(test, [LENGTH]) and not (test["metric"] == "r2").any():
                alone[str(task)] = part
        for name in varied:
            if (made := _over(str(task), part, test, name)) is not None:
                yield f"retrieval_{task}_by_{name.removeprefix('task.')}", made
    if 1 < len(alone) <= PANELS:
        yield "retrieval", _figure("retrieval", LENGTH, alone, [])


def _is_number(column: pd.Series) -> bool:
    column = column.dropna()
    return bool(len(column)) and pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


def _over_length(task: str, part: pd.DataFrame, test: pd.DataFrame, varied: list[str]) -> Figure:
    """Accuracy over n: one panel per combination of the parameters that vary at one length.

    Averaged over the numeric ones if there would be too many panels, or a panel with a single point.
    """
    names = base.free(test, [LENGTH])
    panels = base.facets(part, names)
    if len(panels) > PANELS or any(_tested(rows)[LENGTH].nunique() < 2 for rows in panels.values()):
        names = [name for name in names if name not in varied]
        panels = base.facets(part, names)
    averaged = [name.removeprefix("task.") for name in varied if name not in names]
    return _figure(task, LENGTH, _named(panels, names), averaged)


def _over(task: str, part: pd.DataFrame, test: pd.DataFrame, axis: str) -> Figure | None:
    """Accuracy over the parameter `axis`: one panel with two points or more per combination of the others."""
    names = [n for n in test if n.startswith("task.") and n != axis and test[n].nunique() > 1]
    averaged = []
    while True:
        panels = base.facets(part, names)
        panels = {title: rows for title, rows in panels.items() if _tested(rows)[axis].nunique() > 1}
        if len(panels) <= PANELS:
            break
        most = max(names, key=lambda name: test[name].nunique())
        names.remove(most)
        averaged.append(most.removeprefix("task."))
    return _figure(task, axis, _named(panels, names), averaged) if panels else None


def _named(panels: dict[str, pd.DataFrame], names: list[str]) -> dict[str, pd.DataFrame]:
    """The panels, in which the names of series leave out what the panel's title says: parameters that every model was
    trained with as it is tested."""
    everything = pd.concat(panels)
    trained = {f"trained.{name.removeprefix('task.')}": name for name in names}
    same = [setting for setting, name in trained.items()
            if setting in everything and (everything[setting] == everything[name]).all()]  # fmt: skip
    named = base.along(everything, *same) if same else everything
    return {title: named.loc[title] for title in panels}


def _tested(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["metric"].isin(SCORES) & (rows["split"] == "test")]


def _figure(task: str, axis: str, panels: dict[str, pd.DataFrame], averaged: list[str]) -> Figure:
    everything = pd.concat(panels.values())
    points = pd.concat(summarise(rows, ["series", axis]) for rows in panels.values())
    looks = style.looks(points["series"])
    labels = _labels(everything, list(looks))
    label = axis.removeprefix("task.")
    note = f"{base.replicates(points, 'bars')}\ndotted: chance\nin brackets: state size (elements)"
    parts = style.blocks(looks)
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
        made.suptitle(f"{task}: {'R²' if continuous else 'accuracy'} over {label}{mean}")
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
