"""Claim 2: the two forms of linear attention."""

from dataclasses import dataclass

import pandas as pd

from recall_lab.claim.base import Claim, Line, at_most, exact, reported


@dataclass(frozen=True, kw_only=True)
class Equivalence(Claim):
    """The parallel form of linear attention and its recurrence S_t = S_{t−1} + k_t v_tᵀ, o_t = S_tᵀ q_t are the same
    function, and so are the two forms of every other mechanism.

    The parallel form is compared with the recurrence, applied position by position, in float64: outputs, final state,
    outputs of a sequence in two segments, and gradients with respect to q, k, v and every gate. Judged are the largest
    relative error of linear attention and the largest of all mechanisms.
    """

    tolerance: float = 1e-10
    """Largest relative error (rms of the difference over rms of the reference)."""
    linear: str = "linear"

    def judge(self, table: pd.DataFrame) -> list[Line]:
        rows = table[table["metric"] == "relative_error"]
        worst = rows.loc[rows.groupby("mixer")["value"].idxmax()].set_index("mixer")
        if self.linear not in worst.index:
            return [at_most("linear attention", None, self.tolerance, f"relative_error of {self.linear}")]
        largest = worst["value"].idxmax()
        return [
            at_most("linear attention: largest relative error", exact(worst["value"][self.linear]), self.tolerance),
            at_most(
                f"all {len(worst)} mechanisms: largest relative error", exact(worst["value"].max()), self.tolerance
            ),
            reported("the largest error", None, f"{largest}: {worst['part'][largest]}"),
        ]
