"""The random draws that tasks share, and the keys made of several tokens."""

from itertools import permutations, product

import numpy as np
import pytest
from task_helpers import check, rng, tally, uniform

from recall_lab.task.base import distinct, others, smallest, spell
from recall_lab.task.mqar import MQAR
from recall_lab.task.paired_recall import PairedRecall


@pytest.mark.parametrize(("count", "pool"), [(2, 4), (3, 5), (1, 9), (2, 9)])
def test_distinct_is_uniform_over_ordered_choices(count, pool):
    drawn = distinct(rng(), 40_000, count, pool)
    assert uniform(tally(drawn, list(permutations(range(pool), count))))


def test_distinct_in_a_large_pool():
    drawn = distinct(rng(), 50, 3000, 2**30)
    assert all(np.unique(row).size == 3000 for row in drawn)
    assert abs(drawn.mean() / 2**29 - 1) < 0.01
    with pytest.raises(ValueError, match="5 different values cannot be drawn from a pool of 4"):
        distinct(rng(), 1, 5, 4)


def test_others_is_uniform_over_what_is_left():
    taken = np.tile([6, 0, 3], (20_000, 1))
    assert uniform(tally(others(rng(), 2, taken, 8), list(product([1, 2, 4, 5, 7], repeat=2))))


@pytest.mark.parametrize("count", [0, 1, 4, 9])
@pytest.mark.parametrize("kind", ["int32", "float32"])
def test_smallest_is_a_stable_sort(count, kind):
    keys = rng().integers(5, size=(100, 9), dtype=np.int32)
    if kind == "float32":
        keys = rng().standard_exponential((100, 9), dtype=np.float32) * (keys > 1)
    np.testing.assert_array_equal(smallest(keys, count), keys.argsort(axis=1, kind="stable")[:, :count])


@pytest.mark.parametrize(("rows", "count", "pool"), [(3, 0, 5), (1, 1, 1), (1, 4, 4), (5, 1, 9)])
def test_distinct_in_limiting_cases(rows, count, pool):
    drawn = distinct(rng(), rows, count, pool)
    assert drawn.shape == (rows, count)
    assert all(np.unique(row).size == count for row in drawn)
    assert ((drawn >= 0) & (drawn < pool)).all()


@pytest.mark.parametrize(("parts", "letters"), [(1, 5), (2, 3), (3, 4), (5, 2)])
def test_spelt_keys_differ_and_have_the_stated_mean_cosine(parts, letters):
    keys = letters**parts
    spelt = spell(np.arange(keys)[None], parts, letters)[0]
    embedded = np.eye(1 + parts * letters)[spelt].sum(axis=1)
    cosine = embedded @ embedded.T / parts
    assert len(np.unique(spelt, axis=0)) == keys
    assert spelt.min() == 1
    assert spelt.max() == parts * letters
    mean = (cosine.sum() - keys) / (keys * (keys - 1))
    assert mean == pytest.approx((letters ** (parts - 1) - 1) / (keys - 1))


def test_correlated_keys_in_a_batch():
    task = PairedRecall(length=16, pairs=8, key_parts=4, key_alphabet=2)
    key = task.sample(2000, rng()).tokens[:, :8, :4]
    same = (key[:, :, None] == key[:, None]).mean(axis=-1)
    assert (same.sum(axis=(1, 2)).mean() - 8) / 56 == pytest.approx(7 / 15, abs=0.01)
    check(task)
    check(task.at(queries=3, distractors=2), 100)
    check(MQAR(key_parts=4, key_alphabet=2, queries=3, distractors=5), 100)
