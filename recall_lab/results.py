"""From run folders to one tidy table, and from the table to the numbers people quote.

A run's folder holds   config.yaml    the resolved configuration
                       status.json    state, times, error, versions, device, threads
                       curve.json     a point a validation
                       rows.json      one metric in one cell a row
                       run.log, checkpoint.pt
Every file is written beside its place and moved there whole, so none is ever half a file.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from recall_lab.files import read_json, replacing

MARK = ".recall_lab"
"""The file that tells a folder of ours from anybody else's."""

SWEEP = "RECALL_LAB_SWEEP"
"""Environment variable by which the runs of one command, also in other processes, know that they belong together."""

SCORES = ("accuracy", "r2")
"""What tells good from bad: accuracy per scored token, or, of a continuous task, R²."""

ORACLE = tuple(
    f"oracle.{name}" for name in ("gates.", "keys", "cosine", "centered", "passes", "overwrites", "sharpness")
)
"""How the oracle's columns begin that tell one series from another; the others are sizes, as those of a cell."""

Row = dict[str, Any]
"""One metric in one cell of one run: metric, value, split, and the cell's columns (`task.length` …)."""


class ForeignFolder(ValueError):
    """A folder that is not ours to write into, or holds nothing of ours to read."""


def claim(folder: Path) -> None:
    """Makes the folder ours, or raises ForeignFolder: never writes among somebody else's files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = {path.name for path in folder.iterdir()}
        if not there:
            (folder / MARK).touch()
        elif MARK not in there:
            raise ForeignFolder(f"{folder} holds other files; choose another name=…, or an empty folder")
        elif not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise ForeignFolder(f"cannot write to {folder}: {error.strerror or error}") from error


def runs(folder: Path) -> list[Path]:
    """The run folders of a sweep's folder, in the order in which they were begun."""
    if not (folder / MARK).exists():
        raise ForeignFolder(f"{folder} is not a folder that recall-lab run has written")
    found = [path.parent for path in folder.glob("*/status.json")]
    return sorted(found, key=lambda run: (status(run)["started"], run.name))


def status(run: Path) -> dict[str, Any]:
    """state (running, finished, failed, interrupted; lost where a finished run's files are gone), times, versions."""
    found = {"state": "lost", "started": "", "sweep": ""} | read_json(run / "status.json", {})
    whole = all((run / name).exists() for name in ("config.yaml", "rows.json"))
    return found | {"state": "lost"} if found["state"] == "finished" and not whole else found


def read_config(run: Path) -> dict[str, Any]:
    """The resolved configuration of a run."""
    return yaml.safe_load((run / "config.yaml").read_text())


def collect(folder: Path) -> pd.DataFrame:
    """One row a metric and cell of every finished run; the configuration as columns (`mixer.heads`, `train.lr` …).

    Raises ForeignFolder where the folder is not a sweep's, or no run of it has finished.
    """
    rows = [row for run in runs(folder) if status(run)["state"] == "finished" for row in run_rows(run)]
    if not rows:
        states = Counter(status(run)["state"] for run in runs(folder))
        there = ", ".join(f"{count} {state}" for state, count in states.items()) or "no runs at all"
        raise ForeignFolder(f"{folder} has no finished run yet: {there}")
    table = mixtures(pd.DataFrame(rows))
    table["series"] = series(table)
    return table


def mixtures(table: pd.DataFrame) -> pd.DataFrame:
    """The table with columns `trained.X`: the largest number that a run trained on had of the task's parameter X.

    They tell runs trained on other mixtures, or on the same task with another vocabulary, from each other's seeds.
    """
    validation = table[table["split"] == "validation"]
    numbers = [c for c in table if c.startswith("task.") and pd.api.types.is_numeric_dtype(table[c])]
    largest = validation.groupby("run")[numbers].max()
    return table.join(largest.rename(columns=lambda c: c.replace("task.", "trained.", 1)), on="run")


def run_rows(run: Path) -> list[Row]:
    """The rows of one run, each with the run's own columns."""
    facts = status(run)
    config = read_config(run)
    columns = flatten(config) | {
        "run": run.name,
        "mixer": config["choice"]["mixer"],
        "task": config["choice"]["task"],
        **{name: facts[name] for name in ("git", "torch", "numpy", "python", "version", "device", "seconds")},
    }
    rows = [columns | row for row in read_json(run / "rows.json", [])]
    for path in sorted(run.glob("probe-*.json")):
        later = read_json(path)
        rows += [columns | later["columns"] | row for row in later["rows"]]
    return rows


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots; lists as JSON; `_target_` and its kin, and where the results lie, left out."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key.startswith("_") or (not prefix and key in ("name", "root", "report", "choice")):
            continue
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return flat


