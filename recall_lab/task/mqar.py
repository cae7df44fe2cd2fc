"""Multi-query associative recall, in Zoology's layout (Arora et al., arXiv 2312.04927)."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from recall_lab.task.base import IGNORE, Batch, Task, distinct, require

ROWS = 4096
"""Sequences drawn at a time, so that the scratch space of a large sample stays small."""


@dataclass(frozen=True, kw_only=True)
class MQAR(Task):
    """Key and value pairs, then each key once more: what was its value?

    Token ids: 0 is filler, 1 … V/2−1 are keys, V/2 … V−1 are values. `pairs` distinct keys with distinct values
    fill the first 2·pairs places. Behind them lie slots of two places; slot g is drawn without replacement with
    p ∝ (g+1)^(gap_exponent−1), so that .01 asks soon (≈ 1/g) and 1 asks anywhere. The query stands at the first
    place of its slot and the label at the query's own position. At length = 4·pairs every slot is used.

    >>> task = MQAR(vocab=16, length=16, pairs=2)
    >>> batch = task.sample(1, np.random.default_rng(5))
    >>> print(*batch.tokens[0])
    3 10 5 15 3 0 5 0 0 0 0 0 0 0 0 0
    >>> print(*np.where(batch.scored, batch.targets, 0)[0])
    0 0 0 0 10 0 15 0 0 0 0 0 0 0 0 0
    """

    vocab: int = 256
    length: int = 64
    pairs: int = 8
    gap_exponent: float = 0.01

    scales: ClassVar[tuple[str, ...]] = ("length", "pairs")

    def __post_init__(self) -> None:
        require(self.vocab >= 4 and self.vocab % 2 == 0, f"vocab={self.vocab}: an even number of at least 4")
        require(self.pairs >= 1, f"pairs={self.pairs}: at least 1")
        limit = self.vocab // 2 - 1
        require(self.pairs <= limit, f"pairs={self.pairs} but vocab={self.vocab} has only {limit} keys")
        require(
            4 * self.pairs <= self.length,
            f"pairs={self.pairs} needs length of at least {4 * self.pairs} (4 a pair), not {self.length}",
        )
        require(self.gap_exponent >= 0, f"gap_exponent={self.gap_exponent}: at least 0")

    @property
    def chance(self) -> float:
        return 2 / self.vocab

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        shape = sequences, self.length
        tokens = np.zeros(shape, dtype=np.int32)
        targets = np.full(shape, IGNORE, dtype=np.int32)
        source = np.full(shape, IGNORE, dtype=np.int32)
        context = 2 * self.pairs
        values = self.vocab // 2
        weight = _slot_weight((self.length - context) // 2, self.gap_exponent)
        for start in range(0, sequences, ROWS):
            rows = slice(start, min(start + ROWS, sequences))
            count = rows.stop - rows.start
            key = distinct(rng, count, self.pairs, values - 1) + 1
            value = distinct(rng, count, self.pairs, values) + values
            # The smallest of exponentials at rates p, in order, are draws without replacement with weights p.
            clock = rng.standard_exponential((count, weight.size), dtype=np.float32) * weight
            place = context + 2 * _smallest(clock, self.pairs)
            tokens[rows, 0:context:2] = key
            tokens[rows, 1:context:2] = value
            flat = place + (np.arange(rows.start, rows.stop) * self.length)[:, None]
            tokens.ravel()[flat] = key
            targets.ravel()[flat] = value
            source.ravel()[flat] = np.arange(1, context, 2, dtype=np.int32)
        return Batch(tokens, targets, {"source": source})

    def solve(self, tokens: Int[np.ndarray, "b t"]) -> Int[np.ndarray, "b t"]:
        targets = np.full(tokens.shape, IGNORE, dtype=np.int32)
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            memory: dict[int, int] = {}
            for place, (token, following) in enumerate(zip(row, [*row[1:], 0], strict=True)):
                if token in memory:
                    answer[place] = memory[token]
                elif 0 < token < self.vocab // 2 <= following:
                    memory[token] = following
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t"]) -> np.ndarray:
        place = np.arange(tokens.shape[1])
        names = np.where(place < 2 * self.pairs, np.where(place % 2, "value", "key"), "query")
        return np.where(tokens == 0, "filler", names)


@cache
def _slot_weight(slots: int, exponent: float) -> np.ndarray:
    """1/p up to a constant, p ∝ (g+1)^(exponent−1)."""
    return (np.arange(slots, dtype=np.float32) + 1) ** np.float32(1 - exponent)


def _smallest(clock: np.ndarray, count: int) -> np.ndarray:
    """Columns of the `count` smallest entries of each row, smallest first."""
    if 2 * count >= clock.shape[1]:
        return clock.argsort(axis=1)[:, :count]
    part = np.argpartition(clock, count, axis=1)[:, :count]
    order = np.take_along_axis(clock, part, axis=1).argsort(axis=1)
    return np.take_along_axis(part, order, axis=1)
