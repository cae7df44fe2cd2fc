"""q-sparse averaging: the continuous test of dynamic access (Sanford, Hsu and Telgarsky, arXiv 2306.02896)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from recall_lab.task.base import IGNORE, Batch, Task, distinct, require, whole


@dataclass(frozen=True, kw_only=True)
class SubsetAverage(Task):
    """Vectors, each with an index; then sets of indices: the mean of the vectors that carry them.

    A token is a vector (dim channels) beside an index set (pool channels, 1 where an index is in the set), so that
    a linear embedding of it is what an embedding of ids would be: one learned vector an index, added up. The first
    `points` places carry random unit vectors, each with one index of its own, drawn from the pool; every place
    behind them carries no vector and a set of `subset` of these indices, and is scored by the mean of their vectors.
    Sets are dealt out: the points are shuffled and cut into sets, and again when they are used up.
    Softmax finds a set only where the keys allow it (a face of their convex hull): that is the point.
    No `source`: the answer stands at `subset` places. A guess that ignores the set, the mean of all points, has the
    normalised error 1 − subset/points.

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
    """n: places of a sequence: the points, then the queries."""
    points: int = 32
    """Vectors to choose from."""
    subset: int = 3
    """q: vectors that each query averages."""
    dim: int = 8
    """Channels of a vector, and of the answer."""
    pool: int = 64
    """Indices that exist; a sequence uses `points` of them."""

    scales: ClassVar[tuple[str, ...]] = ("length", "points")

    def __post_init__(self) -> None:
        whole(self, length=1, points=1, subset=1, dim=1, pool=1)
        require(self.subset <= self.points, f"subset={self.subset} but points={self.points}: at most all of them")
        require(self.points <= self.pool, f"points={self.points} but pool={self.pool}: an index for each point")
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
        dealt = distinct(rng, sequences * rounds, points, points)[:, : sets * self.subset]
        chosen = dealt.reshape(sequences, rounds * sets, self.subset)[:, :queries]
        chosen = chosen + np.arange(0, sequences * points, points)[:, None, None]

        tokens = np.zeros((sequences, self.length, self.width), dtype=np.float32)
        tokens[:, :points, : self.dim] = vector
        member = np.arange(self.dim, tokens.size, self.width).reshape(sequences, self.length, 1)
        tokens.ravel()[member[:, :points, 0] + index] = 1
        tokens.ravel()[member[:, points:] + index.ravel()[chosen]] = 1
        targets = np.full((sequences, self.length, self.dim), IGNORE, dtype=np.float32)
        vector = vector.reshape(-1, self.dim)
        targets[:, points:] = sum(vector.take(chosen[..., i], axis=0) for i in range(self.subset)) / self.subset
        return Batch(tokens, targets)

    def solve(self, tokens: Float[np.ndarray, "b t w"]) -> Float[np.ndarray, "b t v"]:
        targets = np.full((*tokens.shape[:2], self.dim), IGNORE, dtype=np.float32)
        for row, answer in zip(tokens, targets, strict=True):
            vector, member = row[:, : self.dim], row[:, self.dim :] > 0
            point = vector.any(axis=1)
            for place in np.flatnonzero(~point):
                answer[place] = vector[point & (member & member[place]).any(axis=1)].mean(axis=0)
        return targets

    def roles(self, tokens: Float[np.ndarray, "b t w"]) -> np.ndarray:
        return np.where(tokens[..., : self.dim].any(axis=-1), "value", "query")
