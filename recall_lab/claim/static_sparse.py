"""Claim 8: static sparse caches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from recall_lab.claim.base import (
    Claim,
    Estimate,
    Line,
    at_least,
    at_most,
    contrast,
    mean,
    reported,
    unlearned,
    unless,
)
from recall_lab.claim.compare import sampling_error

BUDGET = "mixer.budget"
QUERIES = {"many": "many queries", "one": "one query"}


@dataclass(frozen=True, kw_only=True)
class StaticSparse(Claim):
    """A static sparse cache (a sliding window, eviction, merging) fails at long contexts because it is blind to the
    query, not because its share B/n of the tokens is small.

    Measured is the accuracy per scored token at one length n, with several budgets B (tokens attended to), with many
    queries per sequence and with one: on the weights of trained softmax models, and in models trained with the policy.
    Differences are paired by seed. At B = n every policy equals softmax, so models trained with softmax are used there.
    A line is undecided unless softmax has learned the task: on validation, at least half way from chance to 1 in some
    cell.

    Choice by the query: top_k, which chooses tokens by the query, minus the best policy that does not, mean over
    B/n = 1/16, 1/8 and 1/4, is at least .3. The best policy is chosen for each B/n by its mean validation accuracy.

    Share: top_k at B/n = 1 minus top_k at B/n = 1/8 is at most .02.

    Reported: paged, an approximation, in place of top_k; and, on trained weights, top_k choosing from all tokens minus
    top_k choosing from the last 2 B.
    """

    blind: Sequence[str] = ("window", "sink_window", "heavy_hitter", "merging", "random_k")
    """The policies that are blind to the query: bounded caches, and the control that keeps every token."""
    best: str = "top_k"
    """The policy that chooses by the query, out of all tokens."""
    approximation: str = "paged"
    """A policy that approximates `best`."""
    small: Sequence[float] = (1 / 16, 1 / 8, 1 / 4)
    """The shares B/n over which the effect of choosing by the query is averaged."""
    share: float = 1 / 8
    """The share at which the loss from B/n = 1 is measured."""

    def judge(self, table: pd.DataFrame) -> list[Line]:
        table = table[table["experiment"].isin(self.experiments)]
        obstacle = unlearned(table[table["mixer"] == "softmax"])
        lines: list[Line] = []
        for arm, rows in (("softmax weights", on_weights(table)), ("trained with it", trained(table, self.best))):
            for queries in ("many", "one"):
                own, where = rows[rows["queries"] == queries], f"{arm}, {QUERIES[queries]}: "
                lines += [unless(line, obstacle) for line in (self._choice(own, where), self._share(own, where))]
                lines += [self._best(own, where), self._approximation(own, where)]
                if arm == "softmax weights":
                    lines.append(self._keeping(own, where))
        return lines

    def _choice(self, rows: pd.DataFrame, where: str) -> Line:
        found, absent = self._over_blind(rows, self.best)
        return at_least(f"{where}{self.best} − best blind policy", found, 0.3, absent)

    def _approximation(self, rows: pd.DataFrame, where: str) -> Line:
        found, absent = self._over_blind(rows, self.approximation)
        return reported(f"{where}{self.approximation} − best blind policy", found, absent)

    def _share(self, rows: pd.DataFrame, where: str) -> Line:
        absent = _absent(rows, [self.best], [1, self.share])
        whole, part = (_at(rows, [self.best], [share]) for share in (1, self.share))
        found = None if absent else contrast(whole, part)
        return at_most(f"{where}{self.best}, loss from B/n = 1 to {self.share:g}", found, 0.02, absent)

    def _keeping(self, rows: pd.DataFrame, where: str) -> Line:
        bounded = f"{self.best} C=2B"
        absent = _absent(rows, [self.best, bounded], self.small)
        everything, few = (_at(rows, [policy], self.small) for policy in (self.best, bounded))
        found = None if absent else contrast(everything, few, ["share"])
        return reported(f"{where}{self.best} from all tokens − from the last 2B", found, absent)

    def _best(self, rows: pd.DataFrame, where: str) -> Line:
        """Which policy is the best at each share, and its mean accuracy."""
        best = self._best_blind(rows)
        names = best.groupby("share")["policy"].first()
        text = ", ".join(f"{name} at {share:g}" for share, name in names.items())
        return reported(f"{where}best blind policy", mean(best), text)

    def _over_blind(self, rows: pd.DataFrame, policy: str) -> tuple[Estimate | None, str]:
        """The policy minus the best blind policy, mean over small shares; or None and what was not measured."""
        absent = _absent(rows, [policy, *self.blind], self.small)
        best = self._best_blind(rows)
        return (None if absent else contrast(_at(rows, [policy], self.small), best, ["share"])), absent

    def _best_blind(self, rows: pd.DataFrame) -> pd.DataFrame:
        """For each small share, the rows of the blind policy with the best mean validation accuracy."""
        blind = _at(rows, self.blind, self.small)
        if blind.empty:
            return blind
        score = blind.groupby(["share", "policy"])["validation"].mean()
        return blind[[(row.share, row.policy) in set(score.groupby("share").idxmax()) for row in blind.itertuples()]]


COLUMNS = ["seed", "data_seed", "queries", "policy", "share", "value", "validation", "error"]
"""Columns of the measurements: accuracy on test data (value, with its standard error) and on validation data."""


def on_weights(table: pd.DataFrame) -> pd.DataFrame:
    """The measurements of the probe policies. The error is from the probe's interval, with sequences as clusters."""
    if "policy" not in table:
        return pd.DataFrame(columns=COLUMNS)
    keys = ["seed", "data_seed", "queries", "policy", "share"]
    rows = table[table["policy"].notna()].assign(queries=_queries)
    test, validation = (rows[rows["metric"] == f"policy_{part}accuracy"] for part in ("", "validation_"))
    test = test.assign(error=sampling_error(test))
    validation = validation[[*keys, "value"]].rename(columns={"value": "validation"})
    return test.merge(validation, on=keys)[COLUMNS]


