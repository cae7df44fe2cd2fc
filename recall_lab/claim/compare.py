"""Comparisons of mixers that several claims make: rows with sampling errors, contrasts, and missing measurements."""

from collections.abc import Mapping, Sequence

import pandas as pd
from scipy import stats

from recall_lab.claim.base import LEVEL, Estimate, contrast, scores
from recall_lab.results import REPLICATES

Point = tuple[object, ...]
"""The values of some columns: a combination at which rows are compared."""


def rows_of(table: pd.DataFrame, experiment: str, metric: str, split: str | None = None) -> pd.DataFrame:
    """The rows of one metric of an experiment, without the columns that are empty in all of them.

    split  None: all splits, except for accuracy, which is that on test data

    Of a metric with several statistics, only the means are returned. The column `error` is the standard error of a
    value within its run: for accuracies that of `scores`, for rows with an interval `sampling_error`. Rows of the
    oracle have none: each seed draws its own keys, so that the variance over seeds already contains the sampling.
    """
    rows = table[table["experiment"] == experiment]
    if metric == "accuracy":
        return scores(rows, split or "test").dropna(axis=1, how="all")
    rows = rows if split is None else rows[rows["split"] == split]
    rows = rows[rows["metric"] == metric].dropna(axis=1, how="all")
    rows = rows[rows["statistic"] == "mean"] if "statistic" in rows else rows
    if rows.empty or (rows["split"] == "oracle").all() or not {"low", "high"} <= set(rows):
        return rows
    return rows.assign(error=sampling_error(rows))


def sampling_error(rows: pd.DataFrame) -> pd.Series:
    """The standard error of each row's value, from its normal interval (columns low, high)."""
    return (rows["high"] - rows["low"]) / 2 / stats.norm.ppf((1 + LEVEL) / 2)


def cells(rows: pd.DataFrame) -> list[str]:
    """The columns that name the cell in which a row was measured."""
    return [str(name) for name in rows.columns if str(name).startswith("task.")]


def of(rows: pd.DataFrame, mixer: str) -> pd.DataFrame:
    """The rows of one mixer; `rows` itself if it has no column mixer, as an empty table."""
    return rows[rows["mixer"] == mixer] if "mixer" in rows else rows


def difference(rows: pd.DataFrame, first: str, second: str, on: Sequence[str]) -> tuple[Estimate | None, str]:
    """The contrast of two mixers, first − second, paired by replicate and the columns `on`, and "".

    Where measurements are missing: None, and which (see `missing_points`).
    """
    arms = {name: of(rows, name) for name in (first, second)}
    gap = missing_points(arms, on)
    return (None, gap) if gap else (contrast(arms[first], arms[second], on), "")


def missing_points(arms: Mapping[str, pd.DataFrame], on: Sequence[str]) -> str:
    """Which measurements are missing for a comparison of several mixers, in words; empty if none is.

    arms  name of each side of the comparison → its rows

    All rows of an arm must be of one series. Each replicate needs a row at every point (combination of values of the
    columns `on`) that occurs in any arm, and at least one replicate must occur in all arms.
    """
    absent = [name for name, rows in arms.items() if rows.empty]
    if absent:
        return ", ".join(absent)
    for name, rows in arms.items():
        if "series" in rows and rows["series"].nunique() > 1:
            return f"one series of {name}: there are {', '.join(sorted(rows['series'].unique()))}"
    seeds = [set(rows[list(REPLICATES)].itertuples(index=False, name=None)) for rows in arms.values()]
    if not set.intersection(*seeds):
        return f"a seed that {' and '.join(arms)} share"
    points = {point for rows in arms.values() for point in _points(rows, on)}
    for name, rows in arms.items():
        for (seed, _), own in rows.groupby(list(REPLICATES)):
            left = points - _points(own, on)
            if left:
                return f"{name} at {_words(min(left, key=str), points, on)}, seed {seed}"
    return ""


def _points(rows: pd.DataFrame, on: Sequence[str]) -> set[Point]:
    return set(rows[list(on)].itertuples(index=False, name=None)) if on else set()


def _words(point: Point, points: set[Point], on: Sequence[str]) -> str:
    """The point as "length=256, depth=0.5": the columns in which the points differ."""
    varied = [number for number in range(len(on)) if len({other[number] for other in points}) > 1]
    values = ((on[number].removeprefix("task."), point[number]) for number in varied)
    return ", ".join(f"{name}={x:g}" if isinstance(x, float) else f"{name}={x}" for name, x in values) or "its cell"
