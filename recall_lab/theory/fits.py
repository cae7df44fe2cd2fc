"""Fits to measured points."""

from collections.abc import Sequence

import numpy as np
from scipy import stats


def exponent(
    x: np.ndarray | Sequence[float], y: np.ndarray | Sequence[float], level: float = 0.95
) -> tuple[float, float, float]:
    """Exponent of the power law y ∝ x^a: least-squares slope of log y on log x, and its confidence interval.

    The interval is Student's t; with two points it is the slope itself. Raises ValueError for fewer than two distinct
    x, or for a number that is not positive.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    if len(np.unique(x)) < 2 or min(x.min(), y.min()) <= 0:
        raise ValueError("x, y: must be positive, with at least two distinct x, to fit a power law")
    u, w = np.log(x) - np.log(x).mean(), np.log(y) - np.log(y).mean()
    slope, free = float(u @ w / (u @ u)), len(x) - 2
    # scipy.stats.linregress gives NaN for the error where y is constant.
    error = np.sqrt(np.sum((w - slope * u) ** 2) / max(free, 1) / (u @ u))
    half = float(error * stats.t.ppf((1 + level) / 2, free)) if free else 0.0
    return slope, slope - half, slope + half
