"""Helpers for tests of tasks: building a task by name, and the properties that hold for every task."""

from functools import cache

import numpy as np
from conftest import config, names
from hydra.utils import instantiate
from scipy.stats import chisquare

from recall_lab.contract import task as contract
from recall_lab.contract.base import examine
from recall_lab.task.base import Batch, Task

TASKS = names("task")
UNLIKELY = 1e-4
"""The p-value below which a chi-square test fails. Seeds are fixed, so the result never changes."""


@cache
def build(name: str) -> Task:
    return instantiate(config(f"task={name}").task)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


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
    """Asserts what holds for a batch of any task at any size; returns the batch."""
    batch = contract.draw(task, sequences, seed)
    for finding in examine(contract.BATCH, task, batch):
        assert finding.holds, f"{finding.check}: {finding.detail}"
    return batch
