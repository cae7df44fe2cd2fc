"""Least squares: the best linear map from keys to values."""

import numpy as np

from recall_lab.theory.base import Numbers


def error(n: Numbers, d_key: Numbers) -> Numbers:
    """Expected squared error of the best linear map from keys to values: 0 up to n = d_k, then 1 − d_k/n."""
    return np.maximum(0.0, 1 - np.asarray(d_key) / np.asarray(n))
