"""Every closed form against simulation in plain numpy, at the accuracy its docstring states."""

import numpy as np
import pytest

from recall_lab import theory
from recall_lab.task.mqar import MQAR


def unit(rng, *shape):
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def read(S, k, candidates):
    """Squared error and top-1 of every key's read-out; the first n candidates are the stored values."""
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
    x = np.maximum(rng.standard_normal(shape), 0)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize(("n", "d"), [(16, 32), (64, 64), (200, 32)])
def test_linear_error_cosine_and_share(rng, n, d):
    error, _ = linear(rng, n, d, n, 400)
    assert error.mean() == pytest.approx(theory.linear_error(n, d), rel=0.03)
    k, v = unit(rng, 100, n, d), unit(rng, 100, n, d)
    weights = k @ k.swapaxes(1, 2)
    o = weights @ v
    assert np.mean((o * v).sum(-1) / np.linalg.norm(o, axis=-1)) == pytest.approx(theory.linear_cosine(n, d), rel=0.03)
    assert np.mean(1 / np.abs(weights).sum(-1)) == pytest.approx(
        theory.linear_share(n, d), rel=0.01 if n >= d else 0.05
    )


def test_orthogonal_keys_are_exact_up_to_their_width(rng):
    keys = np.linalg.qr(rng.standard_normal((16, 16)))[0]
    v = unit(rng, 16, 16)
    assert np.abs(keys @ (keys.T @ v) - v).max() < 1e-12


def test_coordinate_cdf(rng):
    x = unit(rng, 200_000, 5)[:, 0]
    for at in (-0.6, 0.0, 0.3, 0.9):
        assert np.mean(x < at) == pytest.approx(theory.coordinate_cdf(at, 5), abs=0.004)


