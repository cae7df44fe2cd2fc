"""The closed forms: what mechanisms must remember of random keys and values, before anything is trained.

n  pairs written                        V  candidate values an answer is picked from (`candidates`)
d_k, d_v  widths of a key and a value   m  age: pairs written after the one that is read

Keys and values are uniform unit vectors unless a function says otherwise; a read-out is o = Sᵀk for a stored key k
(no 1/√d), right when the candidate nearest to o is the value stored with k. Every function takes numbers or arrays
that broadcast. They are the lines under measured points, and `tests/test_theory.py` holds each against simulation.
"""

import numpy as np
from scipy import special, stats

Numbers = np.ndarray | np.number | float | int

# Linear attention.


def linear_error(n: Numbers, d_key: Numbers, cosine: float = 0.0, variance: Numbers | None = None) -> Numbers:
    """Expected squared error of linear attention's read-out: (n−1)(c² + var), with 1/d_k for var where keys are random.

    cosine, variance: mean and variance of the cosine between two keys; values are random in any case.
    """
    spread = 1 / np.asarray(d_key, float) if variance is None else np.asarray(variance, float)
    return (np.asarray(n) - 1) * (cosine**2 + spread)


def linear_cosine(n: Numbers, d_key: Numbers) -> Numbers:
    """Cosine between linear attention's read-out and the value: 1/√(1 + (n−1)/d_k)."""
    return 1 / np.sqrt(1 + linear_error(n, d_key))


def linear_share(n: Numbers, d_key: Numbers) -> Numbers:
    """The target's share of Σ|A|: 1/(1 + (n−1)√(2/(π d_k))), the other weights being |k·k'| ≈ |N(0, 1/d_k)|.

    Within 1 % of simulation from n ≈ d_k on, 2 % below.
    """
    return 1 / (1 + (np.asarray(n) - 1) * np.sqrt(2 / (np.pi * np.asarray(d_key))))


def linear_capacity(d_key: Numbers, d_value: Numbers, candidates: Numbers) -> Numbers:
    """Pairs up to which linear attention's top-1 typically holds: d_k (d_v/(2 ln V) − 1), growing as d²."""
    return np.asarray(d_key) * (np.asarray(d_value) / (2 * np.log(candidates)) - 1)


def coordinate_cdf(x: Numbers, d: Numbers) -> Numbers:
    """F_d(x), the distribution of one coordinate of a uniform unit vector in d dimensions.

    (1 + x)/2 is distributed as Beta((d−1)/2, (d−1)/2).
    """
    half = (np.asarray(d, float) - 1) / 2
    return special.betainc(half, half, np.clip((1 + np.asarray(x, float)) / 2, 0, 1))


def linear_top1(n: Numbers, d_key: Numbers, d_value: Numbers, candidates: Numbers) -> Numbers:
    """Top-1 of linear attention, to leading order.

    With R = (n−1)/d_k, ‖o‖² = 1 + 2√(R/d_v) z + R and z ~ N(0, 1),

        P = E_z[ F_{d_v}((1 + √(R/d_v) z)/‖o‖)^{V−n} · Φ((1 + √(R/d_v) z)/√(‖o‖²/d_v + 1/d_k))^{n−1} ]:

    V − n candidates were never stored, n − 1 belong to other keys. Pessimistic past the threshold (by .05 at d = 64,
    .14 at d = 16), where `top1` is closer.
    """
    z, weight = np.polynomial.hermite_e.hermegauss(64)
    n, d_key, d_value, candidates = (np.asarray(x, float)[..., None] for x in (n, d_key, d_value, candidates))
    load = (n - 1) / d_key
    score = 1 + np.sqrt(load / d_value) * z
    length = np.maximum(1 + 2 * np.sqrt(load / d_value) * z + load, 1e-300)
    unseen = coordinate_cdf(score / np.sqrt(length), d_value) ** np.maximum(candidates - n, 0)
    stored = special.ndtr(score / np.sqrt(length / d_value + 1 / d_key)) ** (n - 1)
    return (unseen * stored) @ (weight / weight.sum())


