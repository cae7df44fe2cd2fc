"""The closed form of recall_lab.theory that predicts a run of the oracle, chosen by its mechanism and settings."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from recall_lab.figure import base
from recall_lab.theory import budget, decay, delta_rule, keys, least_squares, linear_attention
from recall_lab.theory.base import Numbers

FAMILY = {
    "linear": "sum",
    "gated_linear": "sum",
    "gla": "sum",
    "hgrn2": "sum",
    "mamba2": "sum",
    "log_linear": "sum",
    "delta_rule": "delta",
    "gated_delta": "delta",
    "kda": "delta",
    "comba": "delta",
    "gated_delta_product": "delta",
    "rwkv7": "delta",
    "mesa": "least squares",
    "window": "budget",
    "sink_window": "budget",
    "heavy_hitter": "budget",
    "merging": "budget",
}
"""Mechanism → its family at gates that write every pair completely: S ← γ S + k vᵀ (sum), S ← S + β k (v − Sᵀk)ᵀ
(delta), the least-squares map, or softmax over a bounded cache (budget). Other mechanisms are drawn without a law."""

ASSUMED = {
    "oracle.centered": False,
    "oracle.passes": 1,
    "oracle.overwrites": 0,
    "oracle.gates.write": 1,
    "oracle.gates.a": 1,
    "oracle.gates.feedback": 1,
    "oracle.gates.level": 1,
    "oracle.gates.skip": 0,
    "mixer.feature_map": "identity",
    "mixer.normalizer": False,
}
"""Values of settings that all laws assume. Decay, write strength and key distribution are parameters of the laws."""

RETENTION = 1 - 2.0**-5
"""γ of RetNet's first head; the oracle has one head."""


@dataclass(frozen=True)
class Law:
    """The parameters of a closed form, for one run of the oracle."""

    family: str
    d_key: int
    d_value: int
    candidates: int
    gamma: float
    """Decay per step, γ."""
    beta: float
    """Write strength of the delta rule, β."""
    cosine: float
    """Mean cosine of two keys."""
    variance: float
    """Variance of the cosine of two keys."""
    budget: float | None
    """Number of cache slots; None for a mechanism without a budget."""

    def by_age(self, metric: str, age: np.ndarray, n: int) -> Numbers | None:
        """top1, error or cosine of the read-out of a pair at each age, after n pairs; None if there is no law."""
        sizes = (self.d_key, self.d_value, self.candidates)
        if self.family == "sum" and self.gamma == 1:
            found = {
                "top1": lambda: linear_attention.top1(n, *sizes, self.cosine, self.variance),
                "error": lambda: linear_attention.error(n, self.d_key, self.cosine, self.variance),
                "cosine": lambda: linear_attention.cosine(n, self.d_key) if self.cosine == 0 else None,
            }
        elif self.family == "sum":
            found = {
                "top1": lambda: decay.top1(age, n, *sizes, self.gamma),
                "error": lambda: decay.error(age, n, self.d_key, self.gamma),
                "cosine": lambda: decay.cosine(age, n, self.d_key, self.gamma),
            }
        elif self.family == "delta":
            found = {
                "top1": lambda: delta_rule.top1(age, n, *sizes, self.beta),
                "error": lambda: delta_rule.error(age, n, self.d_key, self.beta),
                "cosine": lambda: delta_rule.cosine(age, n, self.d_key, self.beta),
            }
        else:
            return None
        law = found[metric]()
        return None if law is None else np.broadcast_to(law, age.shape)

    def mean(self, metric: str, n: int) -> float | None:
        """top1 or error, averaged over at most 32 evenly spaced ages of the n pairs; None if there is no law."""
        if self.family == "least squares":
            return float(least_squares.error(n, self.d_key)) if metric == "error" else None
        if self.family == "budget":
            if metric != "top1" or self.budget is None:
                return None
            return float(budget.static_recall(self.budget, n))
        count = min(n, 32)
        law = self.by_age(metric, ((np.arange(count) + 0.5) * n / count).astype(int), n)
        return None if law is None else float(np.mean(law))

    def lifetime(self) -> float | None:
        """Age up to which a pair is typically recalled, for sums with decay and the delta rule at β = 1; else None."""
        sizes = (self.d_key, self.d_value, self.candidates)
        if self.family == "sum" and self.gamma < 1:
            return float(decay.lifetime(self.gamma, *sizes))
        return float(delta_rule.lifetime(*sizes)) if self.family == "delta" and self.beta == 1 else None


def law(run: pd.Series) -> Law | None:
    """The law of a run, from one of its rows; None if no closed form holds."""
    family = FAMILY.get(run["mixer"].split("/")[0])
    if family is None or any(_value(run, name, at) != at for name, at in ASSUMED.items()):
        return None
    if _value(run, "mixer.write", "learned") not in ("learned", "1", "1.0", 1):
        return None
    gamma = _gamma(run)
    d_key = int(run["oracle.d_key"])
    distribution = _value(run, "oracle.keys", "random")
    try:
        mean, variance = keys.cosine_moments(distribution, d_key, float(_value(run, "oracle.cosine", 0)))
    except ValueError:
        return None
    if distribution != "random" and not (family == "sum" and gamma == 1):
        return None
    if gamma != 1 and family != "sum":
        return None
    size = _value(run, "mixer.budget", None)
    return Law(
        family, d_key, int(_value(run, "oracle.d_value", d_key)), int(run["oracle.candidates"]), gamma,
        float(_value(run, "oracle.gates.beta", 1)), mean, variance, None if size is None else float(size),
    )  # fmt: skip


def of_equal(rows: pd.DataFrame, label: str) -> Law | None:
    """The law of several series that share a line: that of the first with a law.

    label  their names, as in the labels of `base.alike`
    """
    firsts = rows[rows["series"].isin(label.split(base.EQUAL))].drop_duplicates("series")
    return next(filter(None, (law(run) for _, run in firsts.iterrows())), None)


def _gamma(run: pd.Series) -> float:
    """The decay per step γ: the one given to the oracle, else the one that the mechanism's option fixes, else 1."""
    given = _value(run, "oracle.gates.log_decay", None)
    if given is not None:
        return float(np.exp(given))
    fixed = _value(run, "mixer.decay", "learned")
    named = {"learned": 1.0, "retention": RETENTION}
    return named[fixed] if fixed in named else float(fixed)


def _value(run: pd.Series, name: str, default: Any) -> Any:
    """The run's setting, or the default where it has none."""
    return default if name not in run or pd.isna(run[name]) else run[name]


def readings(table: pd.DataFrame) -> pd.DataFrame:
    """Rows top1 and error of the oracle's keyed read-outs; series are named without d_key and the number of pairs."""
    if "oracle.d_key" not in table or "pairs" not in table:
        return table[:0]
    rows = table[table["metric"].isin(["top1", "error"]) & table["oracle.d_key"].notna() & table["pairs"].notna()]
    return base.by_width(rows, "oracle.pairs")
