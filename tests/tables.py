"""Helpers for tests of figures: tables of invented results, and what a figure shows."""

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from recall_lab import results

Cell = dict[str, Any]


def scores(
    task: str,
    cells: Iterable[Cell],
    accuracy: Callable[[str, Cell], float],
    mixers: Iterable[str] = ("linear", "delta_rule"),
    seeds: Iterable[int] = (0, 1),
    **settings: Any,
) -> pd.DataFrame:
    """Rows of split test per mixer, seed and cell, and of split validation in the first cell. No column `series`."""
    rows = []
    for mixer in mixers:
        for seed in seeds:
            for number, cell in enumerate(cells):
                own = {"run": f"{mixer}{seed}{settings}", "mixer": mixer, "task": task, "seed": seed, **settings,
                       **{f"task.{name}": value for name, value in cell.items()}}  # fmt: skip
                values = {"accuracy": accuracy(mixer, cell), "chance": 0.1, "state_elements": 9.0}
                splits = ("test", "validation") if number == 0 else ("test",)
                rows += [{**own, "split": s, "metric": m, "value": v} for s in splits for m, v in values.items()]
    return pd.DataFrame(rows)


def named(*tables: pd.DataFrame) -> pd.DataFrame:
    """One table of all parts, with its column `series`."""
    table = pd.concat(tables, ignore_index=True)
    return table.assign(series=results.series(table))


def drawn(module: ModuleType, table: pd.DataFrame) -> dict[str, Figure]:
    made = dict(module.draw(table))
    for figure in made.values():
        figure.canvas.draw()
    return made


def panels(figure: Figure) -> list[Axes]:
    return [ax for ax in figure.axes if ax.axison]


def lines(ax: Axes) -> dict[str, Line2D]:
    return {line.get_label(): line for line in ax.lines}


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


def note(figure: Figure) -> str:
    return figure.legends[0].get_title().get_text()


def numbers(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]
