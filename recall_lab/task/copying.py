"""Copying a string (Jelassi et al., arXiv 2402.01032)."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Shaped

from recall_lab.checks import require, whole_number
from recall_lab.task.base import Batch, Task, unscored


@dataclass(frozen=True, kw_only=True)
class Copying(Task):
    """A random string, COPY, and the string again: at each position from COPY on, predict the next character.

    Token ids: 0 is COPY, 1 … V−1 are characters, drawn independently; the string is length/2 characters long. The
    input holds the correct copy up to the current position, so accuracy per sequence equals the string-exact accuracy
    of greedy decoding (until its first error a model reads its own, correct output), and accuracy per token is the
    accuracy per character given a correct prefix. Factor: `source`, the character's position in the string.

    >>> task = Copying(vocab=10, length=8)
    >>> batch = task.sample(1, np.random.default_rng(0))
    >>> print(*batch.tokens[0])
    8 6 5 3 0 8 6 5
    >>> print(*batch.targets[0, 4:])
    8 6 5 3
    """

    vocab: int = 32
    """V: token ids; all but COPY are characters."""
    length: int = 64
    """n: positions of a sequence: the string, COPY, and all of the string but its last character."""

    def __post_init__(self) -> None:
        whole_number("vocab", self.vocab, 3)
        whole_number("length", self.length, 2)
        require(self.length % 2 == 0, f"length={self.length}: must be even, for a string and its copy")

    @property
    def chance(self) -> float:
        return 1 / (self.vocab - 1)

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        half = self.length // 2
        string = rng.integers(1, self.vocab, size=(sequences, half), dtype=np.int32)
        copy = np.zeros(string.shape, dtype=np.int32)
        copy[:, 1:] = string[:, :-1]
        targets, source = unscored(sequences, self.length), unscored(sequences, self.length)
        targets[:, half:] = string
        source[:, half:] = np.arange(half)
        return Batch(np.concatenate([string, copy], axis=1), targets, {"source": source})

    def solve(self, tokens: Int[np.ndarray, "b t"]) -> Int[np.ndarray, "b t"]:
        targets = unscored(*tokens.shape)
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            answer[row.index(0) :] = row[: row.index(0)]
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t"]) -> Shaped[np.ndarray, "b t"]:
        return np.where((tokens == 0).cumsum(axis=1) > 0, "query", "value")
