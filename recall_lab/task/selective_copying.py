"""Selective copying, in Mamba's layout (Gu and Dao, arXiv 2312.00752, appendix E.1)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from recall_lab.task.base import Batch, Task, distinct, require, unscored, whole


@dataclass(frozen=True, kw_only=True)
class SelectiveCopying(Task):
    """Data tokens at random places among blanks, then as many markers: give the data back, in order.

    Token ids: 0 is blank, 1 is the marker, 2 … V−1 are data, drawn independently. The `data` places are chosen from
    all places before the markers, every choice equally likely. The j-th marker is scored with the j-th datum.
    Factor: `source`, the datum's place.

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
    """n: places of a sequence, the markers included."""
    data: int = 8
    """M: tokens to copy."""

    scales: ClassVar[tuple[str, ...]] = ("length", "data")

    def __post_init__(self) -> None:
        whole(self, vocab=4, length=1, data=1)
        require(
            2 * self.data <= self.length,
            f"data={self.data} need a length of at least {2 * self.data} (a place and a marker each), "
            f"not {self.length}",
        )

    @property
    def chance(self) -> float:
        return 1 / (self.vocab - 2)

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        place = np.sort(distinct(rng, sequences, self.data, self.length - self.data), axis=1)
        data = rng.integers(2, self.vocab, size=place.shape, dtype=np.int32)
        tokens = np.zeros((sequences, self.length), dtype=np.int32)
        np.put_along_axis(tokens, place, data, axis=1)
        tokens[:, -self.data :] = 1
        targets, source = unscored(sequences, self.length), unscored(sequences, self.length)
        targets[:, -self.data :] = data
        source[:, -self.data :] = place
        return Batch(tokens, targets, {"source": source})

    def solve(self, tokens: Int[np.ndarray, "b t"]) -> Int[np.ndarray, "b t"]:
        targets = unscored(*tokens.shape)
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            kept = iter([token for token in row if token > 1])
            for place, token in enumerate(row):
                if token == 1:
                    answer[place] = next(kept)
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t"]) -> np.ndarray:
        return np.array(["filler", "query", "value"])[np.minimum(tokens, 2)]
