"""Induction heads, in Mamba's layout (Gu and Dao, arXiv 2312.00752, section 4.1.2; Olsson et al., 2209.11895)."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Shaped

from recall_lab.checks import whole_number
from recall_lab.task.base import Batch, Task, put, unscored


@dataclass(frozen=True, kw_only=True)
class Induction(Task):
    """Random words with one MARK among them and one at the end: which word followed the first MARK?

    Token ids: 0 is MARK, 1 … V−1 are words, drawn independently. The position of the first MARK is uniform over
    0 … n−3; only the last position is scored. Factor: `source`, the position of the word after the first MARK.

    >>> task = Induction(vocab=10, length=12)
    >>> batch = task.sample(1, np.random.default_rng(0))
    >>> print(*batch.tokens[0])
    8 6 5 3 3 0 1 1 2 8 6 0
    >>> print(batch.targets[0, -1])
    1
    """

    vocab: int = 16
    """V: token ids; all but MARK are words."""
    length: int = 64
    """n: positions of a sequence."""

    def __post_init__(self) -> None:
        whole_number("vocab", self.vocab, 3)
        whole_number("length", self.length, 3)

    @property
    def chance(self) -> float:
        return 1 / (self.vocab - 1)

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        tokens = rng.integers(1, self.vocab, size=(sequences, self.length), dtype=np.int32)
        mark = rng.integers(self.length - 2, size=(sequences, 1))
        put(tokens, mark, 0)
        tokens[:, -1] = 0
        targets, source = unscored(sequences, self.length), unscored(sequences, self.length)
        targets[:, -1:] = np.take_along_axis(tokens, mark + 1, axis=1)
        source[:, -1:] = mark + 1
        return Batch(tokens, targets, {"source": source})

    def solve(self, tokens: Int[np.ndarray, "b t"]) -> Int[np.ndarray, "b t"]:
        targets = unscored(*tokens.shape)
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            answer[row.index(0, row.index(0) + 1)] = row[row.index(0) + 1]
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t"]) -> Shaped[np.ndarray, "b t"]:
        names = np.where(tokens == 0, "marker", "filler").astype("<U6")
        names[:, 1:][tokens[:, :-1] == 0] = "value"
        names[:, -1] = "query"
        return names
