"""The delta rule in one pass, S ← S + β k (v − Sᵀk)ᵀ (Schlag et al., arXiv 2102.11174), on random keys."""

import numpy as np

from recall_lab.theory import base
from recall_lab.theory.base import Numbers


def signal(age: Numbers, d_key: Numbers, beta: float = 1.0) -> Numbers:
    """Weight of a pair of age m in the read-out of its key: β (1 − β/d_k)^m."""
    return beta * (1 - beta / np.asarray(d_key, float)) ** np.asarray(age)


def power(age: Numbers, n: Numbers, d_key: Numbers, beta: float = 1.0) -> Numbers:
    """E‖Sᵀk‖² of the read-out of the pair of age m, after n pairs. Exact.

    F_t = E‖S_t‖_F² obeys F ← F (1 − (2β−β²)/d) + β² with d = d_k. The pair written at t = n − m starts with
    a = (1−β)² F_{t−1}/d + β²; each later pair changes it to
    a (1 − 2β/d + 2β²/(d(d+2))) + β² F/(d(d+2)) + β²/d. For β = 1, F_t = d (1 − (1−1/d)^t).
    """
    age, n, d = np.broadcast_arrays(np.asarray(age), np.asarray(n), np.asarray(d_key, float))
    keep, add = 1 - (2 * beta - beta**2) / d, beta**2
    limit = add / (1 - keep)
    written = n - age
    a = (1 - beta) ** 2 * limit * (1 - keep ** (written - 1)) / d + beta**2
    shrink = 1 - 2 * beta / d + 2 * beta**2 / (d * (d + 2))
    for step in range(int(age.max(initial=0))):
        norm = limit * (1 - keep ** (written + step))
        a = np.where(step < age, a * shrink + beta**2 * norm / (d * (d + 2)) + beta**2 / d, a)
    return a


def error(age: Numbers, n: Numbers, d_key: Numbers, beta: float = 1.0) -> Numbers:
    """Expected squared error of the read-out of the pair of age m, after n pairs: 1 − 2·signal + power."""
    return 1 - 2 * signal(age, d_key, beta) + power(age, n, d_key, beta)


def cosine(age: Numbers, n: Numbers, d_key: Numbers, beta: float = 1.0) -> Numbers:
    """Cosine between the read-out and the stored value, to leading order: signal/√power."""
    return signal(age, d_key, beta) / np.sqrt(power(age, n, d_key, beta))


def top1(age: Numbers, n: Numbers, d_key: Numbers, d_value: Numbers, candidates: Numbers, beta: float = 1.0) -> Numbers:
    """Top-1 accuracy of the read-out of the pair of age m: `base.top1` with noise power − signal²."""
    kept = signal(age, d_key, beta)
    noise = np.maximum(power(age, n, d_key, beta) - kept**2, 0)
    others = base.effective_count(n, 1 - beta / np.asarray(d_key, float))
    return base.top1(kept, noise, others, d_key, d_value, candidates)


def lifetime(d_key: Numbers, d_value: Numbers, candidates: Numbers) -> Numbers:
    """Age up to which a pair is typically recalled, at β = 1: (d_k/2) ln(1 + d_v/(2 ln V))."""
    return np.asarray(d_key) / 2 * np.log1p(np.asarray(d_value) / (2 * np.log(candidates)))
