"""Closed forms for weights, access, budgets, information and fits, versus simulation in numpy."""

import numpy as np
import pytest

from recall_lab.task.mqar import MQAR
from recall_lab.theory import access, budget, fits, information, linear_attention, softmax


def unit(rng, *shape):
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize(("d", "sharpness"), [(32, 32**0.5), (64, 8.0), (64, 4.0)])
def test_softmax_mass(rng, d, sharpness):
    n = 512
    logits = sharpness * unit(rng, 400, n, d)[..., 0]  # all directions of q are alike
    logits[:, 0] = sharpness
    mass = np.exp(logits[:, 0]) / np.exp(logits).sum(-1)
    assert mass.mean() == pytest.approx(softmax.mass(n, d, sharpness), rel=0.01)
    assert softmax.mass(softmax.half_mass(d) + 1, d, d**0.5) == pytest.approx(0.5)
    assert softmax.half_mass(d) == pytest.approx(np.exp(d**0.5 - 0.5))


def test_raw_scores():
    for n in (1, 10, 1000):
        scores = np.ones(n)
        scores[0] = 100
        assert linear_attention.raw_share(n, 100, 1) == pytest.approx(scores[0] / scores.sum())
        weights = np.exp(scores - 100)
        assert softmax.raw_share(n, 100, 1) == pytest.approx(weights[0] / weights.sum())


def test_dynamic_access(rng):
    for n, d in [(12, 16), (64, 16)]:
        k = unit(rng, n, d)
        assert np.linalg.matrix_rank(k @ rng.standard_normal((d, 200))) == access.rank(n, d)
        project = k @ np.linalg.pinv(k)
        assert 1 - np.diag(project).mean() == pytest.approx(access.one_hot_residual(n, d), abs=1e-12)


def test_static_recall(rng):
    n, slots, vocab = 64, 16, 8
    kept = rng.permuted(np.tile(np.arange(n) < slots, (20_000, 1)), axis=1)[:, 0]
    right = kept | (rng.integers(vocab, size=kept.size) == 0)
    assert right.mean() == pytest.approx(budget.static_recall(slots, n, vocab), abs=0.01)
    assert budget.static_recall(100, 64) == 1


def test_window_coverage_of_mqar():
    """The mean over the seven cells of Zoology, against the published figure."""
    cells = [(64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256)]
    windows = np.array([8, 16, 32, 64, 128, 256, 512, 1024])
    coverage = []
    for length, pairs in cells:
        source = MQAR(vocab=8192, length=length, pairs=pairs).sample(64, np.random.default_rng(1)).factors["source"]
        row, position = np.nonzero(source >= 0)
        coverage.append(budget.window_coverage(position - source[row, position], windows))
    assert np.mean(coverage, axis=0) == pytest.approx([0.057, 0.140, 0.310, 0.514, 0.655, 0.797, 0.936, 1.0], abs=0.012)


def test_bits_kept():
    assert information.bits_kept(10, 0.0, 256) == pytest.approx(80)
    assert information.bits_kept(10, 1 - 1 / 256, 256) == pytest.approx(0, abs=1e-9)
    assert information.bits_kept(10, 1.0, 256) == pytest.approx(0, abs=1e-9)
    # The mutual information of a symmetric channel, from its joint distribution.
    v, error = 16, 0.3
    joint = np.full((v, v), error / (v - 1) / v)
    np.fill_diagonal(joint, (1 - error) / v)
    assert information.bits_kept(1, error, v) == pytest.approx((joint * np.log2(joint * v * v)).sum())
    best = [
        max(information.bits_kept(n, 1 - linear_attention.top1(n, 64, 64, v), v) for n in range(8, 400, 8)) / 64**2
        for v in (1024, 4096)
    ]
    assert 0.3 < max(best) <= 0.43


def test_exponent_of_a_power_law(rng):
    x = np.array([1.0, 2, 4, 8, 16])
    assert fits.exponent(x, 3 * x**2) == pytest.approx((2, 2, 2))
    assert fits.exponent((1, 4), (5, 10)) == pytest.approx((0.5, 0.5, 0.5))
    covered = 0
    for _ in range(400):
        _, low, high = fits.exponent(x, x * np.exp(0.2 * rng.standard_normal(5)))
        covered += low <= 1 <= high
    assert fits.exponent(x, np.ones(5)) == (0, 0, 0)
    assert covered / 400 == pytest.approx(0.95, abs=0.035)
    for x, y in (((2, 2), (1, 3)), ((1, 2), (0, 1))):
        with pytest.raises(ValueError, match="at least two distinct x"):
            fits.exponent(x, y)


def test_recall_of_rebound_keys_by_a_sum(rng):
    again = rng.binomial(6, 1 / 4, size=200_000)
    assert linear_attention.superposed_recall(6, 4) == pytest.approx(np.mean(1 / (again + 1)), abs=0.003)
    assert linear_attention.superposed_recall(0, 4) == pytest.approx(1)


def test_window_reach_by_enumeration():
    """A pair is found if the window contains a position whose convolution covers both its key and its value."""
    key, value = 20, 21
    for width in (0, 1, 2, 3, 4):
        for window in (1, 4, 9):
            for query in range(24, 60):
                seeing = [s for s in range(query + 1) if s - width < key <= s and s - width < value <= s]
                found = any(query - window < s <= query for s in seeing)
                assert found == (query - value < budget.window_reach(window, width))


def test_values_by_hand():
    assert softmax.mass(512, 64, 4) == pytest.approx(1 / (1 + 511 * np.exp(-4 + 0.125)))
    assert softmax.half_mass(64, 4) == pytest.approx(np.exp(4 - 0.125))
    assert information.binary_entropy(np.array([0, 0.25, 0.5, 1])) == pytest.approx([0, 0.811278, 1, 0], abs=1e-6)
    assert budget.static_recall(16, 64) == 0.25
    assert access.rank(5, 8) == access.rank(8, 5) == 5
    assert budget.window_coverage(np.array([[0, 3, 4], [4, 5, 6]]), 4).tolist() == [2 / 3, 0]


def test_an_exponent_needs_positive_numbers():
    for x, y in (((-1, 2), (1, 3)), ((1, 2), (1, -3))):
        with pytest.raises(ValueError, match="must be positive"):
            fits.exponent(x, y)
