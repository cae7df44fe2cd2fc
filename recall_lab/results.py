"""From runs to one tidy table, and from the table to means and intervals.

A run's *condition* is every setting that its result depends on. *Replicates* are runs of one condition with another
`seed` or `data_seed`. *Circumstances* (threads, device, revision, output folder) neither make a series nor count
as a replicate. In the table a setting is a column with a dot in its name. `task.*` are the parameters of the cell that
a row was measured in; the task that was trained on is `trained.*`. Columns without a dot belong to the row.

A series is all runs of one condition. It is found by exclusion: every setting that differs makes a series, unless it
is on one of the short lists below or a figure takes it as its axis. No setting is therefore averaged over unnoticed.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from recall_lab.checks import require
from recall_lab.files import read_json
from recall_lab.folders import (
    CIRCUMSTANCES,
    REPLICATES,
    SELECT,
    Config,
    ForeignFolder,
    Row,
    Run,
    flatten,
    merged,
    without,
)
from recall_lab.series import condition, series
from recall_lab.table_files import FACTS, concerns

SELECTED = ("train.lr",)
"""Settings that are chosen on validation unless the setting `select` names others."""

CELLS = ("test.cells",)
"""Settings that only determine which cells are measured; the cell is in `task.*`."""

SCORES = ("accuracy", "r2")
"""The metrics that models are ranked by: accuracy per scored token, or R² of a continuous task."""

SAME = 0.001
"""Two learning rates whose scores differ by less than this are equally good."""


def collect(*sweeps: Path) -> pd.DataFrame:
    """The rows of every run of the sweeps that has results, with the run's settings as columns (see the module), and
    `series`.

    Of runs that differ in circumstances only, the newest is taken (`repeated` names them).
    Raises ForeignFolder where a folder is not a sweep's, or no run has results. Raises ValueError, naming the
    file, where one is damaged.
    """
    table, _, damaged = gather(sweeps, merged(sweeps))
    if damaged:
        raise ValueError(damaged[0])
    return table


def gather(sweeps: Sequence[Path], found: Sequence[Run]) -> tuple[pd.DataFrame, list[Run], list[str]]:
    """The table of `collect` from those runs whose files can be read, these runs, and one line for each other run that
    has results.

    Raises what `collect` raises; ValueError only where no run can be read.
    """
    rows: dict[Run, list[Row]] = {}
    damaged = [run.status["error"] for run in found if run.status["state"] == "damaged"]
    for run in found:
        if run.has_rows:
            try:
                rows[run] = run_rows(run)
            except (ValueError, OSError) as error:
                damaged.append(str(error))
    if not rows:
        if damaged:
            raise ValueError(damaged[0])
        states = Counter(run.status["state"] for run in found)
        listed = ", ".join(f"{count} {state}" for state, count in states.items()) or "no runs"
        raise ForeignFolder(f"{', '.join(map(str, sweeps))} has no finished run yet: {listed}")
    superseded = {old for old, _ in _superseded(rows)}
    table = pd.DataFrame([row for run in rows if run not in superseded for row in rows[run]])
    table["series"] = series(table)
    return table, list(rows), damaged


def run_rows(run: Run) -> list[Row]:
    """The rows of one run, each with the run's own columns and the settings that it depends on.

    Raises ValueError, naming the file, where one is damaged.
    """
    facts, config = run.status, run.config
    columns = settings(config) | {
        "run": run.name,
        "mixer": config["choice"]["mixer"],
        "task": config["choice"]["task"],
        **{name: config[name] for name in REPLICATES},
        **{name: facts.get(name) for name in FACTS},
    }
    rows = _with_columns(columns, _read_rows(run.path / "rows.json")["rows"])
    for path in sorted(run.path.glob("probe-*.json")):
        later = _read_rows(path, "columns")
        own = {name: value for name, value in columns.items() if not name.startswith(("mixer.", "probe."))}
        own |= later["columns"]
        if "trained_as" in own:
            own |= _of_the_trained_mixer(columns, own)
        rows += _with_columns(own, later["rows"])
    return rows


def _of_the_trained_mixer(trained: Row, own: Row) -> Row:
    """The settings with which the weights were trained, as trained_mixer.*, where the measured mixer differs in them.

    trained, own  the columns of the run, and those of the rows measured with another mixer
    """
    names = [name for name in trained if name.startswith("mixer.") and not name.endswith("_")]
    return {f"trained_{name}": trained[name] for name in names if own.get(name) != trained[name]}


def _read_rows(path: Path, *more: str) -> dict[str, Any]:
    """The content of a file of rows. Raises ValueError, naming it, if it lacks `rows` or one of the other keys."""
    content = read_json(path)
    whole = isinstance(content, dict) and {"rows", *more} <= set(content)
    require(whole, f"{path} is damaged; delete it to repeat the run")
    return content


def settings(config: Config) -> dict[str, Any]:
    """The condition of a run as columns: every setting but replicates, circumstances and the tested cells."""
    flat = without(flatten(config), (*REPLICATES, *CIRCUMSTANCES, *CELLS, "probe"))  # "probe": there is none
    renamed = {f"trained{key[4:]}" if key.startswith("task.") else key: value for key, value in flat.items()}
    return {key if "." in key else f"config.{key}": value for key, value in renamed.items()}


def _with_columns(columns: dict[str, Any], rows: Iterable[Row]) -> list[Row]:
    """The rows, each with the columns of its run that concern it. Lists become JSON, as in the settings."""

    @cache
    def concerning(probe: str | None, split: str | None) -> dict[str, Any]:
        return {name: value for name, value in columns.items() if concerns(name, probe, split)}

    return [concerning(row.get("probe"), row.get("split")) | flatten(row) for row in rows]


def _superseded(available: Iterable[Run]) -> list[tuple[Run, Run]]:
    """(older run, newest run) of every condition and replicate that was run more than once."""
    groups: dict[str, list[Run]] = {}
    for run in available:
        flat = without(flatten(run.config), CIRCUMSTANCES)
        groups.setdefault(repr(sorted(flat.items())), []).append(run)
    return [(old, group[-1]) for group in groups.values() for old in group[:-1]]


def repeated(available: Iterable[Run]) -> list[str]:
    """One line for each run that is left out because a newer run repeats it under other circumstances."""
    lines = []
    for old, new in _superseded(available):
        before, after = ({**flatten(run.config), "device": run.status["device"]} for run in (old, new))
        differing = [f"{name}={before.get(name)} → {after.get(name)}" for name in CIRCUMSTANCES
                     if before.get(name) != after.get(name)]  # fmt: skip
        names = (old.name, new.name) if old.name != new.name else (str(old.path), str(new.path))
        lines.append(f"{names[0]} is repeated by {names[1]} ({', '.join(differing) or 'same settings'}), which is used")
    return lines


def selected_settings(*sweeps: Path) -> tuple[str, ...]:
    """The settings to be selected on validation: the `select` of the latest command in each sweep's folder."""
    return tuple(dict.fromkeys(name for sweep in sweeps for name in read_json(sweep / SELECT, SELECTED)))


