"""Helpers for tests of tables and figures: invented results, documented columns, and what a figure shows."""

import re
from collections.abc import Callable, Iterable
from itertools import combinations
from types import ModuleType
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from recall_lab import files, results
from recall_lab.figure import layout

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


def undocumented(columns: Iterable[str]) -> set[str]:
    """Those columns of rows that the README does not describe."""
    text = (files.CONF.parent / "README.md").read_text(encoding="utf-8")
    (described,) = re.findall(r"^\| column \| content \|\n\|---\|---\|\n(.*?)\n\n", text, re.S | re.M)
    known = {name for line in described.splitlines() for name in re.findall("`([^`]+)`", line.split("|")[1])}
    assert {"run", "value", "task.*"} <= known
    return {name for name in columns if not name.startswith("task.")} - known


def named(*tables: pd.DataFrame) -> pd.DataFrame:
    """One table of all parts, with its column `series`."""
    table = pd.concat(tables, ignore_index=True)
    return table.assign(series=results.series(table))


def drawn(module: ModuleType, table: pd.DataFrame) -> dict[str, Figure]:
    """The module's figures, arranged as they would be written. Their names begin with the module's, by which a claim
    finds them, and none has tick labels that touch."""
    made = dict(module.draw(table))
    for name, figure in made.items():
        layout.arrange(figure)
        assert touching(figure) == [], name
        assert name.startswith(module.__name__.rpartition(".")[2])
    return made


def touching(figure: Figure) -> list[tuple[str, str]]:
    """The pairs of visible tick labels, of all panels, whose boxes are less than a pixel apart at 100 per inch."""
    figure.draw_without_rendering()
    boxes = []
    for axis in (axis for ax in panels(figure) for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        labels = [label for tick in ticks if low <= tick.get_loc() <= high for label in (tick.label1, tick.label2)]
        boxes += [(label.get_text(), label.get_window_extent().padded(0.5))
                  for label in labels if label.get_visible() and label.get_text()]  # fmt: skip
    return [(one, other) for (one, a), (other, b) in combinations(boxes, 2) if a.overlaps(b)]


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
