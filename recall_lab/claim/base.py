"""What claims share: estimates with intervals, decisions against a threshold, and the lines of a verdict.

A claim is judged line by line. A line is *supported* where the whole 95 % interval of its estimate lies beyond the
threshold, *refuted* where the whole interval lies on the other side of it, and *undecided* otherwise. What is counted
or algebraic has no interval. A line that only describes is *reported*, and is not judged.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
from scipy import stats

from recall_lab.checks import require
from recall_lab.messages import counted, short
from recall_lab.results import REPLICATES, SCORES

Decision = Literal["supported", "refuted", "undecided", "reported"]

LEVEL = 0.95
"""Confidence level of every interval."""

FEWEST = 3
"""Least number of replicates of a trained estimate that is judged."""

FEWEST_FINE = 5
"""Least number of replicates where the threshold is at most FINE."""

FINE = 0.05
"""Largest threshold for which FEWEST_FINE replicates are needed."""


@dataclass(frozen=True)
class Estimate:
    """A measured number with its interval."""

    value: float
    low: float
    high: float
    replicates: int
    """Number of (seed, data_seed) pairs; 0 for a number that is counted or algebraic, and therefore exact."""


@dataclass(frozen=True)
class Line:
    """One line of a claim, judged."""

    name: str
    """What is measured, in words."""
    rule: str
    """The decision rule: "≥ 0.3"; empty where the line is only reported."""
    decision: Decision
    estimate: Estimate | None
    """None where nothing was measured."""
    reason: str = ""
    """Why the line is undecided, or what a reader should know."""
    missing: bool = False
    """Whether measurements that the rule needs are missing."""


@dataclass(frozen=True, kw_only=True)
class Claim(ABC):
    """A claim. The first paragraph of a subclass's docstring is its statement, the rest its measurements and rules."""

    experiments: Sequence[str] = ()
    """The experiments whose results are judged."""
    to_the_end: Sequence[str] = ()
    """Those of the experiments whose series must be shown to be trained to the end (see `untrained`)."""
    figures: Sequence[str] = ()
    """Names of the figures that show the evidence, or the beginnings of their names."""
    together: Sequence[str] = ()
    """Those of the experiments whose results are drawn in the same figures."""

    @abstractmethod
    def judge(self, table: pd.DataFrame) -> list[Line]:
        """The lines of the verdict.

        table  rows of all experiments that were run, also for other claims, each selected on validation
               (`results.select`). The column `experiment` names the experiment. `trained_to_end` is the verdict of
               `fairness.trained_to_end` on the row's series ("solved", "end", "gains" or "unknown"), and is missing
               where nothing is trained
        """


def scores(table: pd.DataFrame, split: str = "test") -> pd.DataFrame:
    """The scores of a split: one row per run and cell, with the accuracy, or R² for a continuous task, in `value`.

    The column `error` is the standard error of that score (the metric `standard_error`, see `train.evaluate`), and is
    missing where it was not recorded.
    """
    rows = table[table["split"] == split]
    own, errors = rows[rows["metric"].isin(SCORES)], rows[rows["metric"] == "standard_error"]
    keys = [name for name in rows.columns if name not in ("metric", "value", "error")]
    return own.merge(errors[[*keys, "value"]].rename(columns={"value": "error"}), on=keys, how="left")


def exact(value: float) -> Estimate:
    """The estimate of a number that is counted or algebraic."""
    return Estimate(float(value), float(value), float(value), 0)


