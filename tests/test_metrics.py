"""Loss, accuracy and error versus values computed by hand."""

import math

import numpy as np
import pytest
import torch

from recall_lab import metrics

LOGITS = torch.tensor([[0.0, math.log(3.0)], [math.log(7.0), 0.0], [0.0, 0.0], [0.0, 2.0]])
TARGETS = torch.tensor([1, 1, 0, 1])


def test_correct_compares_the_largest_logit_with_the_target():
    assert metrics.correct(LOGITS, TARGETS).tolist() == [True, False, True, True]


def test_a_sequence_is_correct_when_all_its_scored_positions_are():
    """Four sequences: one of two scored positions is wrong; no position is scored; two with one scored position."""
    scored = torch.tensor([[True, False, True], [False, False, False], [False, True, False], [True, False, False]])
    hits = metrics.correct(LOGITS, TARGETS)
    assert metrics.correct_sequences(hits, scored).tolist() == [False, True, True]


def test_loss_in_bits_and_in_nats():
    bits = metrics.loss_bits(LOGITS, TARGETS)
    assert bits.tolist() == pytest.approx([math.log2(4 / 3), 3, 1, math.log2(1 + math.exp(-2))])
    assert float(metrics.loss(LOGITS, TARGETS)) == pytest.approx(float(bits.mean()) * math.log(2))


def test_errors_of_vectors():
    targets = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    outputs = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    squared = metrics.squared_error(outputs, targets)
    assert squared.tolist() == [0.5, 2]
    assert float(metrics.loss(outputs, targets)) == pytest.approx(1.25)
    assert metrics.normalised_error(squared, targets) == pytest.approx(5 / 2)  # Σ‖target − mean‖² = 1 + 1


def test_the_mean_target_has_error_one():
    targets = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) + 2
    constant = targets.mean(0).expand_as(targets)
    assert metrics.normalised_error(metrics.squared_error(constant, targets), targets) == pytest.approx(1)


def test_standard_error_of_independent_values():
    """With one value per sequence it is s/√N; a single sequence has none."""
    values = np.random.default_rng(0).normal(size=40)
    found = metrics.standard_error(values, np.arange(40))
    assert found == pytest.approx(values.std(ddof=1) / 40**0.5)
    assert math.isnan(metrics.standard_error(values, np.zeros(40, int)))


def test_standard_error_by_hand():
    """Sequences 3 and 7 with values (1, 0) and (1, 1): mean 3/4, sums of residuals −1/2 and 1/2."""
    found = metrics.standard_error(np.array([1.0, 0, 1, 1]), np.array([3, 3, 7, 7]))
    assert found == pytest.approx((2 * (0.25 + 0.25)) ** 0.5 / 4)


def test_standard_error_equals_a_bootstrap_over_sequences():
    """Sequences of different lengths whose values depend on each other; independent values would give a third of it."""
    rng = np.random.default_rng(0)
    size = rng.integers(5, 40, 300)
    sequence = np.repeat(np.arange(300), size)
    values = (rng.random(len(sequence)) < np.repeat(rng.random(300), size)).astype(float)
    sums = np.bincount(sequence, weights=values)
    drawn = rng.integers(300, size=(4000, 300))
    means = sums[drawn].sum(1) / size[drawn].sum(1)
    assert metrics.standard_error(values, sequence) == pytest.approx(means.std(), rel=0.05)
    assert values.std() / len(values) ** 0.5 < 0.5 * means.std()
