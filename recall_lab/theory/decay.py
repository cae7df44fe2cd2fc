"""Linear attention with a fixed decay, S ← γ S + k vᵀ."""

import numpy as np

from recall_lab.theory import base
from recall_lab.theory.base import Numbers


def signal(age: Numbers, gamma: float) -> Numbers:
    """Weight of a pair of age m in the read-out of its key: γ^m."""
    return gamma ** np.asarray(age, float)


def noise(age: Numbers, n: Numbers, d_key: Numbers, gamma: float) -> Numbers:
    """Expected power of the other pairs in the read-out: (Σ_{j<n} γ^{2j} − γ^{2m})/d_k."""
    age, n = np.asarray(age, float), np.asarray(n, float)
    total = n if gamma == 1 else (1 - gamma ** (2 * n)) / (1 - gamma**2)
    return (total - gamma ** (2 * age)) / np.asarray(d_key, float)


def error(age: Numbers, n: Numbers, d_key: Numbers, gamma: float) -> Numbers:
    """Expected squared error of the read-out: (1 − γ^m)² + noise."""
    return (1 - signal(age, gamma)) ** 2 + noise(age, n, d_key, gamma)


def cosine(age: Numbers, n: Numbers, d_key: Numbers, gamma: float) -> Numbers:
    """Cosine between the read-out and the stored value, to leading order: signal/√(signal² + noise)."""
    kept = signal(age, gamma)
    return kept / np.sqrt(kept**2 + noise(age, n, d_key, gamma))


def top1(age: Numbers, n: Numbers, d_key: Numbers, d_value: Numbers, candidates: Numbers, gamma: float) -> Numbers:
    """Top-1 accuracy of the read-out of the pair of age m: `base.top1` with signal γ^m."""
    others = base.effective_count(n, gamma)
    return base.top1(signal(age, gamma), noise(age, n, d_key, gamma), others, d_key, d_value, candidates)


def lifetime(gamma: Numbers, d_key: Numbers, d_value: Numbers, candidates: Numbers) -> Numbers:
    """Age up to which a pair is typically recalled: ln √((1−γ²) d_k d_v/(2 ln V)) / (−ln γ), at least 0."""
    gamma = np.asarray(gamma, float)
    load = (1 - gamma**2) * np.asarray(d_key) * np.asarray(d_value) / (2 * np.log(candidates))
    return np.maximum(0.0, np.log(load) / 2 / -np.log(gamma))