def mean(values: pd.DataFrame) -> Estimate | None:
    """The mean over replicates, with Student's t interval. None where there are no values.

    values  one or more rows per replicate (columns seed, data_seed, value); `error`, where it exists, is the standard
            error of a row's value within its run, from the sampling of test sequences

    The variance of the mean over m replicates is s²/m, s² being their sample variance, or, if that is larger, the mean
    sampling variance divided by the number of different data_seeds: runs with the same data_seed are tested on the same
    sequences, so more of them do not reduce the sampling error. The interval has m − 1 degrees of freedom, at least 1.
    """
    if values.empty:
        return None
    groups = values.groupby(list(REPLICATES))
    own = groups["value"].mean()
    count = len(own)
    variance = float(own.var(ddof=1)) / count if count > 1 else 0.0
    if "error" in values and values["error"].notna().any():
        sampling = groups["error"].apply(lambda errors: float((errors**2).sum()) / len(errors) ** 2)
        tested = own.index.get_level_values("data_seed").nunique()
        variance = max(variance, float(sampling.mean()) / tested)
    half = float(stats.t.ppf((1 + LEVEL) / 2, max(1, count - 1))) * variance**0.5
    centre = float(own.mean())
    return Estimate(centre, centre - half, centre + half, count)


def contrast(first: pd.DataFrame, second: pd.DataFrame, on: Sequence[str] = ()) -> Estimate | None:
    """The mean of first − second, paired by replicate and by the columns `on`, with an interval as in `mean`.

    Rows without a partner are left out. None where there is no pair.
    """
    keys = [*REPLICATES, *on]
    both = _by(first, keys).merge(_by(second, keys), on=keys, suffixes=("", "_second"))
    both = both.assign(value=both["value"] - both["value_second"])
    if "error" in both and "error_second" in both:
        both["error"] = np.hypot(both["error"], both["error_second"])
    return mean(both)


