"""Claim 6: what a query can select, and how much softmax attention and a fixed state recall."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from recall_lab.claim.base import (
    Claim,
    Estimate,
    Line,
    at_least,
    at_most,
    contrast,
    exact,
    reported,
    scores,
    unless,
    untrained,
)
from recall_lab.families import best, mechanism, members
from recall_lab.theory import access as theory

PAIRS = "task.pairs"

Best = dict[float, tuple[str, float]]
"""Number of pairs → the series that is best there on validation, and its mean score."""


@dataclass(frozen=True, kw_only=True)
class DynamicAccess(Claim):
    """Softmax attention weighs every past token anew for each query; linear attention can only weigh the present token
    and scale the past as a whole, and therefore never matches softmax attention.

    Weights, without training: the matrix of weights of all queries on n > d_key past tokens has rank ≤ d_key where
    weights are linear in the query, and its one-hot residual, the mean squared distance from selecting a single token,
    is 1 − d_key/n. Softmax reaches rank n. Reported is which subsets of tokens softmax can select: only those that form
    a face of the convex hull of the keys.

    Trained on mqar: P, the capacity, is the largest trained number of pairs at which the best fixed-state mechanism
    reaches .99 on validation. Softmax minus the best fixed-state mechanism is at least 0.2 beyond capacity, at 4 P
    pairs, and at most 0.02 below it, at P/4 pairs. Models must have been trained with both numbers of pairs. At each
    number, the series with the best validation score represents softmax, or the fixed states. All series that are the
    best at some number of pairs must be trained to the end.
    """

    access: str = "access"
    """The experiment without training."""
    recall: str = "beyond_capacity"
    """The experiment on mqar."""
    linear_in_query: Sequence[str] = ("linear",)
    """The mechanisms whose weights are linear in the query."""
    softmax: str = "softmax"
    """The mechanism of the other arm; its variants are candidates on mqar."""
    tolerance: float = 1e-6
    """Largest difference of the one-hot residual from 1 − d_key/n."""
    solved: float = 0.99
    """Validation accuracy that defines the capacity P."""
    gain: float = 0.2
    """Least difference beyond capacity."""
    margin: float = 0.02
    """Largest difference below capacity."""

    def judge(self, table: pd.DataFrame) -> list[Line]:
        absent = [name for name in ("tokens", "d_key", "subset", PAIRS) if name not in table]
        table = table.reindex(columns=[*table.columns, *absent])
        without_training = table[(table["experiment"] == self.access) & table["tokens"].notna()]
        return [*self._weights(without_training), *self._recall(table[table["experiment"] == self.recall])]

    def _weights(self, rows: pd.DataFrame) -> list[Line]:
        count = len(self.linear_in_query)
        name = f"the {count} mechanisms linear in the query" if count > 1 else self.linear_in_query[0]
        longer = rows[(rows["tokens"] > rows["d_key"]) & rows["mixer"].isin(self.linear_in_query)]
        rank, residual = (longer[longer["metric"] == metric] for metric in ("rank", "one_hot_residual"))
        excess = rank["value"] - rank["d_key"]
        expected = theory.one_hot_residual(residual["tokens"].to_numpy(float), residual["d_key"].to_numpy(float))
        deviation = (residual["value"] - expected).abs()
        gaps = [
            ", ".join(mixer for mixer in self.linear_in_query if mixer not in set(part["mixer"]))
            for part in (rank, residual)
        ]
        return [
            at_most(
                f"{name}: largest rank of the weights over all queries, minus d_key",
                None if gaps[0] else exact(excess.max()), 0.0, f"rank of {gaps[0]} with more than d_key tokens",
            ),
            at_most(
                f"{name}: largest difference of the one-hot residual from 1 − d_key/n",
                None if gaps[1] else exact(deviation.max()), self.tolerance,
                f"one_hot_residual of {gaps[1]} with more than d_key tokens",
            ),
            *self._softmax_weights(rows[rows["mixer"] == self.softmax]),
        ]  # fmt: skip

    def _softmax_weights(self, rows: pd.DataFrame) -> list[Line]:
        """Rank and residual at the largest d_key and n; the share of subsets selected at the largest n per d_key."""
        wide = rows[rows["d_key"] == rows["d_key"].max()]
        longest = wide[wide["tokens"] == wide["tokens"].max()]
        rank, residual = (longest[longest["metric"] == metric] for metric in ("rank", "one_hot_residual"))
        name = f"{self.softmax}: rank of the weights over all queries, divided by n"
        if rank.empty:
            return [at_least(name, None, 1.0, f"rank of {self.softmax}")]
        where = f"at n = {rank['tokens'].max():.0f}, d_key = {rank['d_key'].max():.0f}"
        lines = [at_least(f"{name}, {where}", exact((rank["value"] / rank["tokens"]).min()), 1.0)]
        if len(residual):
            lines.append(reported(f"{self.softmax}: one-hot residual {where}", exact(residual["value"].max())))
        subsets = rows[rows["metric"] == "selectable"]
        for d_key, part in subsets.groupby("d_key"):
            part = part[part["tokens"] == part["tokens"].max()]
            shares = part.groupby("subset")["value"].mean()
            words = ", ".join(f"{share:.2g} of size {size:.0f}" for size, share in shares.items())
            tokens = part["tokens"].max()
            lines.append(
                reported(
                    f"{self.softmax}: share of subsets selected, n = {tokens:.0f}, d_key = {d_key:.0f}", None, words
                )
            )
        return lines

    def _recall(self, rows: pd.DataFrame) -> list[Line]:
        validation, test = scores(rows, "validation"), scores(rows)
        arms = (validation[validation["mixer"].map(mechanism) == self.softmax], members(validation, "fixed"))
        words = (self.softmax, "any mechanism with a fixed state")
        first, second = map(_best_by_pairs, arms)
        gap = " and ".join(word for word, arm in zip(words, (first, second), strict=True) if not arm)
        capacity = max((pairs for pairs, (_, score) in second.items() if score >= self.solved), default=None)
        lines = [self._judged(place, None, gap and f"validation accuracy of {gap}") for place in ("beyond", "below")]
        if gap:
            return lines
        if capacity is None:
            pairs, (series, score) = max(second.items(), key=lambda item: item[1][1])
            best_of_all = f"best is {series}, {score:.3f} at {pairs:g} pairs"
            reason = f"no fixed state reaches {self.solved:g} on validation; {best_of_all}"
            return [replace(line, reason=reason, missing=False) for line in lines]
        series, score = second[capacity]
        used = {name for name, _ in (*first.values(), *second.values())}
        obstacle = untrained(rows[rows["series"].isin(used)])
        return [
            reported(
                "P, the pairs up to which a fixed state suffices",
                exact(capacity),
                f"{series}, {score:.3f} on validation",
            ),
            *(
                unless(self._compare(place, pairs, first, second, test), obstacle)
                for place, pairs in (("beyond", 4 * capacity), ("below", capacity / 4))
            ),
            *_states(rows, 4 * capacity, first, second),
        ]

    def _compare(self, place: str, pairs: float, first: Best, second: Best, test: pd.DataFrame) -> Line:
        """The line at this number of pairs; undecided where it was not trained."""
        if pairs not in first or pairs not in second:
            line = self._judged(place, None)
            return replace(
                line,
                reason=f"no model was trained with {pairs:g} pairs, the largest number is {max(second):g}",
                missing=False,
            )
        here = test[test[PAIRS] == pairs]
        names = (first[pairs][0], second[pairs][0])
        estimate = contrast(*(here[here["series"] == name] for name in names))
        gap = f"test accuracy of {' and '.join(names)} at {pairs:g} pairs, with equal seeds"
        return self._judged(place, estimate, gap, f"{pairs:g} pairs: {names[0]} minus {names[1]}")

    def _judged(self, place: str, estimate: Estimate | None, gap: str = "", detail: str = "") -> Line:
        if place == "beyond":
            name = f"beyond capacity, {detail or f'4 P pairs: {self.softmax} minus the best fixed state'}"
            return at_least(name, estimate, self.gain, gap)
        name = f"below capacity, {detail or f'P/4 pairs: {self.softmax} minus the best fixed state'}"
        return at_most(name, estimate, self.margin, gap)


def _best_by_pairs(validation: pd.DataFrame) -> Best:
    found: Best = {}
    for pairs, part in validation.groupby(PAIRS):
        name = best(part)
        assert name is not None
        found[float(pairs)] = (name, float(part.loc[part["series"] == name, "value"].mean()))
    return found


def _states(rows: pd.DataFrame, pairs: float, *arms: Best) -> list[Line]:
    """The size of the states that are compared at this number of pairs."""
    sizes = rows[(rows["metric"] == "state_elements") & (rows["split"] == "test") & (rows[PAIRS] == pairs)]
    names = [arm[pairs][0] for arm in arms if pairs in arm]
    found = [f"{name} {sizes.loc[sizes['series'] == name, 'value'].max():,.0f}" for name in names]
    return [reported(f"state in elements at {pairs:g} pairs", None, ", ".join(found))] if found else []
