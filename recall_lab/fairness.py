"""Whether a comparison is fair to every series: learning rates inside their grid, and training to the end.

Pure functions of the table (see `results`). A series that fails a check is named, so that no conclusion about a
mechanism rests on a setting that suited another one.
"""

from typing import Any

import numpy as np
import pandas as pd

from recall_lab.results import SCORES, rates
from recall_lab.series import condition, setting_columns

GAIN = 0.01
"""Largest gain in validation score from twice the steps with which a series counts as trained to the end."""

STEPS = "train.steps"


def notes(chosen: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """One line per task and problem: best rates at the edge of their grid, series not trained to the end.

    chosen  the rows of the runs that the report shows
    table   the rows of all runs
    """
    lines = []
    points = rates(table)
    for task, part in points[points["edge"]].groupby("task"):
        found = [f"{name} ({rate:g})" for name, rate in part[["series", "train.lr"]].itertuples(index=False)]
        lines.append(
            f"{task}: the best train.lr is at the edge of its grid; a better one may lie beyond: {_list(found)}"
        )
    ends = trained_to_end(chosen, table)
    for (task, steps), part in ends[ends["verdict"] == "unknown"].groupby(["task", "steps"]):
        lines.append(
            f"{task}: not shown to be trained to the end after {steps:.0f} steps "
            f"(the same runs with seed=0 {STEPS}={2 * steps:.0f} would show it): {_list(part['series'])}"
        )
    for task, part in ends[ends["verdict"] == "gains"].groupby("task"):
        found = [f"{name} (+{gain:.3f} from twice {half:.0f} steps)"
                 for name, gain, half in part[["series", "gain", "half"]].itertuples(index=False)]  # fmt: skip
        lines.append(f"{task}: not trained to the end: {_list(found)}")
    return lines


def _list(names: Any) -> str:
    return ", ".join(dict.fromkeys(names))


def trained_to_end(chosen: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """For every trained series in `chosen`: columns task, series, steps, gain, half, verdict.

    verdict  "solved": every run stopped because it had solved its validation cells; "end": twice the steps gain at most
             GAIN; "gains": they gain more; "unknown": no run with twice or half the steps to compare with
    gain     mean gain in validation score, over the seeds that were trained for `half` steps and for twice as many;
             they are equal in all settings but the steps and what equals the steps (a schedule's length)
    """
    columns = ["task", "series", "steps", "gain", "half", "verdict"]
    if STEPS not in table or table[STEPS].isna().all():
        return pd.DataFrame(columns=columns)
    runs = _runs(table)
    found = []
    scores = chosen[chosen["run"].isin(runs.index) & (chosen["split"] == "validation")]  # not those of later probes
    for (task, name), part in scores.groupby(["task", "series"]):
        own = runs.loc[part["run"].unique()]
        steps = own[STEPS].max()
        gain, half = next((found for found in (_gain(own, runs, 2), _gain(own, runs, 0.5)) if found), (np.nan, np.nan))
        verdict = "unknown" if np.isnan(gain) else "end" if gain <= GAIN + 1e-9 else "gains"
        found.append((task, name, steps, gain, half, "solved" if own["solved"].all() else verdict))
    return pd.DataFrame(found, columns=columns)


def _gain(own: pd.DataFrame, runs: pd.DataFrame, factor: float) -> tuple[float, float] | None:
    """(mean gain from the fewer steps to the more, the fewer steps) of runs with `factor` times the steps, if any."""
    keys = ["condition", "seed", "data_seed", STEPS]
    pairs = own.assign(**{STEPS: own[STEPS] * factor}).merge(runs, on=keys, suffixes=("", "_other"))
    if pairs.empty:
        return None
    gain = float((pairs["score_other"] - pairs["score"]).mean())
    steps = float(own[STEPS].max())
    return (gain, steps) if factor > 1 else (-gain, steps * factor)


def _runs(table: pd.DataFrame) -> pd.DataFrame:
    """One row per trained run: its condition without the steps, seeds, steps, score, and whether it was solved.

    A run is solved if each validation cell reaches train.solved, for training then stops.
    """
    scores = table[(table["split"] == "validation") & table["metric"].isin(SCORES) & table[STEPS].notna()]
    following = [
        name for name in setting_columns(scores) if ((scores[name] == scores[STEPS]) | scores[name].isna()).all()
    ]
    scores = scores.assign(condition=condition(scores, axis=following))
    for name in ("seed", "data_seed"):
        if name not in scores:
            scores = scores.assign(**{name: 0})
    groups = scores.groupby("run")
    made = groups[["condition", "seed", "data_seed", STEPS]].first().astype({STEPS: float})
    made["score"] = groups["value"].mean()
    limit = pd.to_numeric(groups["train.solved"].first(), errors="coerce") if "train.solved" in scores else np.nan
    return made.assign(solved=groups["value"].min() >= limit)
