"""Retrieval: accuracy over the sequence length, and over every other numeric parameter of the task that varies."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import base
from recall_lab.figure.score_panels import LENGTH, PANELS, draw_panels
from recall_lab.results import SCORES


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("retrieval_TASK", figure) per task: accuracy per scored token (R² if targets are continuous) over n; and
    ("retrieval_TASK_by_PARAMETER", figure) for every numeric parameter that varies at one length: pairs, depth, data …

    One line per series, with the intervals over seeds as bars; one panel per combination of the other parameters that
    vary. The legend gives the number of elements of the state at the longest sequence.
    """
    scored = table[table["metric"].isin(SCORES) & (table["split"] == "test")]
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
        for name in varied:
            if (made := _over(str(task), part, test, name)) is not None:
                yield f"retrieval_{task}_by_{name.removeprefix('task.')}", made


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
    return draw_panels(task, LENGTH, _named(panels, names), averaged)


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
    return draw_panels(task, axis, _named(panels, names), averaged) if panels else None


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
