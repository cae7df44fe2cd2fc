"""Number of bits that a state must hold to answer queries at a given error rate."""

import numpy as np
from scipy import special

from recall_lab.theory.base import Numbers


def binary_entropy(p: Numbers) -> Numbers:
    """H₂(p) = −p log₂ p − (1−p) log₂(1−p), in bits."""
    p = np.asarray(p, float)
    return (special.entr(p) + special.entr(1 - p)) / np.log(2)


def bits_kept(n: Numbers, error: Numbers, candidates: Numbers) -> Numbers:
    """Bits needed to answer n pairs at error rate e (Fano's inequality): n (log₂ V − H₂(e) − e log₂(V−1)).

    Zero where the error rate is that of guessing, 1 − 1/V, or larger.
    """
    v = np.asarray(candidates, float)
    error = np.minimum(np.asarray(error, float), 1 - 1 / v)
    return np.asarray(n) * np.maximum(0.0, np.log2(v) - binary_entropy(error) - error * np.log2(np.maximum(v - 1, 1)))
