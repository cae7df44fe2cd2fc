"""The two families of mechanisms: those whose state grows with the sequence, and those whose state has a fixed size.

The best mechanism of a family is chosen on validation, so that no test score has a part in the choice.
"""

from typing import Literal

import pandas as pd

Family = Literal["growing", "fixed"]

GROWING = (
    "softmax", "forgetting", "top_k", "paged", "random_k", "stickbreaking_attn", "nsa", "dsa", "path_attn",
    "deltaformer",
)  # fmt: skip
"""Mechanisms whose state grows with every token. All others have a fixed state, windows and eviction policies included;
hybrids, which may combine both, and `module`, which may be any layer, belong to neither family."""


def mechanism(mixer: str) -> str:
    """The mechanism of a mixer: softmax of softmax/rotary."""
    return mixer.partition("/")[0]


def members(rows: pd.DataFrame, family: Family) -> pd.DataFrame:
    """The rows of the mechanisms of one family."""
    mechanisms = rows["mixer"].map(mechanism)
    growing = mechanisms.isin(GROWING)
    return rows[growing if family == "growing" else ~growing & ~mechanisms.isin(("hybrid", "module"))]


def best(validation: pd.DataFrame) -> str | None:
    """The series with the highest mean of `value`, among those with the most runs; None where there are no rows.

    validation  validation scores, one row per run and cell
    """
    if validation.empty:
        return None
    found = validation.groupby("series").agg(value=("value", "mean"), runs=("run", "nunique"))
    return str(found.loc[found["runs"] == found["runs"].max(), "value"].idxmax())
