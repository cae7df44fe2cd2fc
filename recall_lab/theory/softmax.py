"""Softmax attention: the weight of the target among n tokens."""

import numpy as np

from recall_lab.theory.base import Numbers


def mass(n: Numbers, d_key: Numbers, sharpness: Numbers) -> Numbers:
    """Weight of the target with logits β k·q, β the sharpness: 1/(1 + (n−1) e^{−β + β²/(2 d_k)})."""
    beta = np.asarray(sharpness, float)
    return 1 / (1 + (np.asarray(n) - 1) * np.exp(-beta + beta**2 / (2 * np.asarray(d_key))))


def half_mass(d_key: Numbers, sharpness: Numbers | None = None) -> Numbers:
    """Number of tokens at which `mass` is 1/2: e^{β − β²/(2 d_k)}; without a sharpness β = √d_k, e^{√d_k − 1/2}."""
    d = np.asarray(d_key, float)
    beta = np.sqrt(d) if sharpness is None else np.asarray(sharpness, float)
    return np.exp(beta - beta**2 / (2 * d))


def raw_share(n: Numbers, important: Numbers, other: Numbers) -> Numbers:
    """Weight of a token with logit a (`important`) among n − 1 with logit b (`other`): 1/(1 + (n−1) e^{b−a})."""
    return 1 / (1 + (np.asarray(n) - 1) * np.exp(np.asarray(other) - important))
