"""q-sparse averaging: the continuous test of dynamic access (Sanford, Hsu and Telgarsky, arXiv 2306.02896)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Shaped

from recall_lab.checks import require, whole_number
from recall_lab.task.base import IGNORE, Batch, Task, distinct


@dataclass(frozen=True, kw_only=True)
class SubsetAverage(Task):
    """Vectors, each with an index, then sets of indices: what is the mean of the vectors with these indices?

    A token consists of a vector (dim channels) and an index set (pool channels, 1 for each index in the set); a linear
    embedding of the set is a sum of one learned vector per index. The first `points` positions hold random unit
    vectors, each with one index of its own drawn from the pool. Every later position is a query: no vector, and a set
    of `subset` of these indices; its target is the mean of their vectors. The sets are disjoint until the points, in
    random order, are used up; then they begin anew. Softmax attention can select a set only if it is a face of the
    convex hull of the keys, which is what this task tests. There is no `source`, since the answer depends on `subset`
    positions. The mean of all points, a guess that ignores the set, has the normalised error 1 − subset/points.

    >>> task = SubsetAverage(length=4, points=3, subset=2, dim=2, pool=4)
    >>> batch = task.sample(1, np.random.default_rng(0))
    >>> print(batch.tokens[0].round(1))
    [[ 0.6 -0.8  0.   1.   0.   0. ]
     [-0.5 -0.9  1.   0.   0.   0. ]
     [ 1.  -0.1  0.   0.   1.   0. ]
     [ 0.   0.   0.   1.   1.   0. ]]
    >>> print(batch.targets[0, -1].round(1))
    [ 0.8 -0.5]
    """

    length: int = 64
    """n: positions of a sequence: the points, then the queries."""
    points: int = 32
    """Number of vectors."""
    subset: int = 3
    """q: number of vectors that each query averages."""
    dim: int = 8
    """Channels of a vector, and of a target."""
    pool: int = 64
    """Number of indices; a sequence uses `points` of them."""

    scales: ClassVar[tuple[str, ...]] = ("length", "points")

    def __post_init__(self) -> None:
        for name in ("length", "points", "subset", "dim", "pool"):
            whole_number(name, getattr(self, name))
        require(self.subset <= self.points, f"subset={self.subset} but points={self.points}: must be at most points")
        require(self.points <= self.pool, f"points={self.points} but pool={self.pool}: must be at most pool")
        require(
            self.points < self.length,
            f"points={self.points} need a length of at least {self.points + 1} (one query), not {self.length}",
        )

    @property
    def vocab(self) -> int:
        return self.dim

    @property
    def width(self) -> int:
        return self.dim + self.pool

    @property
    def chance(self) -> float:
        return 1.0

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        points, queries = self.points, self.length - self.points
        vector = rng.standard_normal((sequences, points, self.dim), dtype=np.float32)
        vector /= np.sqrt(np.einsum("bpd,bpd->bp", vector, vector))[..., None]
        index = distinct(rng, sequences, points, self.pool)
        sets = points // self.subset
        rounds = -(-queries // sets)
        shuffled = distinct(rng, sequences * rounds, points, points)[:, : sets * self.subset]
        chosen = shuffled.reshape(sequences, rounds * sets, self.subset)[:, :queries]  # b query member

        tokens = np.zeros((sequences, self.length, self.width), dtype=np.float32)
        targets = np.full((sequences, self.length, self.dim), IGNORE, dtype=np.float32)
        row, position = np.arange(sequences)[:, None], np.arange(self.length)
        tokens[:, :points, : self.dim] = vector
        tokens[row, position[:points], self.dim + index] = 1
        total = np.zeros((sequences, queries, self.dim), dtype=np.float32)
        for member in np.moveaxis(chosen, 2, 0):  # b query
            tokens[row, position[points:], self.dim + index[row, member]] = 1
            total += vector[row, member]
        targets[:, points:] = total / self.subset
        return Batch(tokens, targets)

    def solve(self, tokens: Float[np.ndarray, "b t w"]) -> Float[np.ndarray, "b t v"]:
        targets = np.full((*tokens.shape[:2], self.dim), IGNORE, dtype=np.float32)
        for row, answer in zip(tokens, targets, strict=True):
            vector, member = row[:, : self.dim], row[:, self.dim :] > 0
            point = vector.any(axis=1)
            for t in np.flatnonzero(~point):
                answer[t] = vector[point & (member & member[t]).any(axis=1)].mean(axis=0)
        return targets

    def roles(self, tokens: Float[np.ndarray, "b t w"]) -> Shaped[np.ndarray, "b t"]:
        return np.where(tokens[..., : self.dim].any(axis=-1), "value", "query")
