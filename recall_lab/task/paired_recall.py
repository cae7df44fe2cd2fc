"""Associative recall with key and value in one token: memory alone, without the need to shift."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from recall_lab.task.base import IGNORE, Batch, Task, distinct, require


@dataclass(frozen=True, kw_only=True)
class PairedRecall(Task):
    """Each place carries two channels, a key and a value; a query carries its key and an empty value.

    Token ids as in mqar: 0 is empty, 1 … V/2−1 are keys, V/2 … V−1 are values. The first `pairs` places hold
    distinct keys with distinct values; the places behind them ask keys of the context, each at most once while
    there are any left, in random order. Embeddings of the two channels are added, so a single layer without a
    short convolution can solve it: `token sequences` (mqar) need a shift as well.

    >>> task = PairedRecall(vocab=16, length=6, pairs=3)
    >>> batch = task.sample(1, np.random.default_rng(0))
    >>> print(*(f"{key}:{value or ''}" for key, value in batch.tokens[0]))
    4:9 6:12 5:8 5: 6: 4:
    >>> print(*batch.targets[0, 3:])
    8 12 9
    """

    vocab: int = 256
    length: int = 64
    pairs: int = 32

    scales: ClassVar[tuple[str, ...]] = ("length", "pairs")

    def __post_init__(self) -> None:
        require(self.vocab >= 4 and self.vocab % 2 == 0, f"vocab={self.vocab}: an even number of at least 4")
        require(self.pairs >= 1, f"pairs={self.pairs}: at least 1")
        limit = self.vocab // 2 - 1
        require(self.pairs <= limit, f"pairs={self.pairs} but vocab={self.vocab} has only {limit} keys")
        require(
            self.pairs < self.length,
            f"pairs={self.pairs} needs length of at least {self.pairs + 1} (one query), not {self.length}",
        )

    @property
    def chance(self) -> float:
        return 2 / self.vocab

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        values = self.vocab // 2
        key = distinct(rng, sequences, self.pairs, values - 1) + 1
        value = distinct(rng, sequences, self.pairs, values) + values
        asked = self.length - self.pairs
        rounds = [distinct(rng, sequences, self.pairs, self.pairs) for _ in range(-(-asked // self.pairs))]
        chosen = np.concatenate(rounds, axis=1)[:, :asked]
        tokens = np.zeros((sequences, self.length, 2), dtype=np.int32)
        tokens[:, : self.pairs] = np.stack([key, value], axis=-1)
        tokens[:, self.pairs :, 0] = np.take_along_axis(key, chosen, axis=1)
        targets = np.full(tokens.shape[:2], IGNORE, dtype=np.int32)
        targets[:, self.pairs :] = np.take_along_axis(value, chosen, axis=1)
        source = np.full(tokens.shape[:2], IGNORE, dtype=np.int32)
        source[:, self.pairs :] = chosen
        return Batch(tokens, targets, {"source": source})

    def solve(self, tokens: Int[np.ndarray, "b t 2"]) -> Int[np.ndarray, "b t"]:
        targets = np.full(tokens.shape[:2], IGNORE, dtype=np.int32)
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            memory = {key: value for key, value in row if value}
            for place, (key, value) in enumerate(row):
                if not value:
                    answer[place] = memory[key]
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t 2"]) -> np.ndarray:
        asks = tokens[..., 1] == 0
        return np.stack([np.where(asks, "query", "key"), np.where(asks, "filler", "value")], axis=-1)
