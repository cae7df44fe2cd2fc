"""Operations on tables that figures share: series along an axis, panels per parameter, equal series, notes."""

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

import numpy as np
import pandas as pd

from recall_lab import results
from recall_lab.figure import style
from recall_lab.figure.emphasis import emphasised

EQUAL = "\n= "
"""Between the names of series in a label, whose values are equal everywhere."""


def along(table: pd.DataFrame, *axis: str) -> pd.DataFrame:
    """The table with series names that leave out the settings in `axis`, over which the figure draws its series.

    Settings that were chosen on validation (table.attrs["selected"]) are left out too: at each point of the axis a
    series has only one value of them.
    """
    selected = table.attrs.get("selected", results.SELECTED)
    return table.assign(series=results.series(table, axis=(*axis, *selected))) if len(table) else table


def by_width(table: pd.DataFrame, *axis: str) -> pd.DataFrame:
    """`along` the axis and the width of a key. The width of a value is left out as well if it always equals d_key."""
    return along(table, "oracle.d_key", "mixer.d_key", *axis)


def totals(rows: pd.DataFrame, keys: list[str], columns: list[str]) -> pd.DataFrame:
    """One row per combination of values of `keys`: sums of `columns`, and the other columns of the first such row."""
    sums = rows.groupby(keys)[columns].sum().reset_index()
    dropped = {*columns, "low", "high"} & set(rows)
    return rows.drop_duplicates(keys).drop(columns=list(dropped)).merge(sums, on=keys)


def free(rows: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    """The task's parameters (columns `task.…`) that take several values at the same point of the axes.

    A figure over these axes needs one panel per combination of them, because different cells are not replicates.
    """
    parameters = [name for name in rows if name.startswith("task.") and name not in axes and rows[name].nunique() > 1]
    if not parameters:
        return []
    groups = rows.groupby(list(axes), dropna=False)
    return [name for name in parameters if (groups[name].nunique() > 1).any()]


def facets(rows: pd.DataFrame, names: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Title such as "pairs = 4, haystack = noise" → rows, for every combination of values of the columns in `names`."""
    if not names:
        return {"": rows}
    found = {}
    for values, part in rows.groupby(list(names), dropna=False):
        found[
            ", ".join(f"{name.split('.')[-1]} = {_text(value)}" for name, value in zip(names, values, strict=True))
        ] = part
    return found


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def alike(rows: pd.DataFrame, by: list[str], tolerance: float = 0.01) -> dict[str, str]:
    """Groups series whose values are equal (up to `tolerance`) at every point of `by`: first series → label with all.

    A figure draws one line per group, with the look of an emphasised series if the group has one. The order is that of
    the legend.
    """
    values = rows.pivot_table(index="series", columns=by, values="value")
    groups: dict[str, list[str]] = {}
    for name in sorted(style.ordered(rows["series"]), key=emphasised, reverse=True):
        same = (
            first
            for first in groups
            if np.allclose(values.loc[name], values.loc[first], rtol=tolerance, atol=tolerance, equal_nan=True)
        )
        groups.setdefault(next(same, name), []).append(name)
    return {first: EQUAL.join(groups[first]) for first in style.ordered(groups)}


def replicates(points: pd.DataFrame, drawn: str = "") -> str:
    """The note on averaged points: over how many seeds, and which interval `drawn` shows ("bars"; "": none)."""
    least, most = int(points["runs"].min()), int(points["runs"].max())
    interval = (points["high"] > points["low"]).any()
    if most == 1:
        return f"one seed; {drawn}: 95 % interval over answers" if drawn and interval else "one seed"
    count = f"{least}" if least == most else f"{least} to {most}"
    name = results.interval_name(points["runs"])
    return f"mean of {count} seeds" + (f"; {drawn}: {name}{' interval' * name.endswith('%')}" if drawn else "")


def blocks(series: Iterable[str], most: int = style.MOST) -> list[list[str]]:
    """The ordered series in as few groups of at most `most` as possible, the largest as small as possible.

    Only a mechanism with more series than that is split between groups.
    """
    names = style.ordered(series)
    fewest = len(_filled(names, most))
    return next(made for size in range(1, most + 1) if len(made := _filled(names, size)) == fewest)


def _filled(names: list[str], most: int) -> list[list[str]]:
    """Groups of at most `most`, each filled before the next one begins."""
    parts: list[list[str]] = []
    for _, group in groupby(names, key=style.mechanism):
        own = list(group)
        count = -(-len(own) // most)
        edges = [round(len(own) * part / count) for part in range(count + 1)]
        for start, stop in pairwise(edges):
            if parts and len(parts[-1]) + stop - start <= most:
                parts[-1] += own[start:stop]
            else:
                parts.append(own[start:stop])
    return parts
