"""The recall tasks: each draws what its docstring states."""

from itertools import permutations

import numpy as np
import pytest
from scipy.stats import chi2_contingency, chisquare
from task_helpers import UNLIKELY, check, rng, spread, tally, uniform

from recall_lab.task.base import IGNORE
from recall_lab.task.joint_recall import JointRecall
from recall_lab.task.mqar import MQAR
from recall_lab.task.noisy_recall import NoisyRecall
from recall_lab.task.paired_recall import PairedRecall
from recall_lab.task.updates import Updates


@pytest.mark.parametrize("vocab", [16, 64])
def test_mqar_filler_is_neither_key_nor_value_and_keys_occur_once(vocab):
    task = MQAR(vocab=vocab, length=64, pairs=7)
    batch = task.sample(1000, rng())
    for row, scored in zip(batch.tokens, batch.scored, strict=True):
        key, value, rest = row[0:14:2], row[1:14:2], row[14:]
        assert np.unique(key).size == np.unique(value).size == 7
        assert set(key) <= set(range(1, vocab // 2))
        assert set(value) <= set(range(vocab // 2, vocab))
        assert sorted(rest[scored[14:]]) == sorted(key)
        assert (rest[~scored[14:]] == 0).all()


@pytest.mark.parametrize("exponent", [0.01, 0.5, 1.0])
def test_mqar_gaps_are_draws_without_replacement(exponent):
    """The joint distribution of the slots of three pairs: against the exact one, and against numpy's choice."""
    slots, pairs = 5, 3
    p = (np.arange(slots) + 1.0) ** (exponent - 1)
    p /= p.sum()
    orders = list(permutations(range(slots), pairs))
    exact = [p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b]) for a, b, c in orders]
    task = MQAR(length=2 * pairs + 2 * slots, pairs=pairs, gap_exponent=exponent)
    batch = task.sample(30_000, rng())
    queried = batch.factors["source"][:, 2 * pairs :: 2]
    drawn = np.stack([(queried == 2 * i + 1).argmax(axis=1) for i in range(pairs)], axis=1)
    count = tally(drawn, orders)
    assert chisquare(count, np.array(exact) * len(drawn)).pvalue > UNLIKELY
    draw = rng(1)
    naive = np.array([draw.choice(slots, size=pairs, replace=False, p=p) for _ in range(5000)])
    assert chi2_contingency([count, tally(naive, orders)]).pvalue > UNLIKELY


def test_mqar_queries_and_distractors():
    task = MQAR(length=40, pairs=6, queries=2, distractors=3, gap_exponent=1.0)
    batch = check(task, 5000)
    assert (batch.scored.sum(axis=1) == 2).all()
    assert spread(batch.factors["source"][batch.scored] // 2, 6)
    rest = batch.tokens[:, 12:]
    assert ((rest >= 128).sum(axis=1) == 3).all()
    assert uniform((rest[:, 1::2] >= 128).sum(axis=0)), "distractors are in any slot"
    for row in batch.tokens[:100]:
        bound = row[:-1][(row[1:] >= 128)]
        assert np.unique(bound).size == 9


def test_paired_recall_queries_keys_equally_often():
    batch = PairedRecall(length=14, pairs=4).sample(500, rng())
    times = np.apply_along_axis(np.bincount, 1, batch.factors["source"][:, 4:])
    assert set(times.ravel()) == {2, 3}
    empty = PairedRecall(length=14, pairs=4, queries=3, distractors=1).sample(4000, rng())
    assert uniform(empty.scored[:, 4:].sum(axis=0)), "a query is at any position"
    assert ((empty.tokens == 0).all(axis=2).sum(axis=1) == 6).all()


def test_updates_change_the_value_and_come_in_any_order():
    task = Updates(length=10, pairs=2, updates=1)
    batch = task.sample(12_000, rng())
    context = batch.tokens[:, 0:6:2]
    pattern = (context != context[:, :1]).astype(int)
    orders = [(0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert uniform(tally(pattern, orders))

    batch = check(Updates(length=128, pairs=8, updates=24), 500)
    row, position = batch.scored.nonzero()
    key, target = batch.tokens[row, position], batch.targets[row, position]
    source, times, stale = (batch.factors[name][batch.scored] for name in ("source", "rebindings", "stale"))
    bound = batch.tokens[row, 0:64:2] == key[:, None]
    assert (bound.sum(axis=1) == times + 1).all()
    assert (source == 2 * (31 - bound[:, ::-1].argmax(axis=1)) + 1).all()
    assert ((stale == IGNORE) == (times == 0)).all()
    assert (times.reshape(500, 8).sum(axis=1) == 24).all()
    again = stale != IGNORE
    assert (batch.tokens[row, stale - 1] == key)[again].all()
    assert (batch.tokens[row, stale] != target)[again].all()
    assert (stale < source)[again].all()
    assert not (bound & (2 * np.arange(32) + 1 > stale[:, None]) & (2 * np.arange(32) + 1 < source[:, None]))[
        again
    ].any()


def test_noisy_recall_has_noise_everywhere_and_queries_after_all_pairs():
    batch = check(NoisyRecall(vocab=40, words=4, length=30, pairs=5), 1000)
    noise = batch.tokens[batch.tokens < 4]
    assert noise.size == 1000 * 15
    assert spread(noise, 4)
    first = batch.scored.argmax(axis=1)
    assert (np.max(batch.factors["source"], axis=1) < first).all()
    source = batch.factors["source"][batch.scored].reshape(1000, 5)
    assert uniform(tally(source.argsort(axis=1), list(permutations(range(5)))))


def test_joint_recall_draws_an_order_for_each_context():
    tokens = JointRecall(length=30, contexts=2, pairs=3).sample(3000, rng()).tokens
    first, second = tokens[:, 1:7:2], tokens[:, 8:14:2]
    assert uniform(tally((first[:, :, None] == second[:, None]).argmax(axis=2), list(permutations(range(3)))))


def test_joint_recall_needs_the_context():
    task = JointRecall(length=64, contexts=3, pairs=4)
    batch = check(task, 300)
    for row, scored, targets in zip(batch.tokens, batch.scored, batch.targets, strict=True):
        queries = list(zip(row[:-1][scored[1:]], row[scored], strict=True))
        assert len(set(queries)) == 12
        for key in np.unique(row[scored]):
            assert np.unique(targets[scored & (row == key)]).size == 3
