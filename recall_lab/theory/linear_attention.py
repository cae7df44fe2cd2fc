"""Linear attention, S = Σ k vᵀ: error, cosine, share of the target, top-1 accuracy and capacity of its read-out."""

import numpy as np

from recall_lab.theory import base
from recall_lab.theory.base import Numbers


def error(n: Numbers, d_key: Numbers, cosine: float = 0.0, variance: Numbers | None = None) -> Numbers:
    """Expected squared error ‖o − v‖² of a read-out: (n−1)(c² + var).

    cosine, variance: mean and variance of the cosine between two keys; without `variance`, 1/d_k (random keys).
    The values are random in either case.
    """
    spread = 1 / np.asarray(d_key, float) if variance is None else np.asarray(variance, float)
    return (np.asarray(n) - 1) * (cosine**2 + spread)


def cosine(n: Numbers, d_key: Numbers) -> Numbers:
    """Cosine between the read-out and the stored value: 1/√(1 + (n−1)/d_k)."""
    return 1 / np.sqrt(1 + error(n, d_key))


def share(n: Numbers, d_key: Numbers) -> Numbers:
    """Share of the target in Σ|A|: 1/(1 + (n−1)√(2/(π d_k))), since |k·k'| is close to |N(0, 1/d_k)|.

    Within 1 % of simulation for n ≥ d_k, and 2 % below.
    """
    return 1 / (1 + (np.asarray(n) - 1) * np.sqrt(2 / (np.pi * np.asarray(d_key))))


def raw_share(n: Numbers, important: Numbers, other: Numbers) -> Numbers:
    """Share of a token with weight a (`important`) among n − 1 with weight b (`other`): a/(a + (n−1) b)."""
    return important / (important + (np.asarray(n) - 1) * np.asarray(other))


def top1(
    n: Numbers,
    d_key: Numbers,
    d_value: Numbers,
    candidates: Numbers,
    cosine: float = 0.0,
    variance: Numbers | None = None,
) -> Numbers:
    """Top-1 accuracy of a read-out: `base.top1` with signal 1 and noise `error`, and the same arguments."""
    noise = error(n, d_key, cosine, variance)
    return base.top1(1.0, noise, np.asarray(n) - 1, d_key, d_value, candidates, cosine)


def capacity(d_key: Numbers, d_value: Numbers, candidates: Numbers) -> Numbers:
    """Number of pairs up to which a read-out is typically correct: d_k (d_v/(2 ln V) − 1), which grows as d²."""
    return np.asarray(d_key) * (np.asarray(d_value) / (2 * np.log(candidates)) - 1)


def superposed_recall(updates: Numbers, pairs: Numbers) -> Numbers:
    """Recall of a key's latest value where all values of a key have equal weight: E 1/(u+1), u ~ Bin(updates, 1/p).

    This is (1 − (1 − 1/p)^(updates+1)) / ((updates+1)/p) for p pairs, an upper bound for mechanisms that only add
    pairs: noise from other keys is neglected.
    """
    bound, share = np.asarray(updates, float) + 1, 1 / np.asarray(pairs, float)
    return (1 - (1 - share) ** bound) / (bound * share)