def top1(
    signal: Numbers,
    noise: Numbers,
    others: Numbers,
    d_key: Numbers,
    d_value: Numbers,
    candidates: Numbers,
    cosine: float = 0.0,
) -> Numbers:
    """Probability that the candidate nearest to a read-out o = s v + Σ_j w_j v_j is the right one.

    signal, noise, others: s, N = E Σ w_j², and how many stored pairs share that noise; cosine: the mean of w_j.
    As `linear_top1`, with s for 1 and w = N/others for 1/d_k, and with what a finite size changes. The noise's power
    varies: N χ²_{d_v−1}/d_v for the values, and for the keys a Γ with the relative variance of a mean of `others`
    squared cosines. The scores of stored candidates are sums of two bounded coordinates, not Gaussian: F_D, with D
    matched to their kurtosis. Within .03 of simulation for d ≥ 64, .06 at 16–32.
    """
    z, z_weight = np.polynomial.hermite_e.hermegauss(16)
    u, u_weight = np.polynomial.legendre.leggauss(8)
    u, u_weight = (u + 1) / 2, u_weight / 2
    args = (signal, noise, others, d_key, d_value, candidates)
    s, noise, others, d_key, d_value, v = (np.asarray(x, float)[..., None, None, None] for x in args)
    count = np.maximum(others, 1)
    power = np.maximum(noise / count, 1e-300)
    direct = np.maximum(power - cosine**2, 1e-9 * power)
    shape = count * (d_key + 2) / np.maximum(d_key - 1, 1) / (2 * direct / power * (2 - direct / power))
    noise = noise * special.gammaincinv(shape, u[:, None, None]) / shape
    across = noise * 2 * special.gammaincinv((d_value - 1) / 2, u[:, None]) / d_value
    score = s + np.sqrt(noise / d_value) * z
    length = np.maximum(score**2 + across, 1e-300)
    spread = length / d_value
    kurtosis = (spread**2 / (d_value + 2) + direct**2 / (d_key + 2)) / (spread + direct) ** 2
    d_sum = 1 / kurtosis - 2
    unseen = coordinate_cdf(score / np.sqrt(length), d_value) ** np.maximum(v - 1 - others, 0)
    stored = coordinate_cdf((score - cosine) / np.sqrt((spread + direct) * d_sum), d_sum) ** others
    return np.einsum("...ijk,i,j,k->...", unseen * stored, u_weight, u_weight, z_weight / z_weight.sum())


# Least squares.


def least_squares_error(n: Numbers, d_key: Numbers) -> Numbers:
    """Squared error of the best linear map from keys to values: 0 up to n = d_k, then 1 − d_k/n."""
    return np.maximum(0.0, 1 - np.asarray(d_key) / np.asarray(n))


# The delta rule in one pass.


def delta_signal(age: Numbers, d_key: Numbers, beta: float = 1.0) -> Numbers:
    """Weight of a pair in the delta rule's read-out of its key, `age` pairs later: β (1 − β/d)^m."""
    return beta * (1 - beta / np.asarray(d_key, float)) ** np.asarray(age)


def delta_power(age: Numbers, n: Numbers, d_key: Numbers, beta: float = 1.0) -> Numbers:
    """E‖Sᵀk‖² of the delta rule's read-out of the pair of that age, after n pairs.

    With F_t = E‖S_t‖_F², F ← F (1 − (2β−β²)/d) + β², a pair written at t = n − m is read with
    a = (1−β)² F_{t−1}/d + β² at first, and with each later pair
    a ← a (1 − 2β/d + 2β²/(d(d+2))) + β² F/(d(d+2)) + β²/d. Exact; for β = 1, F_t = d (1 − (1−1/d)^t).
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


def delta_error(age: Numbers, n: Numbers, d_key: Numbers, beta: float = 1.0) -> Numbers:
    """Squared error of the delta rule's read-out of the pair of that age, after n pairs: 1 − 2·signal + power.

    Schlag et al., arXiv 2102.11174, state the rule; the recursion for random keys is in `delta_power`.
    """
    return 1 - 2 * delta_signal(age, d_key, beta) + delta_power(age, n, d_key, beta)


def delta_mean_error(n: int, d_key: int, beta: float = 1.0) -> float:
    """`delta_error` averaged over all n pairs."""
    return float(np.mean(delta_error(np.arange(n), n, d_key, beta)))


def delta_top1(
    age: Numbers, n: Numbers, d_key: Numbers, d_value: Numbers, candidates: Numbers, beta: float = 1.0
) -> Numbers:
    """Top-1 of the delta rule's read-out of the pair of that age: `top1` with its signal and what else it reads."""
    signal = delta_signal(age, d_key, beta)
    noise = np.maximum(delta_power(age, n, d_key, beta) - signal**2, 0)
    return top1(signal, noise, _sharing(n, 1 - beta / np.asarray(d_key, float)), d_key, d_value, candidates)


def delta_lifetime(d_key: Numbers, d_value: Numbers, candidates: Numbers) -> Numbers:
    """Age up to which the delta rule (β = 1) answers right: (d_k/2) ln(1 + d_v/(2 ln V))."""
    return np.asarray(d_key) / 2 * np.log1p(np.asarray(d_value) / (2 * np.log(candidates)))


# Correlated keys.

RELU_COSINE = 1 / np.pi
"""Mean cosine between two ReLU'd Gaussian vectors: (E relu)²/E relu² = (1/2π)/(1/2)."""