def select(table: pd.DataFrame, over: Iterable[str] = SELECTED) -> pd.DataFrame:
    """Keeps, of the runs that differ only in the settings `over`, those with the best mean validation score.

    Test rows are not used for the choice. A value with fewer validated replicates than another is not chosen. A run is
    kept or dropped with all its rows, those of later probes included; a run without validation scores is kept. The
    names of the remaining series do not mention `over`.
    """
    over = [name for name in over if name in table]
    validation = table[(table["split"] == "validation") & table["metric"].isin(SCORES)]
    if not over or validation.empty:
        return table
    others = ["mixer", "task", "_others"]
    validation = validation.assign(_others=condition(validation, axis=over))
    score = validation.groupby([*others, *over], dropna=False).agg(value=("value", "mean"), runs=("run", "nunique"))
    score = score.reset_index()
    score = score[score["runs"] == score.groupby(others, dropna=False)["runs"].transform("max")]
    best = score.loc[score.groupby(others, dropna=False)["value"].idxmax(), [*others, *over]]
    lost = set(validation["run"]) - set(validation.merge(best, on=[*others, *over])["run"])
    kept = table[~table["run"].isin(lost)]
    return kept.assign(series=series(kept, axis=over))


def rates(table: pd.DataFrame) -> pd.DataFrame:
    """Validation score by learning rate, of the series with several rates: columns task, series, train.lr, mean, low,
    high, runs, chosen, edge.

    The names of the series do not mention the rate. The score of a run is its mean over the validation cells.
    chosen  whether `select` chooses this rate; edge: whether it is also the lowest or highest of the rates with as many
            replicates (of all rates where no other has as many), and no rate inside has the same score (up to SAME)
    """
    columns = ["task", "series", "train.lr", "mean", "low", "high", "runs", "chosen", "edge"]
    rows = table[(table["split"] == "validation") & table["metric"].isin(SCORES)]
    if "train.lr" not in rows or rows["train.lr"].nunique() < 2:
        return pd.DataFrame(columns=columns).astype({"chosen": bool, "edge": bool})
    rows = rows.assign(series=series(rows, axis=("train.lr",)))
    rows = rows[rows.groupby(["task", "series"])["train.lr"].transform("nunique") > 1]
    points = average(rows, ["task", "series", "train.lr"]).assign(chosen=False, edge=False)
    for _, own in points.groupby(["task", "series"]):
        complete = own[own["runs"] == own["runs"].max()]
        best = complete["mean"].idxmax()
        grid = complete if len(complete) > 1 else own  # further seeds at the best rate only, as on a card
        inner = complete["mean"].iloc[1:-1]  # the rates are in order
        points.loc[best, "chosen"] = True
        at_end = best in (grid.index[0], grid.index[-1])
        points.loc[best, "edge"] = at_end and not (inner >= complete.loc[best, "mean"] - SAME).any()
    return points[columns]