def trained(table: pd.DataFrame, best: str) -> pd.DataFrame:
    """The measurements of models that were trained with a policy, and of softmax as the policy `best` at B/n = 1.

    `validation` is the accuracy on validation data in the longest training cell. `error` is √(p (1 − p) / sequences),
    as if each sequence were right or wrong as a whole: the largest that it can be.
    """
    if BUDGET not in table:
        return pd.DataFrame(columns=COLUMNS)
    scores = table[table["mixer"].eq("softmax") | table[BUDGET].notna()]
    scores = scores[scores["trained_as"].isna()] if "trained_as" in scores else scores
    scores = scores[scores["metric"].isin(["accuracy", "sequences"]) & scores["split"].isin(["test", "validation"])]
    scores = scores[scores["task.length"] == scores["task.length"].max()].assign(queries=_queries)
    accuracy, count = (scores[scores["metric"] == metric] for metric in ("accuracy", "sequences"))
    rows = accuracy[accuracy["split"] == "test"]
    validation = accuracy.loc[accuracy["split"] == "validation", ["run", "value"]]
    sequences = count.loc[count["split"] == "test", ["run", "queries", "value"]]
    rows = rows.merge(validation.rename(columns={"value": "validation"}), on="run")
    rows = rows.merge(sequences.rename(columns={"value": "sequences"}), on=["run", "queries"])
    full = rows["mixer"] == "softmax"
    return rows.assign(
        policy=rows["mixer"].str.split("/").str[0].mask(full, best),
        share=(rows[BUDGET] / rows["task.length"]).mask(full, 1.0),
        error=(rows["value"] * (1 - rows["value"]) / rows["sequences"]) ** 0.5,
    )[COLUMNS]


def _queries(rows: pd.DataFrame) -> pd.Series:
    """ "one" where a sequence has one query, "many" where every pair is asked for; "" otherwise."""
    if "task.queries" not in rows:
        return pd.Series("many", rows.index)
    return rows["task.queries"].map({1: "one"}).fillna("").mask(rows["task.queries"].isna(), "many")


def _at(rows: pd.DataFrame, policies: Sequence[str], shares: Sequence[float]) -> pd.DataFrame:
    """The measurements of these policies at these shares."""
    return rows[rows["policy"].isin(policies) & rows["share"].round(6).isin(np.round(shares, 6))]


def _absent(rows: pd.DataFrame, policies: Sequence[str], shares: Sequence[float]) -> str:
    """Which of these policies at these shares were not measured, as text."""
    return ", ".join(
        f"{policy} at B/n = {share:g}" for policy in policies for share in shares if _at(rows, [policy], [share]).empty
    )