def relu_cosine_variance(d_key: Numbers) -> Numbers:
    """Variance of the cosine between two ReLU'd Gaussian vectors: (π² − 9/2)/(π² d), to first order in 1/d."""
    return (np.pi**2 - 4.5) / (np.pi**2 * np.asarray(d_key, float))


# Fixed decay.


def decay_signal(age: Numbers, gamma: float) -> Numbers:
    """Weight of a pair under a fixed decay, `age` pairs later: γ^m."""
    return gamma ** np.asarray(age, float)


def decay_noise(age: Numbers, n: Numbers, d_key: Numbers, gamma: float) -> Numbers:
    """Power of the other pairs in the read-out: (Σ_{j<n} γ^{2j} − γ^{2m})/d_k."""
    age, n = np.asarray(age, float), np.asarray(n, float)
    total = n if gamma == 1 else (1 - gamma ** (2 * n)) / (1 - gamma**2)
    return (total - gamma ** (2 * age)) / np.asarray(d_key, float)


def decay_error(age: Numbers, n: Numbers, d_key: Numbers, gamma: float) -> Numbers:
    """Squared error of decayed linear attention's read-out: (1 − γ^m)² + `decay_noise`."""
    return (1 - decay_signal(age, gamma)) ** 2 + decay_noise(age, n, d_key, gamma)


def decay_top1(
    age: Numbers, n: Numbers, d_key: Numbers, d_value: Numbers, candidates: Numbers, gamma: float
) -> Numbers:
    """Top-1 under a fixed decay, by age: `top1` with signal γ^m and the noise of `decay_noise`."""
    noise = decay_noise(age, n, d_key, gamma)
    return top1(decay_signal(age, gamma), noise, _sharing(n, gamma), d_key, d_value, candidates)


def decay_lifetime(gamma: Numbers, d_key: Numbers, d_value: Numbers, candidates: Numbers) -> Numbers:
    """Age up to which a fixed decay answers right: ln √((1−γ²) d_k d_v/(2 ln V)) / (−ln γ), at least 0."""
    gamma = np.asarray(gamma, float)
    load = (1 - gamma**2) * np.asarray(d_key) * np.asarray(d_value) / (2 * np.log(candidates))
    return np.maximum(0.0, np.log(load) / 2 / -np.log(gamma))


def half_life(gamma: Numbers) -> Numbers:
    """Tokens after which a decay has halved a weight: ln 2/(−ln γ)."""
    return np.log(2) / -np.log(np.asarray(gamma, float))


def _sharing(n: Numbers, fade: Numbers) -> Numbers:
    """Effective number (Σp)²/Σp² of pairs whose powers p fade by fade² a step, of the n − 1 there are."""
    fade = np.minimum(np.asarray(fade, float), 1 - 1e-12)
    return np.minimum(np.asarray(n, float) - 1, (1 + fade**2) / (1 - fade**2))


# Softmax, and raw scores.


def softmax_mass(n: Numbers, d_key: Numbers, sharpness: Numbers) -> Numbers:
    """Softmax's weight on the target with logits β k·q: 1/(1 + (n−1) e^{−β + β²/(2d)}), β being the sharpness."""
    beta = np.asarray(sharpness, float)
    return 1 / (1 + (np.asarray(n) - 1) * np.exp(-beta + beta**2 / (2 * np.asarray(d_key))))


def softmax_half_mass(d_key: Numbers, sharpness: Numbers | None = None) -> Numbers:
    """Pairs at which softmax's target weight has fallen to a half: e^{β − β²/(2d)}; e^{√d − 1/2} for β = √d."""
    d = np.asarray(d_key, float)
    beta = np.sqrt(d) if sharpness is None else np.asarray(sharpness, float)
    return np.exp(beta - beta**2 / (2 * d))


def raw_share_linear(n: Numbers, important: Numbers, other: Numbers) -> Numbers:
    """Weight share of one token of score a among n−1 of score b when weights are the scores: a/(a + (n−1) b)."""
    return important / (important + (np.asarray(n) - 1) * np.asarray(other))


def raw_share_softmax(n: Numbers, important: Numbers, other: Numbers) -> Numbers:
    """The same when weights are their exponentials: 1/(1 + (n−1) e^{b−a})."""
    return 1 / (1 + (np.asarray(n) - 1) * np.exp(np.asarray(other) - important))


# Dynamic access.


def access_rank(n: Numbers, d_key: Numbers) -> Numbers:
    """Rank of the weights over n past tokens, over all queries, where the read-out is linear in q: min(n, d_k)."""
    return np.minimum(n, d_key)


def one_hot_residual(n: Numbers, d_key: Numbers) -> Numbers:
    """‖e_i − A(q)‖² of the best query for token i, averaged over the n tokens: 1 − rank/n = max(0, 1 − d_k/n)."""
    return np.maximum(0.0, 1 - np.asarray(d_key) / np.asarray(n))


