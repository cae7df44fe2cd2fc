"""Recall among noise (MAD's noisy in-context recall: Poli et al., arXiv 2403.17844)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int, Shaped

from recall_lab.checks import require, whole_number
from recall_lab.task.base import Batch, Task, distinct, put, unscored


@dataclass(frozen=True, kw_only=True)
class NoisyRecall(Task):
    """Key and value pairs at random positions in noise, then each key once more: what was its value?

    Token ids: 0 … words−1 are noise, drawn independently, then keys, then as many values. Every position that holds
    neither a pair nor a query holds noise, so content differs from noise in its ids and not in its position. All pairs
    come before all queries, with random amounts of noise between them. Factor: `source`, the position of the value.

    >>> task = NoisyRecall(vocab=20, words=4, length=12, pairs=2)
    >>> batch = task.sample(1, np.random.default_rng(0))
    >>> print(*batch.tokens[0])
    10 16 9 14 3 9 2 2 2 3 10 3
    >>> print(*np.where(batch.scored, batch.targets, 0)[0])
    0 0 0 0 0 14 0 0 0 0 16 0
    """

    vocab: int = 256
    """V: token ids; half of the ids that are not noise are keys, half values."""
    length: int = 64
    """n: positions of a sequence."""
    pairs: int = 8
    """D: pairs, each queried once."""
    words: int = 16
    """Number of ids that the noise is drawn from."""

    scales: ClassVar[tuple[str, ...]] = ("length", "pairs")

    def __post_init__(self) -> None:
        whole_number("vocab", self.vocab, 3)
        whole_number("length", self.length)
        whole_number("pairs", self.pairs)
        whole_number("words", self.words)
        require(
            self.pairs <= self._pool,
            f"pairs={self.pairs} but vocab={self.vocab} with words={self.words} has only {self._pool} keys",
        )
        need = 3 * self.pairs
        require(need <= self.length, f"pairs={self.pairs} need a length of at least {need}, not {self.length}")

    @property
    def _pool(self) -> int:
        """Number of key ids, and of value ids."""
        return max(0, (self.vocab - self.words) // 2)

    @property
    def chance(self) -> float:
        return 1 / self._pool

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        pairs = self.pairs
        key = distinct(rng, sequences, pairs, self._pool) + self.words
        value = distinct(rng, sequences, pairs, self._pool) + self.words + self._pool
        order = distinct(rng, sequences, pairs, pairs)
        # The position of each pair, then of each query: the noise before it plus the pairs and queries before it.
        noise = np.sort(rng.integers(self.length - 3 * pairs + 1, size=(sequences, 2 * pairs)), axis=1)
        start = noise + np.concatenate([2 * np.arange(pairs), 2 * pairs + np.arange(pairs)])
        pair, query = start[:, :pairs], start[:, pairs:]
        tokens = rng.integers(self.words, size=(sequences, self.length), dtype=np.int32)
        targets, source = unscored(sequences, self.length), unscored(sequences, self.length)
        put(tokens, pair, key)
        put(tokens, pair + 1, value)
        put(tokens, query, np.take_along_axis(key, order, axis=1))
        put(targets, query, np.take_along_axis(value, order, axis=1))
        put(source, query, np.take_along_axis(pair, order, axis=1) + 1)
        return Batch(tokens, targets, {"source": source})

    def solve(self, tokens: Int[np.ndarray, "b t"]) -> Int[np.ndarray, "b t"]:
        targets = unscored(*tokens.shape)
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            table: dict[int, int] = {}
            for t, token in enumerate(row):
                if token in table:
                    answer[t] = table[token]
                elif self.words <= token < self.words + self._pool:
                    table[token] = row[t + 1]
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t"]) -> Shaped[np.ndarray, "b t"]:
        names = np.array(["filler", "key", "value"])[np.digitize(tokens, [self.words, self.words + self._pool])]
        bound = np.pad(names[:, 1:] == "value", ((0, 0), (0, 1)))
        return np.where((names == "key") & ~bound, "query", names)
