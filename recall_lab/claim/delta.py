"""Claim 5: the delta rule corrects what the state got wrong."""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from recall_lab.claim.base import Claim, Line, at_least, at_most, contrast, exact, mean, reported, unlearned, unless
from recall_lab.claim.compare import cells, difference, missing_points, of, rows_of
from recall_lab.results import REPLICATES

LOAD = ["d_key", "oracle.cosine", "position"]
"""Columns that describe the conditions of a read-out; position is the number of pairs written."""


@dataclass(frozen=True, kw_only=True)
class Delta(Claim):
    """The update of DeltaNet is one step of stochastic gradient descent on ½‖Sᵀk_t − v_t‖², and so corrects what the
    state got wrong.

    Gradient step: the update differs from the step that automatic differentiation gives by a relative error of at most
    1e-12.

    Overwriting: test accuracy on `updates`, over the cells with at least 8 updates, is higher with the delta rule than
    with linear attention by at least 0.3, where one of them has learned the task (on validation, at least half way from
    chance to 1 in some cell).

    Correlated keys, without training: the read-out error of the delta rule is at most half that of linear attention.
    Judged is the largest ratio over all measured widths, numbers of pairs, and cosines of at least 0.3.

    Reversal, on random keys, without training, with d_key = 64 and 2 d_key pairs: the delta rule at β = 1 has the lower
    error, and yet the lower top-1 accuracy.

    Reported: top-1 accuracy with correlated keys, and accuracy on mqar with states of equal size. On mqar, training
    decorrelates the keys.
    """

    updates: str = "updates"
    """Experiment on updates."""
    least_updates: int = 8
    correlated: str = "correlated_keys"
    """Experiment on correlated keys."""
    random: str = "random_keys"
    """Experiment on random keys."""
    d_key: int = 64
    """Width at which the reversal is judged."""
    recall: str = "beyond_capacity"
    """Experiment on mqar at equal state."""
    delta: str = "delta_rule"
    linear: str = "linear"

    def judge(self, table: pd.DataFrame) -> list[Line]:
        return [
            self._step(table),
            self._overwriting(table),
            *self._correlated(table),
            *self._reversal(table),
            self._recall(table),
        ]

    def _step(self, table: pd.DataFrame) -> Line:
        rows = of(rows_of(table, self.random, "sgd_error"), self.delta)
        worst = None if rows.empty else exact(rows["value"].max())
        name = "the update minus a step of SGD by automatic differentiation: largest relative error"
        return at_most(name, worst, 1e-12, f"sgd_error of {self.delta}")

    def _overwriting(self, table: pd.DataFrame) -> Line:
        rows = rows_of(table, self.updates, "accuracy", "test")
        rows = rows[rows["task.updates"] >= self.least_updates] if "task.updates" in rows else rows
        found, gap = difference(rows, self.delta, self.linear, cells(rows))
        name = f"updates, {self.least_updates} and more: accuracy, {self.delta} minus {self.linear}"
        learned = table[(table["experiment"] == self.updates) & table["mixer"].isin([self.delta, self.linear])]
        return unless(at_least(name, found, 0.3, f"accuracy on updates of {gap}"), unlearned(learned))

    def _correlated(self, table: pd.DataFrame) -> list[Line]:
        """The ratio of the errors where it is largest, and the difference in top-1 at the same width, cosine, load."""
        error, top1 = (
            rows[rows["oracle.cosine"] >= 0.3] if "oracle.cosine" in rows else rows
            for rows in (rows_of(table, self.correlated, metric) for metric in ("error", "top1"))
        )
        arms = {name: _at_points(of(error, name)) for name in (self.delta, self.linear)}
        gap = missing_points(arms, LOAD)
        name = f"correlated keys: read-out error of {self.delta} over that of {self.linear}, where it is largest"
        if gap:
            return [at_most(name, None, 0.5, f"error with correlated keys of {gap}")]
        both = arms[self.delta].merge(arms[self.linear], on=[*REPLICATES, *LOAD], suffixes=("", "_linear"))
        both = both.assign(value=both["value"] / both["value_linear"])
        points = both.groupby(LOAD)["value"].mean()
        worst = dict(zip(LOAD, points.idxmax(), strict=True))
        where = f"{worst['position']:g} pairs, d_key = {worst['d_key']:g}, cosine {worst['oracle.cosine']:g}"
        here, answers = (_select(rows, worst) for rows in (both, top1))
        least = f"the ratio is {points.min():.2g} where it is smallest"
        difference_here = contrast(of(answers, self.delta), of(answers, self.linear)) if len(answers) else None
        return [
            at_most(f"{name} ({where})", mean(here), 0.5),
            reported("correlated keys: the smallest of these ratios", None, least),
            reported(f"correlated keys: top-1, {self.delta} minus {self.linear} ({where})", difference_here),
        ]

    def _reversal(self, table: pd.DataFrame) -> list[Line]:
        """Error and top-1 of the read-outs, each a line."""
        where = {"d_key": self.d_key, "position": 2 * self.d_key}
        lines = []
        for metric, words in (("error", "read-out error"), ("top1", "top-1 accuracy")):
            rows = _select(rows_of(table, self.random, metric), where)
            found, gap = difference(rows, self.delta, self.linear, [])
            name = (
                f"random keys, {2 * self.d_key} pairs, d_key = {self.d_key}: {words}, {self.delta} minus {self.linear}"
            )
            lines.append(at_most(name, found, 0.0, f"{metric} with random keys of {gap}"))
        return lines

    def _recall(self, table: pd.DataFrame) -> Line:
        name = f"mqar at equal state: accuracy, {self.delta} minus {self.linear}"
        rows = rows_of(table, self.recall, "accuracy", "test")
        found, gap = difference(rows, self.delta, self.linear, cells(rows))
        if found is None:
            return reported(name, None, f"not measured: accuracy on mqar of {gap}")
        state = rows_of(table, self.recall, "state_elements", "test")
        sizes, means = (
            [float(of(part, mixer)["value"].mean()) for mixer in (self.delta, self.linear)] for part in (state, rows)
        )
        text = f"{means[0]:.2f} and {means[1]:.2f}, states of {sizes[0]:g} and {sizes[1]:g} numbers"
        return reported(name, found, text)


def _at_points(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per replicate, width, cosine and number of pairs, without other columns."""
    if rows.empty:
        return rows
    return rows.groupby([*REPLICATES, *LOAD], as_index=False)["value"].mean()


def _select(rows: pd.DataFrame, where: Mapping[str, float]) -> pd.DataFrame:
    """The rows with these values; none where a column is absent."""
    for name, value in where.items():
        rows = rows[rows[name] == value] if name in rows else rows.iloc[:0]
    return rows
