"""The coverage law: how many pairs of mqar one layer with a sliding window can recall, without any free parameter."""

from functools import cache

import numpy as np
import pandas as pd

from recall_lab.task.mqar import MQAR
from recall_lab.theory import budget

CELL = ["task.vocab", "task.length", "task.pairs", "task.gap_exponent"]
CONVOLUTION, BUDGET = "mixer.short_conv", "mixer.budget"
SEQUENCES = 8000
"""Number of sequences per cell that the law is averaged over: its standard error is at most .003 with 4 pairs."""


def windows(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that the law applies to: one layer with a sliding window, on mqar. Empty where a column is missing."""
    if not {*CELL, CONVOLUTION, BUDGET, "mixer", "task", "model.layers"} <= set(table):
        return table[:0]
    return table[(table["mixer"] == "window") & (table["task"] == "mqar") & (table["model.layers"] == 1)]


def law(facts: dict[str, float]) -> tuple[float, float]:
    """Expected accuracy if pairs are read at the position of the value, and if read as late as the convolution allows.

    An answer is correct if the window covers its pair, and otherwise guessed.
    facts  the columns CELL, CONVOLUTION and BUDGET of a run in one cell
    """
    distance, chance = _distances(*(facts[name] for name in CELL))
    reach = budget.window_reach(facts[BUDGET], np.array([2, facts[CONVOLUTION]]))
    covered = np.asarray(budget.window_coverage(distance, reach))
    early, late = covered + (1 - covered) * chance
    return float(early), float(late)


@cache
def _distances(vocab: float, length: float, pairs: float, gap_exponent: float) -> tuple[np.ndarray, float]:
    """Distances in tokens from value to query in sampled sequences of a cell, and the chance level."""
    task = MQAR(vocab=int(vocab), length=int(length), pairs=int(pairs), gap_exponent=gap_exponent)
    batch = task.sample(SEQUENCES, np.random.default_rng(0))
    return batch.age[batch.scored], task.chance
