"""Claim 4: what a write gate and a decay add to linear attention."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from recall_lab.claim.base import Claim, Line, at_least, contrast, mean, reported, unlearned, unless
from recall_lab.claim.compare import cells, difference, missing_points, of, rows_of
from recall_lab.results import REPLICATES

GAIN = 0.1
"""Least gain in accuracy that a gate is claimed to bring."""

DATA, FILLER, ALL = "value", "filler", "all"
"""Roles of tokens. A pair is complete at its value, so that is where it is written."""

HEADS = ["layer", "head"]


@dataclass(frozen=True, kw_only=True)
class Gates(Claim):
    """In S_t = γ_t S_{t−1} + σ_t k_t v_tᵀ, the write gate σ selects what enters the state, and the decay γ favours
    recent tokens.

    A line is undecided if no model that it compares has learned its task: on validation, at least half way from chance
    to 1 in some cell.

    Gain of each gate: test accuracy of linear attention with both gates learned, minus that with the gate in question
    fixed at 1, mean over all tested cells, is at least 0.10 on selective copying of 4 tokens and on one needle in
    noise.

    Selection: σ on data tokens minus σ on filler, mean over layers and heads, is positive. A model without gates may
    learn keys of norm zero for filler, so ‖k‖ is reported as well.

    Recency: on `updates`, which rewards it, queries with an answer younger than the median age are answered more
    accurately than the others, mean over the cells with updates. The half-life of γ is longer on the needle, which does
    not reward recency, than on `updates`.
    """

    copying: str = "selective_gates"
    """Experiment on selective copying."""
    data: int = 4
    """Number of tokens to copy."""
    needle: str = "needle_in_noise"
    """Experiment on one needle."""
    haystack: str = "noise"
    updates: str = "updates"
    """Experiment on updates."""
    both: str = "gated_linear"
    without_decay: str = "gated_linear/no_decay"
    without_write: str = "gated_linear/no_write"
    neither: str = "linear"

    def judge(self, table: pd.DataFrame) -> list[Line]:
        places = {
            f"selective copying of {self.data} tokens": self._rows(table, self.copying, "task.data", self.data),
            f"needle in {self.haystack}": self._rows(table, self.needle, "task.haystack", self.haystack),
        }
        lines: list[Line] = []
        for place, rows in places.items():
            lines += self._gains(place, rows)
        for place, rows in places.items():
            lines += self._selection(place, rows)
        needle = places[f"needle in {self.haystack}"]
        updates = self._rows(table, self.updates)
        return [*lines, self._by_age(updates, self.both), *self._beside(updates), *self._half_life(needle, updates)]

    def _rows(self, table: pd.DataFrame, experiment: str, name: str = "", level: object = None) -> pd.DataFrame:
        rows = table[table["experiment"] == experiment]
        return rows if not name or name not in rows else rows[rows[name] == level]

    def _gains(self, place: str, rows: pd.DataFrame) -> list[Line]:
        """The gain of each gate with the other learned too; reported: at trained lengths, and of one gate alone."""
        tested = _metric(rows, "accuracy", "test")
        validated = rows[(rows["split"] == "validation") & (rows["metric"] == "accuracy")]
        inside = tested[tested["task.length"].isin(validated["task.length"])] if "task.length" in tested else tested
        lines: list[Line] = []
        for gate, without, alone in (
            ("write gate", self.without_write, self.without_decay),
            ("decay", self.without_decay, self.without_write),
        ):
            gain, gap = difference(tested, self.both, without, cells(tested))
            missing = f"accuracy on {place} of {gap}"
            line = at_least(f"{place}: gain by the {gate}", gain, GAIN, missing)
            lines.append(unless(line, unlearned(rows[rows["mixer"].isin([self.both, without])])))
            trained = difference(inside, self.both, without, cells(inside))[0]
            lines.append(reported(f"{place}: gain by the {gate}, trained lengths only", trained))
            single = difference(tested, alone, self.neither, cells(tested))[0]
            lines.append(reported(f"{place}: gain by the {gate} without the other gate", single))
        return lines

    def _selection(self, place: str, rows: pd.DataFrame) -> list[Line]:
        sigma = of(_metric(rows, "gate_write"), self.both)
        parts = {role: _role(sigma, role) for role in (DATA, FILLER)}
        gap = missing_points(parts, [*cells(sigma), *HEADS])
        found = None if gap else contrast(parts[DATA], parts[FILLER], [*cells(sigma), *HEADS])
        missing = f"gate_write on {place} of {self.both}: {gap}"
        line = at_least(f"{place}: σ on data minus σ on filler", found, 0.0, missing)
        lines = [unless(line, unlearned(of(rows, self.both)))]
        k = _metric(rows, "k_norm")
        for mixer in (self.both, self.neither):
            own = [_role(of(k, mixer), role) for role in (DATA, FILLER)]
            lengths = [mean(rows) for rows in own]
            text = " and ".join(f"{length.value:.3g}" for length in lengths if length is not None)
            ratio = None if None in lengths else mean(_ratio(*own))
            lines.append(reported(f"{place}: ‖k‖ on data over ‖k‖ on filler, {mixer}", ratio, text))
        return lines

    def _by_age(self, rows: pd.DataFrame, mixer: str) -> Line:
        name = f"updates: accuracy of the younger half of answers minus that of the older half, {mixer}"
        own = of(_metric(rows, "accuracy_by_age"), mixer)
        gap = missing_points({mixer: own}, cells(own))
        line = at_least(name, None if gap else mean(_halves(own)), 0.0, f"accuracy_by_age on updates of {gap or mixer}")
        return unless(line, unlearned(of(rows, mixer)))

    def _beside(self, rows: pd.DataFrame) -> list[Line]:
        line = self._by_age(rows, self.neither)
        return [reported(line.name, line.estimate)]

    def _half_life(self, needle: pd.DataFrame, updates: pd.DataFrame) -> list[Line]:
        parts = {
            name: _half_lives(_role(of(_metric(rows, "gate_log_decay"), self.both), ALL))
            for name, rows in (("needle", needle), ("updates", updates))
        }
        gap = missing_points(parts, [])
        found = None if gap else contrast(parts["needle"], parts["updates"])
        missing = f"gate_log_decay of {self.both}: {gap}"
        rule = at_least("half-life of γ, needle over updates, as a power of 2", found, 0.0, missing)
        rule = unless(rule, unlearned(of(needle, self.both)) or unlearned(of(updates, self.both)))
        tokens = {name: mean(rows.assign(value=2 ** rows["value"])) for name, rows in parts.items()}
        return [rule, *(reported(f"half-life of γ in tokens, {name}", estimate) for name, estimate in tokens.items())]


def _metric(rows: pd.DataFrame, metric: str, split: str | None = None) -> pd.DataFrame:
    experiment = rows["experiment"].iloc[0] if len(rows) else ""
    return rows_of(rows, experiment, metric, split)


def _role(rows: pd.DataFrame, role: str) -> pd.DataFrame:
    return rows[rows["role"] == role] if "role" in rows else rows


def _ratio(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """The ratio of the means of each replicate."""
    parts = [rows.groupby(list(REPLICATES))["value"].mean() for rows in (first, second)]
    return (parts[0] / parts[1]).dropna().rename("value").reset_index()


def _half_lives(rows: pd.DataFrame) -> pd.DataFrame:
    """log₂ of the half-life ln 2 / (−g), in tokens, of each replicate; g is the mean log decay over its rows."""
    if rows.empty:
        return pd.DataFrame({name: [] for name in (*REPLICATES, "value")})
    decay = rows.groupby(list(REPLICATES))["value"].mean().clip(upper=-1e-12)
    return np.log2(np.log(2) / -decay).rename("value").reset_index()


def _halves(rows: pd.DataFrame) -> pd.DataFrame:
    """Per replicate and cell with updates: accuracy of the younger half of the answers minus that of the older half.

    The halves meet at the median age; accuracies are means over answers. The error is computed as if a
    sequence had one answer only.
    """
    if rows.empty or "task.updates" not in rows:
        return rows.iloc[:0]
    found = []
    for key, cell in rows[rows["task.updates"] > 0].groupby([*REPLICATES, *cells(rows)]):
        cell = cell.sort_values("age")
        young = (cell["count"].cumsum() - cell["count"] / 2 <= cell["count"].sum() / 2).to_numpy()
        if young.all() or not young.any():
            continue
        shares = [float(np.average(part["value"], weights=part["count"])) for part in (cell[young], cell[~young])]
        sequences = float(cell["test.probe_sequences"].iloc[0])
        error = (sum(share * (1 - share) for share in shares) / sequences) ** 0.5
        found.append({"seed": key[0], "data_seed": key[1], "value": shares[0] - shares[1], "error": error})
    return pd.DataFrame(found)