def varying(table: pd.DataFrame) -> list[str]:
    """The settings that differ between runs of the same mixer and task, seeds and the cell aside."""
    settings = [
        name
        for name in table.columns
        if name.startswith(("mixer.", "model.", "train.", "trained.", "trained_as", *ORACLE))
        and not name.startswith("train.cells")
    ]
    # Not one row a run: policies put on a run's weights later are series of their own under its name.
    groups = table.drop_duplicates(["mixer", "task", *settings]).groupby(["mixer", "task"])
    return [name for name in settings if (groups[name].nunique(dropna=False) > 1).any()]


def series(table: pd.DataFrame, axis: Iterable[str] = ()) -> pd.Series:
    """What a legend calls a run: its mixer, and the settings that tell it from others of the same mixer, but for those
    that a figure takes as its axis."""
    settings = [name for name in varying(table) if name not in set(axis)]
    label = table["mixer"].astype(str)
    for name in settings:
        several = table.groupby(["mixer", "task"])[name].transform(lambda column: column.nunique(dropna=False) > 1)
        told = several & table[name].notna()
        value = table[name].map(lambda x: f"{x:g}" if isinstance(x, float) else str(x))
        label = label.where(~told, label + " " + name.split(".")[-1] + "=" + value)
    return label


def select(table: pd.DataFrame, over: Iterable[str] = ("train.lr",)) -> pd.DataFrame:
    """Keeps, of the runs that differ only in `over`, those at the setting with the best mean validation accuracy.

    The test rows take no part in the choice. What is kept loses those settings from its series' name. A run is kept or
    left out as a whole, with all that was asked of it later; one that was never validated is kept.
    """
    validation = table[(table["split"] == "validation") & table["metric"].isin(SCORES)]
    settings = varying(validation)
    over = [name for name in over if name in settings]
    if not over:
        return table
    others = ["mixer", "task", *(name for name in settings if name not in over)]
    score = validation.groupby([*others, *over], dropna=False).agg(value=("value", "mean"), runs=("run", "nunique"))
    score = score.reset_index()
    # A setting that failed with some seeds must not win by those it survived.
    score = score[score["runs"] == score.groupby(others, dropna=False)["runs"].transform("max")]
    best = score.loc[score.groupby(others, dropna=False)["value"].idxmax(), [*others, *over]]
    lost = set(validation["run"]) - set(validation.merge(best, on=[*others, *over])["run"])
    kept = table[~table["run"].isin(lost)]
    return kept.assign(series=series(kept))


def interval(values: Iterable[float | int], level: float = 0.95, draws: int = 2000) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over independent runs; the same values give the same interval.

    Within the range of the values by construction, so an accuracy's never leaves [0, 1]. Of one to three values it is
    that range, which holds the true mean less often than `level` says, half of the time for two: see `interval_name`.
    """
    values = np.sort(np.asarray(list(values), dtype=float))
    picks = np.random.default_rng(0).integers(len(values), size=(draws, len(values)))
    low, high = np.quantile(values[picks].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def interval_name(runs: Iterable[float | int]) -> str:
    """What `interval` may be called over so many runs: too few make no more than their range."""
    return "range" if max(runs) < 4 else "95 %"


def summarise(
    table: pd.DataFrame, by: list[str], metric: tuple[str, ...] = SCORES, split: str = "test"
) -> pd.DataFrame:
    """`average` of the rows of one split whose metric is one of those given."""
    return average(table[table["metric"].isin(metric) & (table["split"] == split)], by)


def average(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Mean of `value` over runs for every combination of `by`: columns mean, low, high, runs.

    The interval is that over runs; where there is but one, the rows' own.
    """
    records = []
    for key, group in rows.groupby(by, sort=True, dropna=False):
        # A run counts once, also where several of its cells fall into one group.
        values = group.groupby("run")["value"].mean()
        own = [
            float(group[side].mean()) if side in group and group[side].notna().any() else values.mean()
            for side in ("low", "high")
        ]
        low, high = own if len(values) == 1 else interval(values)
        records.append((*key, values.mean(), low, high, len(values)))
    return pd.DataFrame(records, columns=[*by, "mean", "low", "high", "runs"])


def save(table: pd.DataFrame, path: Path) -> None:
    """The tidy table as parquet."""
    for name in table.columns:
        if table[name].dropna().map(type).nunique() > 1:  # a setting that is a number here and a word there
            table = table.assign(**{name: table[name].astype(str)})
    with replacing(path) as temporary:
        table.to_parquet(temporary, index=False)
