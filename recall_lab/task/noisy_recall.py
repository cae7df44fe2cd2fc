"""Recall among noise (MAD's noisy in-context recall: Poli et al., arXiv 2403.17844)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from recall_lab.task.base import Batch, Task, distinct, put, require, unscored, whole


@dataclass(frozen=True, kw_only=True)
class NoisyRecall(Task):
    """Key and value pairs scattered in noise, then each key once more, scattered too: what was its value?

    Token ids: 0 … words−1 are noise, drawn independently, then keys, then as many values. Nothing is empty: what is
    neither pair nor query is noise, and noise must be told from content by what it is, never by where it stands.
    Pairs and queries are dropped into the noise at random, all pairs before all queries. Factor: `source`, the
    place of the value.

    >>> task = NoisyRecall(vocab=20, words=4, length=12, pairs=2)
    >>> batch = task.sample(1, np.random.default_rng(0))
    >>> print(*batch.tokens[0])
    10 16 9 14 3 9 2 2 2 3 10 3
    >>> print(*np.where(batch.scored, batch.targets, 0)[0])
    0 0 0 0 0 14 0 0 0 0 16 0
    """

    vocab: int = 256
    """V: token ids; of those that are not noise half are keys, half values."""
    length: int = 64
    """n: places of a sequence."""
    pairs: int = 8
    """D: keys bound, and asked."""
    words: int = 16
    """Ids that the noise is drawn from."""

    scales: ClassVar[tuple[str, ...]] = ("length", "pairs")

    def __post_init__(self) -> None:
        whole(self, vocab=3, length=1, pairs=1, words=1)
        require(
            self.pairs <= self._pool,
            f"pairs={self.pairs} but vocab={self.vocab} with words={self.words} has only {self._pool} keys",
        )
        need = 3 * self.pairs
        require(need <= self.length, f"pairs={self.pairs} need a length of at least {need}, not {self.length}")

    @property
    def _pool(self) -> int:
        """Keys, and as many values."""
        return (self.vocab - self.words) // 2

    @property
    def chance(self) -> float:
        return 1 / self._pool

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        pairs = self.pairs
        key = distinct(rng, sequences, pairs, self._pool) + self.words
        value = distinct(rng, sequences, pairs, self._pool) + self.words + self._pool
        order = distinct(rng, sequences, pairs, pairs)
        # How much noise stands before each unit (pairs, then queries), and how much of the units before it.
        noise = np.sort(rng.integers(self.length - 3 * pairs + 1, size=(sequences, 2 * pairs)), axis=1)
        start = noise + np.concatenate([2 * np.arange(pairs), 2 * pairs + np.arange(pairs)])
        told, asked = start[:, :pairs], start[:, pairs:]
        tokens = rng.integers(self.words, size=(sequences, self.length), dtype=np.int32)
        targets, source = unscored(sequences, self.length), unscored(sequences, self.length)
        put(tokens, told, key)
        put(tokens, told + 1, value)
        put(tokens, asked, np.take_along_axis(key, order, axis=1))
        put(targets, asked, np.take_along_axis(value, order, axis=1))
        put(source, asked, np.take_along_axis(told, order, axis=1) + 1)
        return Batch(tokens, targets, {"source": source})

    def solve(self, tokens: Int[np.ndarray, "b t"]) -> Int[np.ndarray, "b t"]:
        targets = unscored(*tokens.shape)
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            memory: dict[int, int] = {}
            for place, token in enumerate(row):
                if token in memory:
                    answer[place] = memory[token]
                elif self.words <= token < self.words + self._pool:
                    memory[token] = row[place + 1]
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t"]) -> np.ndarray:
        names = np.array(["filler", "key", "value"])[np.digitize(tokens, [self.words, self.words + self._pool])]
        bound = np.pad(names[:, 1:] == "value", ((0, 0), (0, 1)))
        return np.where((names == "key") & ~bound, "query", names)
