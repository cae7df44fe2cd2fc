"""Closed forms for the recall of sums, delta rules and decays, versus simulation in numpy."""

import numpy as np
import pytest

from recall_lab.theory import (
    base,
    decay,
    delta_rule,
    keys,
    least_squares,
    linear_attention,
)


def unit(rng, *shape):
    return unit_rows(rng.standard_normal(shape))


def unit_rows(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def read(S, k, candidates):
    """Squared error and top-1 of the read-out of every key; the first n candidates are the stored values."""
    o = k @ S
    error = np.square(o - candidates[..., : k.shape[-2], :]).sum(-1)
    return error, (o @ candidates.swapaxes(-1, -2)).argmax(-1) == np.arange(k.shape[-2])


def linear(rng, n, d, candidates, runs, decay=1.0, keys=unit):
    """Error and top-1 by age (0 first), averaged over runs."""
    k, c = keys(rng, runs, n, d), unit(rng, runs, candidates, d)
    weight = decay ** np.arange(n)[::-1, None]
    error, right = read((weight * k).swapaxes(1, 2) @ c[:, :n], k, c)
    return error.mean(0)[::-1], right.mean(0)[::-1]


def delta(rng, n, d, candidates, runs, beta=1.0, passes=1, keys=unit):
    k, c = keys(rng, runs, n, d), unit(rng, runs, candidates, d)
    S = np.zeros((runs, d, d))
    for i in np.tile(np.arange(n), passes):
        key = k[:, i, :, None]
        S += beta * key * (c[:, i, None] - key.swapaxes(1, 2) @ S)
    error, right = read(S, k, c)
    return error.mean(0)[::-1], right.mean(0)[::-1]


def relu(rng, *shape):
    return unit_rows(np.maximum(rng.standard_normal(shape), 0))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize(("n", "d"), [(16, 32), (64, 64), (200, 32)])
def test_linear_error_cosine_and_share(rng, n, d):
    error, _ = linear(rng, n, d, n, 400)
    assert error.mean() == pytest.approx(linear_attention.error(n, d), rel=0.03)
    k, v = unit(rng, 100, n, d), unit(rng, 100, n, d)
    weights = k @ k.swapaxes(1, 2)
    o = weights @ v
    assert np.mean((o * v).sum(-1) / np.linalg.norm(o, axis=-1)) == pytest.approx(
        linear_attention.cosine(n, d), rel=0.03
    )
    assert np.mean(1 / np.abs(weights).sum(-1)) == pytest.approx(
        linear_attention.share(n, d), rel=0.01 if n >= d else 0.05
    )


def test_orthogonal_keys_are_exact_up_to_their_width(rng):
    keys = np.linalg.qr(rng.standard_normal((16, 16)))[0]
    v = unit(rng, 16, 16)
    assert np.abs(keys @ (keys.T @ v) - v).max() < 1e-12


def test_coordinate_cdf(rng):
    x = unit(rng, 200_000, 5)[:, 0]
    for at in (-0.6, 0.0, 0.3, 0.9):
        assert np.mean(x < at) == pytest.approx(base.coordinate_cdf(at, 5), abs=0.004)


@pytest.mark.parametrize(("n", "measured"), [(64, 0.999), (128, 0.943), (256, 0.554)])
def test_linear_top1_at_4096_candidates(rng, n, measured):
    _, right = linear(rng, n, 64, 4096, 1024 // n)
    assert right.mean() == pytest.approx(measured, abs=0.04)
    assert linear_attention.top1(n, 64, 64, 4096) == pytest.approx(measured, abs=0.015)


@pytest.mark.parametrize("candidates", [256, 1024])
@pytest.mark.parametrize(("d", "limit"), [(16, 0.07), (32, 0.06), (64, 0.035)])
def test_top1_at_every_load(rng, d, limit, candidates):
    for n in (d // 2, d, 2 * d, 4 * d):
        _, right = linear(rng, n, d, candidates, 3200 // n)
        assert base.top1(1.0, (n - 1) / d, n - 1, d, d, candidates) == pytest.approx(right.mean(), abs=limit)


def test_top1_broadcasts_and_is_a_probability():
    n = np.arange(1, 300, 7)
    p = base.top1(1.0, (n - 1) / 32, n - 1, 32, 32, 512)
    assert p.shape == n.shape
    assert p[0] == pytest.approx(1)
    assert np.all((p >= 0) & (p <= 1 + 1e-12))
    assert np.all(np.diff(p) < 0)


def test_linear_capacity_is_where_top1_falls():
    for d in (64, 128, 256):
        assert 0.3 < linear_attention.top1(linear_attention.capacity(d, d, 4096), d, d, 4096) < 0.9
    assert linear_attention.capacity(256, 256, 4096) > 3.5 * linear_attention.capacity(128, 128, 4096)


def test_least_squares(rng):
    for n, d in [(20, 32), (32, 32), (64, 32), (200, 32)]:
        k, v = unit(rng, 20, n, d), unit(rng, 20, n, d)
        error = np.square(k @ (np.linalg.pinv(k) @ v) - v).sum(-1)
        assert error.mean() == pytest.approx(least_squares.error(n, d), rel=0.02, abs=1e-12)


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.1])
def test_delta_error_by_age(rng, beta):
    error, right = delta(rng, 64, 64, 1024, 60, beta)
    expected = delta_rule.error(np.arange(64), 64, 64, beta)
    assert error.mean() == pytest.approx(delta_rule.error(np.arange(64), 64, 64, beta).mean(), rel=0.02)
    smooth = np.ones(8) / 8
    assert np.convolve(error, smooth, "valid") == pytest.approx(np.convolve(expected, smooth, "valid"), rel=0.06)
    predicted = delta_rule.top1(np.arange(64), 64, 64, 64, 1024, beta)
    assert right.mean() == pytest.approx(predicted.mean(), abs=0.03)


def test_delta_at_one_is_the_formula_as_published():
    d, n = 64, 80
    norm = d * (1 - (1 - 1 / d) ** np.arange(n))
    for age in (0, 1, 17, 79):
        a = 1.0
        for t in range(n - age, n):
            a = a * (1 - 2 / d + 2 / (d * (d + 2))) + norm[t] / (d * (d + 2)) + 1 / d
        assert delta_rule.power(age, n, d) == pytest.approx(a, rel=1e-12)
    assert delta_rule.error(np.arange(64), 64, 64).mean() == pytest.approx(0.598, abs=0.001)


def test_delta_lifetime(rng):
    assert delta_rule.lifetime(64, 64, 1024) == pytest.approx(55, abs=0.5)
    _, right = delta(rng, 192, 64, 1024, 20)
    assert right.sum() == pytest.approx(59.5, abs=4)
    assert delta_rule.top1(np.arange(192), 192, 64, 64, 1024).sum() == pytest.approx(right.sum(), abs=4)


def test_delta_with_more_passes_approaches_least_squares(rng):
    measured = [delta(rng, 64, 64, 64, 20, passes=passes)[0].mean() for passes in (1, 2, 4, 8)]
    assert measured == pytest.approx([0.617, 0.421, 0.299, 0.210], abs=0.03)


def test_ranking_reversal(rng):
    sum_error, sum_right = linear(rng, 128, 64, 4096, 8)
    error, right = delta(rng, 128, 64, 4096, 8)
    assert error.mean() < sum_error.mean() - 0.5
    assert right.mean() < sum_right.mean() - 0.3
    assert right.mean() == pytest.approx(delta_rule.top1(np.arange(128), 128, 64, 64, 4096).mean(), abs=0.03)
    _, gentle = delta(rng, 128, 64, 4096, 8, beta=0.1)
    assert gentle.mean() == pytest.approx(delta_rule.top1(np.arange(128), 128, 64, 64, 4096, 0.1).mean(), abs=0.03)
    assert gentle.mean() > 0.9


def test_correlated_keys(rng):
    k = relu(rng, 1500, 64)
    cosine = (k @ k.T)[np.triu_indices(1500, 1)]
    mean, variance = keys.cosine_moments("relu", 64)
    assert cosine.mean() == pytest.approx(mean, abs=0.005)
    assert cosine.var() == pytest.approx(variance, rel=0.05)
    for n in (16, 32, 128):
        error, right = linear(rng, n, 64, 1024, 30, keys=relu)
        noise = linear_attention.error(n, 64, mean, variance)
        assert error.mean() == pytest.approx(noise, rel=0.08)
        assert right.mean() == pytest.approx(linear_attention.top1(n, 64, 64, 1024, mean, variance), abs=0.08)
    assert delta(rng, 128, 64, 1024, 10, keys=relu)[1].mean() == pytest.approx(0.377, abs=0.05)


@pytest.mark.parametrize(("gamma", "expected", "measured"), [(0.9, 19, 20), (0.97, 47, 48), (0.99, 88, 96)])
def test_fixed_decay(rng, gamma, expected, measured):
    assert decay.lifetime(gamma, 64, 64, 1024) == pytest.approx(expected, abs=0.5)
    error, right = linear(rng, 256, 64, 1024, 40, decay=gamma)
    ages = np.arange(256)
    assert error.mean() == pytest.approx(decay.error(ages, 256, 64, gamma).mean(), rel=0.03)
    assert right.sum() == pytest.approx(measured, abs=5)
    assert decay.top1(ages, 256, 64, 64, 1024, gamma).sum() == pytest.approx(right.sum(), abs=4)


def test_moments_of_correlated_keys(rng):
    common = unit(rng, 1, 1, 32)
    k = unit(rng, 200, 40, 32)
    k = unit_rows(k - (k * common).sum(-1, keepdims=True) * common)
    k = 0.4**0.5 * common + 0.6**0.5 * k
    cosines = (k @ k.swapaxes(1, 2))[:, *np.triu_indices(40, 1)]
    mean, variance = keys.cosine_moments("correlated", 32, 0.4)
    assert cosines.mean() == pytest.approx(mean, abs=0.002)
    assert cosines.var() == pytest.approx(variance, rel=0.03)
    with pytest.raises(ValueError, match="keys='softplus': must be random, correlated or relu"):
        keys.cosine_moments("softplus", 32)


def test_cosine_by_age(rng):
    """Within .03 of simulation, eight neighbouring ages averaged."""
    n, d = 64, 32
    k, v = unit(rng, 200, n, d), unit(rng, 200, n, d)
    weight = 0.95 ** np.arange(n)[::-1, None]
    faded = k @ ((weight * k).swapaxes(1, 2) @ v)
    S = np.zeros((200, d, d))
    for i in range(n):
        S += k[:, i, :, None] * (v[:, i, None] - k[:, i, None] @ S)
    measured = [((o * v).sum(-1) / np.linalg.norm(o, axis=-1)).mean(0)[::-1] for o in (faded, k @ S)]
    ages = np.arange(n)
    expected = decay.cosine(ages, n, d, 0.95), delta_rule.cosine(ages, n, d)
    for found, law in zip(measured, expected, strict=True):
        assert found.reshape(-1, 8).mean(1) == pytest.approx(law.reshape(-1, 8).mean(1), abs=0.03)
    assert linear_attention.cosine(n, d) == pytest.approx(decay.cosine(5, n, d, 1.0))


def test_top1_to_six_digits():
    """Simulation leaves a freedom of some hundredths, in which a wrong constant would hide."""
    assert base.top1(1.0, 63 / 32, 63, 32, 32, 256) == pytest.approx(0.723803626, rel=1e-6)
    assert base.top1(0.5, 1.2, 40, 16, 24, 100, 0.05) == pytest.approx(0.199773103, rel=1e-6)
    assert base.top1(1.0, 3.0, 99, 16, 32, 500, 0.1) == pytest.approx(0.399649055, rel=1e-6)
    assert delta_rule.top1(5, 30, 16, 16, 64, 0.5) == pytest.approx(0.892548211, rel=1e-6)
    assert decay.top1(5, 30, 16, 16, 64, 0.9) == pytest.approx(0.784692158, rel=1e-6)
    assert linear_attention.top1(30, 16, 16, 64) == pytest.approx(0.499332407, rel=1e-6)
    assert linear_attention.top1(30, 16, 16, 64, 0.1, 0.02) == pytest.approx(0.759086658, rel=1e-6)


def test_coordinate_cdf_in_three_dimensions_is_uniform():
    x = np.array([-2, -1, -0.5, 0, 0.3, 1, 2])
    assert base.coordinate_cdf(x, 3) == pytest.approx(np.clip((1 + x) / 2, 0, 1))


def test_effective_count_of_fading_powers():
    """(Σp)²/Σp² of p = fade^(2j), at most the number of pairs."""
    p = 0.9 ** (2 * np.arange(1000))
    assert base.effective_count(1000, 0.9) == pytest.approx(p.sum() ** 2 / np.square(p).sum())
    assert base.effective_count(5, 0.99) == base.effective_count(5, 1.0) == 4


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_decay_against_the_sum_of_its_powers(gamma):
    """Ten pairs with four-dimensional keys, the answer three pairs old."""
    kept, noise = gamma**3, sum(gamma ** (2 * j) for j in range(10) if j != 3) / 4
    assert decay.signal(3, gamma) == pytest.approx(kept)
    assert decay.noise(3, 10, 4, gamma) == pytest.approx(noise)
    assert decay.error(3, 10, 4, gamma) == pytest.approx((1 - kept) ** 2 + noise)
    assert decay.cosine(3, 10, 4, gamma) == pytest.approx(kept / (kept**2 + noise) ** 0.5)
    assert decay.lifetime(0.5, 2, 2, 4096) == 0


def test_linear_attention_by_hand():
    """n = 9, d_key = 4: eight other pairs; ln 1024 = 6.931472."""
    assert linear_attention.error(9, 4) == pytest.approx(2)
    assert linear_attention.error(9, 4, 0.5, 0.125) == pytest.approx(3)
    assert linear_attention.cosine(9, 4) == pytest.approx(3**-0.5)
    assert linear_attention.share(9, 4) == pytest.approx(1 / (1 + 8 * (1 / (2 * np.pi)) ** 0.5))
    assert linear_attention.capacity(64, 32, 1024) == pytest.approx(64 * (32 / (2 * 6.931472) - 1), rel=1e-6)


def test_the_delta_rule_at_half_strength_by_its_recursion():
    """Exact power of the read-out of the pair of age 2 among 5, d = 8, β = 1/2."""
    d, beta, norm = 8, 0.5, [0.0]
    for _ in range(5):
        norm.append(norm[-1] * (1 - (2 * beta - beta**2) / d) + beta**2)
    power = (1 - beta) ** 2 * norm[2] / d + beta**2
    for step in (3, 4):
        shrink = 1 - 2 * beta / d + 2 * beta**2 / (d * (d + 2))
        power = power * shrink + beta**2 * norm[step] / (d * (d + 2)) + beta**2 / d
    signal = beta * (1 - beta / d) ** 2
    assert delta_rule.signal(2, d, beta) == pytest.approx(signal)
    assert delta_rule.power(2, 5, d, beta) == pytest.approx(power, rel=1e-12)
    assert delta_rule.error(2, 5, d, beta) == pytest.approx(1 - 2 * signal + power, rel=1e-12)
    assert delta_rule.cosine(2, 5, d, beta) == pytest.approx(signal / power**0.5, rel=1e-12)