def interval(values: Iterable[float | int], level: float = 0.95) -> tuple[float, float]:
    """Interval of the mean of independent values; deterministic (see `interval_name`).

    One or two values: their range. Up to seven: Student's t. From eight on: percentile bootstrap.
    """
    x = np.sort(np.asarray(list(values), dtype=float))
    # A variance of 0, also of tiny values whose squares vanish, would leave Student's interval undefined.
    if len(x) < 3 or x[0] == x[-1] or x.var() == 0:
        return float(x[0]), float(x[-1])
    from scipy import stats  # half a second, and two replicates need none of it

    if len(x) < 8:
        low, high = stats.t.interval(level, len(x) - 1, x.mean(), stats.sem(x))
    else:
        found = stats.bootstrap(
            (x,), np.mean, confidence_level=level, method="percentile", rng=np.random.default_rng(0)
        )
        low, high = found.confidence_interval
    return float(low), float(high)


def interval_name(replicates: Iterable[float | int]) -> str:
    """What a legend calls `interval`, given numbers of replicates: the range of two is no confidence interval."""
    return "range" if max(replicates) < 3 else "95 %"


def summarise(
    table: pd.DataFrame, by: list[str], metric: tuple[str, ...] = SCORES, split: str = "test"
) -> pd.DataFrame:
    """`average` of the rows of one split whose metric is one of those given."""
    return average(table[table["metric"].isin(metric) & (table["split"] == split)], by)


def average(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Mean of `value` over replicates for every combination of `by`: columns *by, mean, low, high, runs.

    A replicate is a (seed, data_seed) pair: it counts once, with the mean of its rows in the group, and with its
    newest run where there are several. `runs` is the number of replicates. low and high are `interval` over
    replicates, limited to [0, 1] for accuracies; for one replicate they are the rows' own, if the rows have them.
    Raises ValueError where a group would mix runs of different conditions.
    """
    rows = rows.assign(_condition=condition(rows))
    records = []
    for key, group in rows.groupby(by, sort=True, dropna=False):
        if group["_condition"].nunique() > 1:
            mixed = "; ".join(sorted(series(group).unique()))
            raise ValueError(f"an average over {by} would mix runs of different settings: {mixed}")
        group = _newest(group)
        values = group.groupby([name for name in REPLICATES if name in group] or "run")["value"].mean()
        low, high = interval(values)
        if len(values) == 1 and {"low", "high"} <= set(group) and group["low"].notna().any():
            low, high = float(group["low"].mean()), float(group["high"].mean())
        if group["metric"].str.contains("accuracy|top1").all():
            low, high = max(low, 0.0), min(high, 1.0)
        records.append((*key, values.mean(), low, high, len(values)))
    return pd.DataFrame(records, columns=[*by, "mean", "low", "high", "runs"])


def _newest(group: pd.DataFrame) -> pd.DataFrame:
    """The rows of each replicate's newest run; the table lists runs in the order in which they were started."""
    names = [name for name in REPLICATES if name in group]
    if not names or group["run"].nunique() == 1:
        return group
    return group[group["run"] == group.groupby(names)["run"].transform("last")]
