"""Dynamic access: what different queries can select from one history, where the read-out is linear in the query."""

import numpy as np

from recall_lab.theory.base import Numbers


def rank(n: Numbers, d_key: Numbers) -> Numbers:
    """Rank of the weights on n past tokens over all queries: min(n, d_k)."""
    return np.minimum(n, d_key)


def one_hot_residual(n: Numbers, d_key: Numbers) -> Numbers:
    """min_q ‖e_i − A(q)‖² for weights A(q) on n tokens, averaged over tokens i: 1 − rank/n = max(0, 1 − d_k/n)."""
    return np.maximum(0.0, 1 - np.asarray(d_key) / np.asarray(n))