def _by(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """One row per combination of keys: the mean value, and the error of that mean."""
    groups = rows.groupby(keys, as_index=False)
    found = groups["value"].mean()
    if "error" in rows:
        found["error"] = groups["error"].agg(lambda errors: float((errors**2).sum()) ** 0.5 / len(errors))["error"]
    return found


def at_least(name: str, estimate: Estimate | None, threshold: float, missing: str = "") -> Line:
    """The line "estimate ≥ threshold".

    missing  what was not measured, for the reason of the line where the estimate is None; the name without it
    """
    return _line(name, f"≥ {threshold:g}", estimate, threshold, 1, missing)


def at_most(name: str, estimate: Estimate | None, threshold: float, missing: str = "") -> Line:
    """The line "estimate ≤ threshold"; see `at_least`."""
    return _line(name, f"≤ {threshold:g}", estimate, threshold, -1, missing)


def within(name: str, estimate: Estimate | None, target: float, tolerance: float, missing: str = "") -> Line:
    """The line "|estimate − target| ≤ tolerance", refuted where the whole interval lies outside; see `at_least`."""
    rule = f"{target:g} ± {tolerance:g}"
    if estimate is None:
        return Line(name, rule, "undecided", None, f"not measured: {missing or name}", missing=True)
    low, high = target - tolerance, target + tolerance
    if low <= estimate.low and estimate.high <= high:
        decision: Decision = "supported"
    else:
        decision = "refuted" if estimate.high < low or estimate.low > high else "undecided"
    return _enough(Line(name, rule, decision, estimate), tolerance)


def reported(name: str, estimate: Estimate | None, reason: str = "") -> Line:
    """A line that is shown for information and is not judged."""
    return Line(name, "", "reported", estimate, reason)


def _line(name: str, rule: str, estimate: Estimate | None, threshold: float, sign: int, missing: str) -> Line:
    if estimate is None:
        return Line(name, rule, "undecided", None, f"not measured: {missing or name}", missing=True)
    ends = sorted(sign * (end - threshold) for end in (estimate.low, estimate.high))
    decision: Decision = "supported" if ends[0] >= 0 else "refuted" if ends[1] < 0 else "undecided"
    return _enough(Line(name, rule, decision, estimate), abs(threshold))


def _enough(line: Line, threshold: float) -> Line:
    """The line; undecided where a trained estimate has too few replicates for its threshold."""
    assert line.estimate is not None
    count, needed = line.estimate.replicates, FEWEST if threshold > FINE else FEWEST_FINE
    if 0 < count < needed:
        return replace(line, decision="undecided", reason=f"{count} seeds, at least {needed} are needed")
    if line.decision == "undecided":
        return replace(line, reason="the interval contains the threshold")
    return line


def unless(line: Line, obstacle: str) -> Line:
    """The line, made undecided if there is an obstacle, a text such as "not trained to the end: linear".

    A line that is only reported, or whose measurements are missing, stays as it is.
    """
    judged = line.decision != "reported" and not line.missing
    return replace(line, decision="undecided", reason=obstacle) if obstacle and judged else line


def untrained(rows: pd.DataFrame) -> str:
    """The obstacle for `unless` if some series of these rows are not shown to be trained to the end; otherwise ""."""
    words = {"gains": "more steps help", "unknown": "twice the steps were not tried"}
    verdicts = rows.drop_duplicates("series").set_index("series")["trained_to_end"].fillna("unknown")
    found = [f"{name} ({words[verdict]})" for name, verdict in verdicts.items() if verdict in words]
    return f"not trained to the end: {', '.join(found)}" if found else ""


def unlearned(rows: pd.DataFrame) -> str:
    """The obstacle for `unless` if no series of these rows has learned its task; otherwise "".

    A series has learned if in some validation cell its mean score is at least half way from chance to 1. The difference
    of two mechanisms says nothing about either where both are near chance.

    rows  the compared series on one task; without a column `series`, those of one mixer are one series
    """
    validation = scores(rows, "validation")
    if validation.empty:
        return "there are no validation scores"
    cells = [name for name in validation if name.startswith("task.")]
    chance = rows.loc[(rows["metric"] == "chance") & (rows["split"] == "validation"), "value"].max()
    chance = 0.0 if (validation["metric"] == "r2").all() or np.isnan(chance) else float(chance)
    series = "series" if "series" in validation else "mixer"
    top = validation.groupby([series, *cells], dropna=False)["value"].mean().max()
    return "" if top >= (1 + chance) / 2 else f"no model has learned the task: validation score at most {top:.2f}"


def verdict_table(lines: Iterable[tuple[str, Line]]) -> pd.DataFrame:
    """The verdict as a table, one row per line: claim, line, verdict, rule, effect, low, high, seeds (the number
    of replicates, or "exact"), reason, missing."""
    records = [
        {
            "claim": claim, "line": line.name, "verdict": line.decision, "rule": line.rule,
            "effect": None if line.estimate is None else line.estimate.value,
            "low": None if line.estimate is None else line.estimate.low,
            "high": None if line.estimate is None else line.estimate.high,
            "seeds": None if line.estimate is None else line.estimate.replicates or "exact",
            "reason": line.reason, "missing": line.missing,
        }
        for claim, line in lines
    ]  # fmt: skip
    return pd.DataFrame(records)


def effect(estimate: Estimate | None) -> str:
    """The estimate in a few characters: "0.31 [0.25, 0.37], 3 seeds"; without interval where it is exact."""
    if estimate is None:
        return "—"
    if not estimate.replicates:
        return short(estimate.value)
    interval = f"[{short(estimate.low)}, {short(estimate.high)}]"
    return f"{short(estimate.value)} {interval}, {counted(estimate.replicates, 'seed')}"


def multiplicity(lines: Sequence[Line]) -> str:
    """How many lines are judged, and how many of them by an interval, as a sentence."""
    judged = [line for line in lines if line.decision != "reported"]
    sampled = sum(line.estimate is not None and line.estimate.replicates > 0 for line in judged)
    return (
        f"{counted(len(judged), 'line')} judged, {sampled} of them by a {100 * LEVEL:.0f} % interval. The intervals "
        "are not corrected for multiple comparisons."
    )


def statement(claim: Claim) -> str:
    """The claim in a sentence: the first paragraph of its docstring. Raises ValueError where there is none."""
    return _paragraphs(claim)[0]


def measurements(claim: Claim) -> list[str]:
    """How the claim is measured and judged: the other paragraphs of its docstring."""
    return _paragraphs(claim)[1:]


def _paragraphs(claim: Claim) -> list[str]:
    text = inspect.cleandoc(type(claim).__doc__ or "")
    require(bool(text), f"{type(claim).__name__}: its docstring must state the claim")
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
