"""Helpers for tests of tasks: building a task by name, and the properties that hold for every task."""

import random
from functools import cache

import numpy as np
from conftest import config, names
from hydra.utils import instantiate
from scipy.stats import chisquare

from recall_lab.task.base import IGNORE, Batch, Task

TASKS = names("task")
UNLIKELY = 1e-4
"""The p-value below which a chi-square test fails. Seeds are fixed, so the result never changes."""


@cache
def build(name: str) -> Task:
    return instantiate(config(f"task={name}").task)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def global_state() -> tuple[str, str]:
    return repr(np.random.get_state()), repr(random.getstate())  # noqa: NPY002


def uniform(counts: np.ndarray) -> bool:
    return chisquare(counts).pvalue > UNLIKELY


def spread(values: np.ndarray, classes: int) -> bool:
    """Whether the values are uniform over range(classes)."""
    return uniform(tally(values.reshape(-1, 1), [(value,) for value in range(classes)]))


def tally(rows: np.ndarray, patterns: list[tuple[int, ...]]) -> np.ndarray:
    """How often each pattern occurs among the rows. Asserts that every row equals one of the patterns."""
    found, counts = np.unique(rows, axis=0, return_counts=True)
    count = dict(zip(map(tuple, found.tolist()), counts.tolist(), strict=True))
    assert set(count) <= set(patterns)
    return np.array([count.get(pattern, 0) for pattern in patterns])


def check(task: Task, sequences: int = 8, seed: int = 0) -> Batch:
    """Asserts what holds for any task at any size; returns the batch."""
    batch = task.sample(sequences, rng(seed))
    tokens, targets, scored = batch.tokens, batch.targets, batch.scored
    assert tokens.shape[:2] == targets.shape[:2] == (sequences, task.length)
    assert scored.any(axis=1).all()
    solution = task.solve(tokens)
    roles = task.roles(tokens)
    if task.continuous:
        assert tokens.dtype == targets.dtype == np.float32
        assert tokens.shape[2:] == (task.width,)
        assert targets.shape[2:] == (task.vocab,)
        assert (targets[~scored] == IGNORE).all()
        np.testing.assert_allclose(solution, targets, atol=1e-6)
        assert roles.shape == tokens.shape[:2]
    else:
        assert tokens.dtype == targets.dtype == np.int32
        assert tokens.min() >= 0
        assert tokens.max() < task.vocab
        assert targets[scored].min() >= 0
        assert targets[scored].max() < task.vocab
        np.testing.assert_array_equal(solution, targets)
        assert roles.shape == tokens.shape
    queries = roles == "query"
    np.testing.assert_array_equal(queries if queries.ndim == 2 else queries.any(axis=2), scored)
    for name, factor in batch.factors.items():
        assert (factor[~scored] == IGNORE).all()
        assert f"`{name}`" in type(task).__doc__
    if "source" in batch.factors:
        row, position = scored.nonzero()
        source = batch.factors["source"][scored]
        answer = tokens[row, source].reshape(source.size, -1)
        assert (answer == targets[scored][:, None]).any(axis=1).all()
        assert (batch.age[scored] == position - source).all()
        assert (batch.age[scored] > 0).all()
        assert (batch.age[~scored] == IGNORE).all()
    return batch
