"""Needles, copying, induction, state tracking and subset averages: each task draws what its docstring states."""

from itertools import combinations

import numpy as np
import pytest
from task_helpers import check, rng, spread, tally, uniform

from recall_lab.task.induction import Induction
from recall_lab.task.needle import HAYSTACKS, Needle
from recall_lab.task.selective_copying import SelectiveCopying
from recall_lab.task.state_tracking import GROUPS, StateTracking
from recall_lab.task.subset_average import SubsetAverage


@pytest.mark.parametrize("haystack", HAYSTACKS)
@pytest.mark.parametrize("depth", [0.0, 0.33, 0.5, 1.0])
@pytest.mark.parametrize("keys", [1, 3])
def test_the_needle_occurs_once_at_the_stated_depth(haystack, depth, keys):
    task = Needle(length=65, haystack=haystack, depth=depth, keys=keys)
    batch = check(task, 300)
    text, unit = 63, 3 if haystack == "needles" else 1
    hay = (text - 3 * keys) // unit
    for row, target, source, stated in zip(
        batch.tokens, batch.targets[:, -1], batch.factors["source"][:, -1], batch.factors["depth"][:, -1], strict=True
    ):
        assert (row == target).sum() == 1
        assert (row[:text] == row[-1]).sum() == 1
        assert row[source - 2] == 0
        before = row[: source - 2]
        if haystack != "needles":
            assert (before > 0).sum() - 2 * (before == 0).sum() == round(depth * hay)
        elif keys == 1:
            assert before.size == 3 * round(depth * hay)
        assert stated == round(100 * round(depth * hay) / hay)
    if keys == 1 and depth in (0, 1):
        assert (batch.factors["source"][:, -1] == (2 if depth == 0 else text - 1)).all()


@pytest.mark.parametrize("haystack", HAYSTACKS)
def test_needle_at_every_depth(haystack):
    batch = Needle(length=35, haystack=haystack).sample(5000, rng())
    position = batch.factors["source"][:, -1] - 2
    assert spread(position // (3 if haystack == "needles" else 1), 11 if haystack == "needles" else 31)


def test_needle_haystacks():
    repeat, noise, needles = (Needle(length=50, haystack=h, words=4).sample(400, rng()).tokens for h in HAYSTACKS)
    motif = 1 + np.arange(48) % 4
    assert ((repeat[:, :48] != motif).sum(axis=1) == 3).all()
    words = noise[:, :48][(noise[:, :48] > 0) & (noise[:, :48] <= 4)]
    assert words.size == 400 * 45
    assert spread(words - 1, 4)
    assert (needles[:, 0:48:3] == 0).all()
    assert (needles[:, 1:48:3] > 4).all()
    assert ((needles[:, 1:48:3] == needles[:, -1:]).sum(axis=1) == 1).all(), "the queried key occurs once"


def test_needle_variants():
    """For each queried key, its values are queried in the order of the text."""
    task = Needle(length=80, haystack="noise", keys=4, values=3, queries=2)
    batch = check(task, 200)
    assert (batch.scored.sum(axis=1) == 6).all()
    source = batch.factors["source"][batch.scored].reshape(200, 2, 3)
    assert (np.diff(source, axis=2) > 0).all()
    needles = (batch.tokens[:, :72] == 0).sum(axis=1)
    assert (needles == 12).all()


def test_selective_copying_chooses_any_positions():
    batch = SelectiveCopying(length=8, data=3).sample(10_000, rng())
    position = batch.factors["source"][:, -3:]
    assert uniform(tally(position, list(combinations(range(5), 3))))
    last = SelectiveCopying().sample(2000, rng()).factors["source"][:, -1]
    assert np.unique(last).size > 20, "the last datum has no fixed position"


def test_induction_marks_any_position():
    batch = Induction(length=12).sample(5000, rng())
    assert spread(batch.factors["source"][:, -1] - 1, 10)
    assert ((batch.tokens == 0).sum(axis=1) == 2).all()


@pytest.mark.parametrize("group", GROUPS)
def test_state_tracking_is_the_word_problem(group):
    task = StateTracking(group=group, length=20)
    batch = check(task, 400)
    assert task.vocab == {"parity": 2, "s3": 6, "s4": 24, "s5": 120}[group]
    assert spread(batch.tokens, task.vocab)
    if group == "parity":
        np.testing.assert_array_equal(batch.targets, batch.tokens.cumsum(axis=1) % 2)
        assert spread(batch.tokens @ 2 ** np.arange(20) % 64, 64)
    idle = np.zeros((1, 5), dtype=np.int32)
    assert (task.solve(idle) == 0).all()


def test_subset_average():
    task = SubsetAverage(length=40, points=6, subset=2, dim=8, pool=9)
    batch = check(task, 500)
    vector, member = batch.tokens[:, :6, :8], batch.tokens[:, :, 8:]
    np.testing.assert_allclose((vector**2).sum(axis=2), 1, rtol=1e-5)
    assert (member[:, :6].sum(axis=2) == 1).all()
    assert spread(member[:, 0].argmax(axis=1), 9)
    assert (member[:, 6:].sum(axis=2) == 2).all()
    assert (batch.tokens[:, 6:, :8] == 0).all()
    for query in (6, 7, -1):
        chosen = np.einsum("bpi,bi->bp", member[:, :6], member[:, query]).nonzero()[1].reshape(500, 2)
        assert uniform(tally(chosen, list(combinations(range(6), 2))))
    truth = batch.targets[batch.scored]
    blind = np.repeat(vector.mean(axis=1), 34, axis=0)
    error = ((truth - blind) ** 2).sum() / ((truth - truth.mean(axis=0)) ** 2).sum()
    assert error == pytest.approx(1 - 2 / 6, abs=0.02)
