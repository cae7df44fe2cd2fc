"""Multi-query associative recall, in Zoology's layout (Arora et al., arXiv 2312.04927)."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from recall_lab.task.base import Batch, Task, alphabet, distinct, earliest, require, spell, unscored, whole

ROWS = 4096
"""Sequences drawn at a time, so that the scratch space of a large sample stays small."""


@dataclass(frozen=True, kw_only=True)
class MQAR(Task):
    """Key and value pairs, then each key once more: what was its value?

    Token ids: 0 is filler, 1 … V/2−1 are keys, V/2 … V−1 are values. `pairs` distinct keys with distinct values
    fill the first 2·pairs places. Behind them lie slots of two places; slot g is drawn without replacement with
    p ∝ (g+1)^(gap_exponent−1), so that .01 asks soon (≈ 1/g) and 1 asks anywhere. The query stands at the first
    place of its slot and the label at the query's own position. At length = 4·pairs every slot is used and
    gap_exponent changes only which key is asked when. Factor: `source`, the place of the value.

    >>> task = MQAR(vocab=16, length=16, pairs=2)
    >>> batch = task.sample(1, np.random.default_rng(5))
    >>> print(*batch.tokens[0])
    3 10 5 15 3 0 5 0 0 0 0 0 0 0 0 0
    >>> print(*np.where(batch.scored, batch.targets, 0)[0])
    0 0 0 0 10 0 15 0 0 0 0 0 0 0 0 0
    """

    vocab: int = 256
    """V: token ids; half of them are values."""
    length: int = 64
    """n: places of a sequence."""
    pairs: int = 8
    """D: keys bound in the context."""
    queries: int | None = None
    """How many of the pairs are asked, chosen at random; None: all."""
    distractors: int = 0
    """Further pairs that nobody asks for, each in a slot of its own among the queries."""
    gap_exponent: float | int = 0.01
    """a: how soon a pair is asked."""
    key_parts: int = 1
    """Tokens that make a key, in as many channels of its place (tokens are then b t c): keys that share parts are
    correlated, see `base.spell`."""
    key_alphabet: int | None = None
    """A: tokens that each part is chosen from; None: (V/2 − 1) // key_parts. Small ones correlate keys, ≈ 1/A."""

    scales: ClassVar[tuple[str, ...]] = ("length", "pairs")

    def __post_init__(self) -> None:
        whole(self, vocab=4, length=1, pairs=1, queries=1, distractors=0, key_parts=1, key_alphabet=1)
        require(self.vocab % 2 == 0, f"vocab={self.vocab}: an even number")
        require(self._asked <= self.pairs, f"queries={self.queries} but pairs={self.pairs}: at most one a pair")
        alphabet(self.vocab, self.pairs, self.distractors, self.key_parts, self.key_alphabet)
        need = 2 * (self.pairs + self._asked + self.distractors)
        require(
            need <= self.length,
            f"pairs={self.pairs}, queries={self._asked} and distractors={self.distractors} need a length of at least "
            f"{need} (2 places each), not {self.length}",
        )
        require(self.gap_exponent >= 0, f"gap_exponent={self.gap_exponent}: at least 0")

    @property
    def _asked(self) -> int:
        return self.pairs if self.queries is None else self.queries

    @property
    def chance(self) -> float:
        return 2 / self.vocab

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        n, parts, values, context = self.length, self.key_parts, self.vocab // 2, 2 * self.pairs
        bound = self.pairs + self.distractors
        letters = alphabet(self.vocab, self.pairs, self.distractors, parts, self.key_alphabet)
        weight = _slot_weight((n - context) // 2, self.gap_exponent)
        tokens = np.zeros((sequences, n, parts), dtype=np.int32)
        targets, source = unscored(sequences, n), unscored(sequences, n)
        for start in range(0, sequences, ROWS):
            rows = slice(start, min(start + ROWS, sequences))
            count = rows.stop - rows.start
            key = spell(distinct(rng, count, bound, letters**parts), parts, letters)
            value = distinct(rng, count, bound, values) + values
            tokens[rows, 0:context:2] = key[:, : self.pairs]
            tokens[rows, 1:context:2, 0] = value[:, : self.pairs]
            # The smallest of exponentials at rates p, in order, are draws without replacement with weights p.
            clock = rng.standard_exponential((count, weight.size), dtype=np.float32) * weight
            slot = earliest(clock, self._asked)
            each = np.arange(rows.start, rows.stop)[:, None]
            at = context + 2 * slot + each * n
            if self._asked < self.pairs:
                pair = distinct(rng, count, self._asked, self.pairs)
            else:
                pair = np.broadcast_to(np.arange(self.pairs), at.shape)
            tokens.reshape(-1, parts)[at] = np.take_along_axis(key, pair[..., None], axis=1)
            targets.ravel()[at] = np.take_along_axis(value, pair, axis=1)
            source.ravel()[at] = 2 * pair + 1
            if self.distractors:
                clock = rng.random(clock.shape, dtype=np.float32)
                np.put_along_axis(clock, slot, 2, axis=1)
                at = context + 2 * earliest(clock, self.distractors)
                tokens[each, at] = key[:, self.pairs :]
                tokens[each, at + 1, 0] = value[:, self.pairs :]
        return Batch(tokens if parts > 1 else tokens[..., 0], targets, {"source": source})

    def solve(self, tokens: Int[np.ndarray, "b t *c"]) -> Int[np.ndarray, "b t"]:
        targets = unscored(*tokens.shape[:2])
        for row, answer in zip(tokens.reshape(*targets.shape, -1).tolist(), targets, strict=True):
            memory: dict[tuple[int, ...], int] = {}
            for place, (token, (following, *_)) in enumerate(zip(row, [*row[1:], [0]], strict=True)):
                key = tuple(token)
                if key in memory:
                    answer[place] = memory[key]
                elif 0 < key[0] < self.vocab // 2 <= following:
                    memory[key] = following
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t *c"]) -> np.ndarray:
        first = tokens if tokens.ndim == 2 else tokens[..., 0]
        value = first >= self.vocab // 2
        bound = np.pad(value[:, 1:], ((0, 0), (0, 1)))
        names = np.where(value, "value", np.where(first == 0, "filler", np.where(bound, "key", "query")))
        return names if tokens.ndim == 2 else np.where(tokens == 0, "filler", names[..., None])


@cache
def _slot_weight(slots: int, exponent: float) -> np.ndarray:
    """1/p up to a constant, p ∝ (g+1)^(exponent−1)."""
    return (np.arange(slots, dtype=np.float32) + 1) ** np.float32(1 - exponent)
