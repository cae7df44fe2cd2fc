"""Selective copying, in Mamba's layout (Gu and Dao, arXiv 2312.00752, appendix E.1)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int, Shaped

from recall_lab.checks import require, whole_number
from recall_lab.task.base import Batch, Task, distinct, unscored


@dataclass(frozen=True, kw_only=True)
class SelectiveCopying(Task):
    """Data tokens at random positions among blanks, then as many markers: repeat the data in order.

    Token ids: 0 is blank, 1 is the marker, 2 … V−1 are data, drawn independently. The positions of the data are chosen
    from all positions before the markers, every choice equally likely. The target at the j-th marker is the j-th
    datum. Factor: `source`, the position of the datum.

    >>> task = SelectiveCopying(vocab=10, length=12, data=3)
    >>> batch = task.sample(1, np.random.default_rng(0))
    >>> print(*batch.tokens[0])
    0 0 0 0 0 8 7 9 0 1 1 1
    >>> print(*batch.targets[0, -3:])
    8 7 9
    """

    vocab: int = 16
    """V: token ids; all but the blank and the marker are data."""
    length: int = 64
    """n: positions of a sequence, the markers included."""
    data: int = 8
    """M: tokens to copy."""

    scales: ClassVar[tuple[str, ...]] = ("length", "data")

    def __post_init__(self) -> None:
        whole_number("vocab", self.vocab, 4)
        whole_number("length", self.length)
        whole_number("data", self.data)
        require(
            2 * self.data <= self.length,
            f"data={self.data} need a length of at least {2 * self.data} (a position and a marker each), "
            f"not {self.length}",
        )

    @property
    def chance(self) -> float:
        return 1 / (self.vocab - 2)

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        position = np.sort(distinct(rng, sequences, self.data, self.length - self.data), axis=1)
        data = rng.integers(2, self.vocab, size=position.shape, dtype=np.int32)
        tokens = np.zeros((sequences, self.length), dtype=np.int32)
        np.put_along_axis(tokens, position, data, axis=1)
        tokens[:, -self.data :] = 1
        targets, source = unscored(sequences, self.length), unscored(sequences, self.length)
        targets[:, -self.data :] = data
        source[:, -self.data :] = position
        return Batch(tokens, targets, {"source": source})

    def solve(self, tokens: Int[np.ndarray, "b t"]) -> Int[np.ndarray, "b t"]:
        targets = unscored(*tokens.shape)
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            data = iter([token for token in row if token > 1])
            for t, token in enumerate(row):
                if token == 1:
                    answer[t] = next(data)
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t"]) -> Shaped[np.ndarray, "b t"]:
        return np.array(["filler", "query", "value"])[np.minimum(tokens, 2)]
