"""Rows with 95 % intervals: a mean, a share, a distribution.

Measurements on one sequence are correlated, because they share its history. If the sequence of every measurement is
given, the interval treats each sequence as a cluster. It describes one run; to compare mechanisms, use several runs.
"""

import numpy as np
from jaxtyping import Shaped
from scipy import stats
from torch import Tensor

from recall_lab.folders import Row
from recall_lab.metrics import standard_error

LEVEL = 0.95
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

Numbers = Tensor | np.ndarray
Column = float | int | str
"""Types of the entries of a row."""


def share_row(metric: str, hits: Numbers, sequence: Numbers | None = None, **columns: Column) -> Row:
    """A row with the share of true `hits` (booleans), its 95 % interval (low, high) and the number of hits (count).

    sequence  the index of the sequence of each hit, in the shape of hits
    The interval is Wilson's. With `sequence` it is extended to that of `mean_row` where the latter is wider, and cut
    to [0, 1]. Raises ValueError if `hits` is empty.
    """
    row = mean_row(metric, hits, sequence, **columns)
    low, high = wilson(round(row["value"] * row["count"]), row["count"])
    if sequence is not None:
        low, high = max(0.0, min(low, row["low"])), min(1.0, max(high, row["high"]))
    return row | {"low": low, "high": high}


def mean_row(metric: str, values: Numbers, sequence: Numbers | None = None, **columns: Column) -> Row:
    """A row with the mean of the values, its 95 % interval (low, high) and the number of values (count).

    sequence  the index of the sequence of each value, in the shape of values
    The interval is Student's t, with sequences as clusters. Without `sequence`, or if all values are of one sequence,
    the values are treated as independent. A single value has an interval of width zero. Raises ValueError if there are
    no values.
    """
    numbers = _flat(values).astype(float)
    if not numbers.size:
        raise ValueError(f"{metric}: nothing to measure: no position of this trace has a query")
    mean = float(numbers.mean())
    groups = np.arange(numbers.size)
    if sequence is not None:
        found, index = np.unique(_flat(sequence), return_inverse=True)
        groups = index if len(found) > 1 else groups
    clusters, half = int(groups.max()) + 1, 0.0
    if clusters > 1:
        half = float(stats.t.ppf((1 + LEVEL) / 2, clusters - 1) * standard_error(numbers, groups))
    return {"metric": metric, "value": mean, "low": mean - half, "high": mean + half, "count": numbers.size, **columns}


def spread_rows(metric: str, values: Numbers, sequence: Numbers | None = None, **columns: Column) -> list[Row]:
    """Rows of a distribution: mean and quantiles. Column statistic: "mean", "q05", "q25", "q50", "q75", "q95"."""
    rows = [mean_row(metric, values, sequence, statistic="mean", **columns)]
    numbers = _flat(values).astype(float)
    for q, value in zip(QUANTILES, np.quantile(numbers, QUANTILES), strict=True):
        found = {"metric": metric, "value": float(value), "count": numbers.size, "statistic": f"q{round(100 * q):02d}"}
        rows.append(found | columns)
    return rows


def wilson(hits: int, total: int) -> tuple[float, float]:
    """95 % interval of a share of `hits` among `total` independent trials (Wilson 1927); [0, 1] where total is 0."""
    if total == 0:
        return 0.0, 1.0
    found = stats.binomtest(hits, total).proportion_ci(LEVEL, "wilson")
    return float(found.low), float(found.high)


def _flat(values: Numbers) -> Shaped[np.ndarray, "n"]:
    # numpy has no bfloat16.
    return np.ravel(values.detach().cpu().double().numpy() if isinstance(values, Tensor) else values)
