"""What a task is: a definition (`solve`), a sampler (`sample`) written independently of it, and its grid."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int, Shaped

IGNORE = -100
"""Stands in `targets` and `factors` wherever nothing is scored (the value torch's losses ignore by default)."""


@dataclass(frozen=True)
class Batch:
    """Sequences and what is asked of them.

    tokens   b t (or b t c: c channels a place, embedded and added)
    targets  b t: the class that the logits *of that same place* should predict, IGNORE elsewhere
    factors  name → b t: what a plot may split by, at the scored places; IGNORE elsewhere.
             `source` is the place in the sequence that holds the answer.
    """

    tokens: Shaped[np.ndarray, "b t *c"]
    targets: Shaped[np.ndarray, "b t"]
    factors: dict[str, Int[np.ndarray, "b t"]] = field(default_factory=dict)

    @property
    def scored(self) -> Shaped[np.ndarray, "b t"]:
        """True where a target stands."""
        return self.targets != IGNORE


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """The parameters of a synthetic task; immutable, so that `at` can name a whole grid of them.

    A subclass checks its sizes in `__post_init__` and raises ValueError with the numbers and the limit.
    """

    length: int
    """n: places of a sequence."""

    scales: ClassVar[tuple[str, ...]] = ("length",)
    """The fields that shrink and grow together when a training mixture or a test grid is derived."""

    @property
    @abstractmethod
    def vocab(self) -> int:
        """Number of token ids; also the number of classes of the read-out."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Accuracy per scored token of a guess that uses nothing of the sequence."""

    @abstractmethod
    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        """Draws that many independent sequences, from `rng` alone."""

    @abstractmethod
    def solve(self, tokens: Shaped[np.ndarray, "b t *c"]) -> Int[np.ndarray, "b t"]:
        """The targets, read off the tokens by the task's definition and sharing no code with `sample`."""

    @abstractmethod
    def roles(self, tokens: Shaped[np.ndarray, "b t *c"]) -> Shaped[np.ndarray, "b t *c"]:
        """The role of each token in words ("key", "value", "query", "filler" …), for people to read."""

    def at(self, **cell: Any) -> "Task":
        """The same task at another point of its grid.

        Raises ValueError where the task has no such parameter, or the sizes are impossible.
        """
        known = [f.name for f in fields(self)]
        for name in cell:
            if name not in known:
                raise ValueError(f"{type(self).__name__} has no parameter {name!r}; it has {', '.join(known)}")
        return replace(self, **cell)

    def scaled(self, factors: tuple[float, ...]) -> Iterator[dict[str, int]]:
        """The cells at which every field of `scales` is multiplied by a factor, impossible sizes left out."""
        for factor in factors:
            cell = {name: max(1, int(getattr(self, name) * factor)) for name in self.scales}
            try:
                self.at(**cell)
            except ValueError:
                continue
            yield cell


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless the condition holds: how tasks refuse impossible sizes."""
    if not condition:
        raise ValueError(message)


def distinct(rng: np.random.Generator, rows: int, count: int, pool: int) -> Int[np.ndarray, "rows count"]:
    """`count` different integers of range(pool) in each row, every ordered choice equally likely.

    A crowded pool is shuffled. Otherwise entries that repeat an earlier one of their row are drawn again until
    none does: renaming the integers renames the result, so every ordered choice keeps the same probability.
    """
    if count > pool:
        raise ValueError(f"{count} different values asked of a pool of {pool}")
    if 4 * count > pool:
        return rng.random((rows, pool), dtype=np.float32).argsort(axis=1)[:, :count].astype(np.int32)
    drawn = rng.integers(pool, size=(rows, count), dtype=np.int32)
    todo = np.arange(rows)
    while todo.size:
        part = drawn[todo]
        order = part.argsort(axis=1, kind="stable")
        ordered = np.take_along_axis(part, order, axis=1)
        again = np.zeros(part.shape, dtype=bool)
        np.put_along_axis(again, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
        hit = again.any(axis=1)
        part[again] = rng.integers(pool, size=int(again.sum()), dtype=np.int32)
        drawn[todo] = part
        todo = todo[hit]
    return drawn
