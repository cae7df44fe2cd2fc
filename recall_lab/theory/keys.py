"""Distributions of keys: mean and variance of the cosine between two keys, which set the noise of a sum of pairs."""

import numpy as np


def cosine_moments(keys: str, d_key: float, cosine: float = 0.0) -> tuple[float, float]:
    """Mean and variance of the cosine between two independent keys in d dimensions.

    random      uniform unit vectors: 0 and 1/d
    correlated  √c u + √(1−c) x, with x uniform on the sphere orthogonal to the common u: c and (1−c)²/(d−1); c: cosine
    relu        normalised ReLU of Gaussian vectors: 1/π, and (π² − 9/2)/(π² d) to first order in 1/d

    Raises ValueError for other distributions, whose moments have no closed form here.
    """
    if keys == "random":
        return 0.0, 1 / d_key
    if keys == "correlated":
        return cosine, (1 - cosine) ** 2 / (d_key - 1)
    if keys == "relu":
        return 1 / np.pi, (np.pi**2 - 4.5) / (np.pi**2 * d_key)
    raise ValueError(f"keys={keys!r}: must be random, correlated or relu, which have a closed form")