# What a budget covers.


def static_recall(budget: Numbers, n: Numbers, candidates: Numbers = np.inf) -> Numbers:
    """Recall when `budget` of n equiprobable pairs are kept without seeing the query: B/n, and 1/V on the rest."""
    kept = np.minimum(1.0, np.asarray(budget) / np.asarray(n))
    return kept + (1 - kept) / np.asarray(candidates, float)


def window_coverage(distance: Numbers, window: Numbers) -> Numbers:
    """Share of queries whose answer a window still holds: mean of [distance < w].

    distance: query place − value place, of every query, on the last axis. The window counts tokens, the current one
    and w − 1 before it.
    """
    return np.mean(np.asarray(distance) < np.asarray(window)[..., None], axis=-1)


def window_reach(window: Numbers, short_conv: Numbers) -> Numbers:
    """Distance below which one layer of sliding-window attention can still find a pair: w + c − 2, or 0 for c < 2.

    Key at p, value at p + 1, both seen through a causal convolution of c places. A place s holds both where
    p + 1 ≤ s ≤ p + c − 1, so the latest lies c − 2 behind the value and stays in the window so much longer. A model
    that reads at the value itself, as c = 2 forces, reaches w. Without a convolution no place holds both.
    """
    return np.where(np.asarray(short_conv) < 2, 0, np.asarray(window) + np.asarray(short_conv) - 2)


def superposed_recall(updates: Numbers, pairs: Numbers) -> Numbers:
    """Recall of the latest value when all values of a key weigh alike: E 1/(m+1), m ~ Binomial(updates, 1/pairs).

    = (1 − (1 − 1/pairs)^(updates+1)) / ((updates+1)/pairs): what a memory can do that only adds, noise aside.
    """
    bound, share = np.asarray(updates, float) + 1, 1 / np.asarray(pairs, float)
    return (1 - (1 - share) ** bound) / (bound * share)


# Information.


def binary_entropy(p: Numbers) -> Numbers:
    """H₂(p) = −p log₂ p − (1−p) log₂(1−p), in bits."""
    p = np.asarray(p, float)
    return (special.entr(p) + special.entr(1 - p)) / np.log(2)


def bits_kept(n: Numbers, error: Numbers, candidates: Numbers) -> Numbers:
    """Bits a state must hold to answer n pairs at that error rate (Fano): n (log₂ V − H₂(e) − e log₂(V−1)).

    Zero where the error is that of a guess, 1 − 1/V, or worse.
    """
    v = np.asarray(candidates, float)
    error = np.minimum(np.asarray(error, float), 1 - 1 / v)
    return np.asarray(n) * np.maximum(0.0, np.log2(v) - binary_entropy(error) - error * np.log2(np.maximum(v - 1, 1)))


LINEAR_BITS = 1 / (2 * np.log(2))
"""Bits per state entry of linear attention as d → ∞: n* log₂ V/(d_k d_v) = 1/(2 ln 2) = .72."""


def recall_bits(pairs: Numbers) -> Numbers:
    """Order of the bits any recurrent model's state needs for that many pairs of mqar: at least one a pair, Ω(N).

    Arora et al. (Based), arXiv 2402.18668, Theorem 3.1: by reduction from the index problem, whose instance has one
    bit a pair; the constant is left open.
    """
    return np.asarray(pairs, float)


def copying_error(state_bits: Numbers, vocab: Numbers, length: Numbers) -> Numbers:
    """Least error at copying uniform strings with a state of that many bits: 1 − 2^bits/D^L, at least 0.

    Jelassi et al., arXiv 2402.01032, Theorem 2.7 (for |S| = 2^bits states, D tokens, strings of length L).
    """
    exponent = np.asarray(state_bits, float) - np.asarray(length) * np.log2(vocab)
    return 1 - np.exp2(np.minimum(exponent, 0.0))


# Power laws.


def exponent(x: Numbers | tuple, y: Numbers | tuple, level: float = 0.95) -> tuple[float, float, float]:
    """Slope of log y on log x by least squares, and its confidence interval (Student's t; two points: just the slope).

    Raises ValueError for fewer than two different x, or for anything not positive.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    if len(np.unique(x)) < 2 or min(x.min(), y.min()) <= 0:
        raise ValueError("a power law needs two different x, and positive numbers")
    u, w = np.log(x) - np.log(x).mean(), np.log(y) - np.log(y).mean()
    slope, free = float(u @ w / (u @ u)), len(x) - 2
    error = np.sqrt(np.sum((w - slope * u) ** 2) / max(free, 1) / (u @ u))
    half = float(error * stats.t.ppf((1 + level) / 2, free)) if free else 0.0
    return slope, slope - half, slope + half