@pytest.mark.parametrize(("n", "expected", "measured"), [(64, 1.0, 0.999), (128, 0.945, 0.943), (256, 0.524, 0.554)])
def test_linear_top1_at_4096_candidates(rng, n, expected, measured):
    assert theory.linear_top1(n, 64, 64, 4096) == pytest.approx(expected, abs=0.001)
    _, right = linear(rng, n, 64, 4096, 1024 // n)
    assert right.mean() == pytest.approx(measured, abs=0.04)
    assert theory.top1(1.0, (n - 1) / 64, n - 1, 64, 64, 4096) == pytest.approx(measured, abs=0.015)


@pytest.mark.parametrize("candidates", [256, 1024])
@pytest.mark.parametrize(("d", "limit"), [(16, 0.07), (32, 0.06), (64, 0.035)])
def test_top1_at_every_load(rng, d, limit, candidates):
    for n in (d // 2, d, 2 * d, 4 * d):
        _, right = linear(rng, n, d, candidates, 3200 // n)
        assert theory.top1(1.0, (n - 1) / d, n - 1, d, d, candidates) == pytest.approx(right.mean(), abs=limit)


def test_top1_broadcasts_and_is_a_probability():
    n = np.arange(1, 300, 7)
    p = theory.top1(1.0, (n - 1) / 32, n - 1, 32, 32, 512)
    assert p.shape == n.shape
    assert p[0] == pytest.approx(1)
    assert np.all((p >= 0) & (p <= 1 + 1e-12))
    assert np.all(np.diff(p) < 0)
    assert theory.linear_top1(n, 32, 32, 512).shape == n.shape


def test_linear_capacity_is_where_top1_falls():
    for d in (64, 128, 256):
        assert 0.3 < theory.linear_top1(theory.linear_capacity(d, d, 4096), d, d, 4096) < 0.9
    assert theory.linear_capacity(256, 256, 4096) > 3.5 * theory.linear_capacity(128, 128, 4096)


def test_least_squares(rng):
    for n, d in [(20, 32), (32, 32), (64, 32), (200, 32)]:
        k, v = unit(rng, 20, n, d), unit(rng, 20, n, d)
        error = np.square(k @ (np.linalg.pinv(k) @ v) - v).sum(-1)
        assert error.mean() == pytest.approx(theory.least_squares_error(n, d), rel=0.02, abs=1e-12)


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.1])
def test_delta_error_by_age(rng, beta):
    error, right = delta(rng, 64, 64, 1024, 60, beta)
    expected = theory.delta_error(np.arange(64), 64, 64, beta)
    assert error.mean() == pytest.approx(theory.delta_mean_error(64, 64, beta), rel=0.02)
    smooth = np.ones(8) / 8
    assert np.convolve(error, smooth, "valid") == pytest.approx(np.convolve(expected, smooth, "valid"), rel=0.06)
    predicted = theory.delta_top1(np.arange(64), 64, 64, 64, 1024, beta)
    assert right.mean() == pytest.approx(predicted.mean(), abs=0.03)


def test_delta_at_one_is_the_formula_as_published():
    d, n = 64, 80
    norm = d * (1 - (1 - 1 / d) ** np.arange(n))
    for age in (0, 1, 17, 79):
        a = 1.0
        for t in range(n - age, n):
            a = a * (1 - 2 / d + 2 / (d * (d + 2))) + norm[t] / (d * (d + 2)) + 1 / d
        assert theory.delta_power(age, n, d) == pytest.approx(a, rel=1e-12)
    assert theory.delta_mean_error(64, 64) == pytest.approx(0.598, abs=0.001)


def test_delta_lifetime(rng):
    assert theory.delta_lifetime(64, 64, 1024) == pytest.approx(55, abs=0.5)
    _, right = delta(rng, 192, 64, 1024, 20)
    assert right.sum() == pytest.approx(59.5, abs=4)
    assert theory.delta_top1(np.arange(192), 192, 64, 64, 1024).sum() == pytest.approx(right.sum(), abs=4)


def test_delta_in_more_passes_nears_least_squares(rng):
    measured = [delta(rng, 64, 64, 64, 20, passes=passes)[0].mean() for passes in (1, 2, 4, 8)]
    assert measured == pytest.approx([0.617, 0.421, 0.299, 0.210], abs=0.03)


def test_ranking_reversal(rng):
    sum_error, sum_right = linear(rng, 128, 64, 4096, 8)
    error, right = delta(rng, 128, 64, 4096, 8)
    assert error.mean() < sum_error.mean() - 0.5
    assert right.mean() < sum_right.mean() - 0.3
    assert right.mean() == pytest.approx(theory.delta_top1(np.arange(128), 128, 64, 64, 4096).mean(), abs=0.03)
    _, gentle = delta(rng, 128, 64, 4096, 8, beta=0.1)
    assert gentle.mean() == pytest.approx(theory.delta_top1(np.arange(128), 128, 64, 64, 4096, 0.1).mean(), abs=0.03)
    assert gentle.mean() > 0.9


def test_correlated_keys(rng):
    k = relu(rng, 1500, 64)
    cosine = (k @ k.T)[np.triu_indices(1500, 1)]
    assert cosine.mean() == pytest.approx(theory.RELU_COSINE, abs=0.005)
    variance = theory.relu_cosine_variance(64)
    assert cosine.var() == pytest.approx(variance, rel=0.05)
    for n in (16, 32, 128):
        error, right = linear(rng, n, 64, 1024, 30, keys=relu)
        noise = theory.linear_error(n, 64, theory.RELU_COSINE, variance)
        assert error.mean() == pytest.approx(noise, rel=0.08)
        assert right.mean() == pytest.approx(theory.top1(1.0, noise, n - 1, 64, 64, 1024, theory.RELU_COSINE), abs=0.08)
    assert delta(rng, 128, 64, 1024, 10, keys=relu)[1].mean() == pytest.approx(0.377, abs=0.05)


@pytest.mark.parametrize(("gamma", "expected", "measured"), [(0.9, 19, 20), (0.97, 47, 48), (0.99, 88, 96)])
def test_fixed_decay(rng, gamma, expected, measured):
    assert theory.decay_lifetime(gamma, 64, 64, 1024) == pytest.approx(expected, abs=0.5)
    error, right = linear(rng, 256, 64, 1024, 40, decay=gamma)
    ages = np.arange(256)
    assert error.mean() == pytest.approx(theory.decay_error(ages, 256, 64, gamma).mean(), rel=0.03)
    assert right.sum() == pytest.approx(measured, abs=5)
    assert theory.decay_top1(ages, 256, 64, 64, 1024, gamma).sum() == pytest.approx(right.sum(), abs=4)
    assert gamma ** theory.half_life(gamma) == pytest.approx(0.5)


@pytest.mark.parametrize(("d", "sharpness"), [(32, 32**0.5), (64, 8.0), (64, 4.0)])
def test_softmax_mass(rng, d, sharpness):
    n = 512
    logits = sharpness * unit(rng, 400, n, d)[..., 0]  # all directions of q are alike
    logits[:, 0] = sharpness
    mass = np.exp(logits[:, 0]) / np.exp(logits).sum(-1)
    assert mass.mean() == pytest.approx(theory.softmax_mass(n, d, sharpness), rel=0.01)
    assert theory.softmax_mass(theory.softmax_half_mass(d) + 1, d, d**0.5) == pytest.approx(0.5)
    assert theory.softmax_half_mass(d) == pytest.approx(np.exp(d**0.5 - 0.5))


def test_raw_scores():
    for n in (1, 10, 1000):
        scores = np.ones(n)
        scores[0] = 100
        assert theory.raw_share_linear(n, 100, 1) == pytest.approx(scores[0] / scores.sum())
        weights = np.exp(scores - 100)
        assert theory.raw_share_softmax(n, 100, 1) == pytest.approx(weights[0] / weights.sum())


def test_dynamic_access(rng):
    for n, d in [(12, 16), (64, 16)]:
        k = unit(rng, n, d)
        assert np.linalg.matrix_rank(k @ rng.standard_normal((d, 200))) == theory.access_rank(n, d)
        project = k @ np.linalg.pinv(k)
        assert 1 - np.diag(project).mean() == pytest.approx(theory.one_hot_residual(n, d), abs=1e-12)


def test_static_recall(rng):
    n, budget, vocab = 64, 16, 8
    kept = rng.permuted(np.tile(np.arange(n) < budget, (20_000, 1)), axis=1)[:, 0]
    right = kept | (rng.integers(vocab, size=kept.size) == 0)
    assert right.mean() == pytest.approx(theory.static_recall(budget, n, vocab), abs=0.01)
    assert theory.static_recall(100, 64) == 1


def test_window_coverage_of_mqar():
    """The mean over the seven cells of Zoology, against the published figure."""
    cells = [(64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256)]
    windows = np.array([8, 16, 32, 64, 128, 256, 512, 1024])
    coverage = []
    for length, pairs in cells:
        source = MQAR(vocab=8192, length=length, pairs=pairs).sample(64, np.random.default_rng(1)).factors["source"]
        row, place = np.nonzero(source >= 0)
        coverage.append(theory.window_coverage(place - source[row, place], windows))
    assert np.mean(coverage, axis=0) == pytest.approx([0.057, 0.140, 0.310, 0.514, 0.655, 0.797, 0.936, 1.0], abs=0.012)


def test_bits_kept():
    assert theory.bits_kept(10, 0.0, 256) == pytest.approx(80)
    assert theory.bits_kept(10, 1 - 1 / 256, 256) == pytest.approx(0, abs=1e-9)
    assert theory.bits_kept(10, 1.0, 256) == pytest.approx(0, abs=1e-9)
    # The mutual information of a symmetric channel, from its joint distribution.
    v, error = 16, 0.3
    joint = np.full((v, v), error / (v - 1) / v)
    np.fill_diagonal(joint, (1 - error) / v)
    assert theory.bits_kept(1, error, v) == pytest.approx((joint * np.log2(joint * v * v)).sum())
    assert round(theory.LINEAR_BITS, 2) == 0.72
    best = [
        max(theory.bits_kept(n, 1 - theory.linear_top1(n, 64, 64, v), v) for n in range(8, 400, 8)) / 64**2
        for v in (1024, 4096)
    ]
    assert 0.3 < max(best) <= 0.43


def test_lower_bounds():
    assert theory.recall_bits(64) == 64
    assert theory.copying_error(8, 2, 8) == 0
    assert theory.copying_error(8, 2, 10) == pytest.approx(1 - 2.0**-2)
    # A machine of |S| states answers at most |S| strings right.
    assert theory.copying_error(3, 3, 2) == pytest.approx(1 - 8 / 9)
