"""Multi-query associative recall, in Zoology's layout (Arora et al., arXiv 2312.04927)."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
from jaxtyping import Float32, Int, Shaped

from recall_lab.checks import require, share
from recall_lab.task.base import Batch, Task, alphabet, check_pairs, distinct, put, smallest, spell, unscored

ROWS = 4096
"""Sequences drawn at a time, so that the intermediate arrays of a large sample stay small."""


@dataclass(frozen=True, kw_only=True)
class MQAR(Task):
    """Key and value pairs, then each key once more: what was its value?

    Token ids: 0 is filler, 1 … V/2−1 are keys, V/2 … V−1 are values. `pairs` different keys with different values
    fill the first 2·pairs positions, the context. The rest is divided into slots of two positions; the queries draw
    slots without replacement, slot g with probability ∝ (g+1)^(gap_exponent−1): at .01 (about 1/g) most queries follow
    soon after the pairs, at 1 they are uniform. A query is a key at the first position of its slot, which is scored. At
    length = 4·pairs every slot is used, and gap_exponent changes only the order of the queries.
    Factor: `source`, the position of the value.

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
    """n: positions of a sequence."""
    pairs: int = 8
    """D: pairs in the context."""
    queries: int | None = None
    """How many of the pairs are queried, chosen at random; None: all."""
    distractors: int = 0
    """Further pairs that are never queried, each in a slot of its own among the queries."""
    gap_exponent: float | int = 0.01
    """a, from 0 to 1: how strongly queries favour the slots next to the context; 1: not at all."""
    key_parts: int = 1
    """Tokens that make up a key, one per channel of its position. If above 1, tokens are b t c, and keys that share
    parts are correlated (see `base.spell`)."""
    key_alphabet: int | None = None
    """A: token ids that each part is chosen from; None: (V/2 − 1) // key_parts. The mean cosine of keys is ≈ 1/A."""

    scales: ClassVar[tuple[str, ...]] = ("length", "pairs")

    def __post_init__(self) -> None:
        check_pairs(
            self.vocab, self.length, self.pairs, self.queries, self.distractors, self.key_parts, self.key_alphabet
        )
        share("gap_exponent", self.gap_exponent)
        require(self._queried <= self.pairs, f"queries={self.queries} but pairs={self.pairs}: must be at most pairs")
        need = 2 * (self.pairs + self._queried + self.distractors)
        require(
            need <= self.length,
            f"pairs={self.pairs}, queries={self._queried} and distractors={self.distractors} need a length of at least "
            f"{need} (2 positions each), not {self.length}",
        )

    @property
    def _queried(self) -> int:
        return self.pairs if self.queries is None else self.queries

    @property
    def chance(self) -> float:
        return 2 / self.vocab

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        tokens = np.zeros((sequences, self.length, self.key_parts), dtype=np.int32)
        targets, source = unscored(sequences, self.length), unscored(sequences, self.length)
        for start in range(0, sequences, ROWS):
            rows = slice(start, start + ROWS)
            self._fill(tokens[rows], targets[rows], source[rows], rng)
        return Batch(tokens if self.key_parts > 1 else tokens[..., 0], targets, {"source": source})

    def _fill(
        self,
        tokens: Int[np.ndarray, "b t c"],
        targets: Int[np.ndarray, "b t"],
        source: Int[np.ndarray, "b t"],
        rng: np.random.Generator,
    ) -> None:
        """Draws sequences and writes them into arrays that hold only filler and IGNORE."""
        b, pairs, parts, values = len(tokens), self.pairs, self.key_parts, self.vocab // 2
        context, bound = 2 * pairs, pairs + self.distractors
        letters = alphabet(self.vocab, pairs, self.distractors, parts, self.key_alphabet)
        key = spell(distinct(rng, b, bound, letters**parts), parts, letters)  # b bound parts
        value = distinct(rng, b, bound, values) + values  # b bound
        tokens[:, 0:context:2] = key[:, :pairs]
        tokens[:, 1:context:2, 0] = value[:, :pairs]
        # The order of independent exponential times with rates p is that of draws without replacement with weights p.
        weight = _slot_weight((self.length - context) // 2, self.gap_exponent)
        time = rng.standard_exponential((b, weight.size), dtype=np.float32) * weight  # b slot
        slot = smallest(time, self._queried)
        query = context + 2 * slot
        if self._queried < pairs:
            pair = distinct(rng, b, self._queried, pairs)
        else:
            pair = np.broadcast_to(np.arange(pairs, dtype=np.int32), query.shape)
        put(tokens, query, np.take_along_axis(key, pair[..., None], axis=1))
        put(targets, query, np.take_along_axis(value, pair, axis=1))
        put(source, query, 2 * pair + 1)
        if self.distractors:
            time = rng.random(time.shape, dtype=np.float32)
            np.put_along_axis(time, slot, 2, axis=1)  # the slots of queries come last: all others are below 1
            extra = context + 2 * smallest(time, self.distractors)
            put(tokens, extra, key[:, pairs:])
            put(tokens[..., 0], extra + 1, value[:, pairs:])

    def solve(self, tokens: Int[np.ndarray, "b t *c"]) -> Int[np.ndarray, "b t"]:
        targets = unscored(*tokens.shape[:2])
        for row, answer in zip(tokens.reshape(*targets.shape, -1).tolist(), targets, strict=True):
            table: dict[tuple[int, ...], int] = {}
            for t, (token, (following, *_)) in enumerate(zip(row, [*row[1:], [0]], strict=True)):
                key = tuple(token)
                if key in table:
                    answer[t] = table[key]
                elif 0 < key[0] < self.vocab // 2 <= following:
                    table[key] = following
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t *c"]) -> Shaped[np.ndarray, "b t *c"]:
        first = tokens if tokens.ndim == 2 else tokens[..., 0]
        value = first >= self.vocab // 2
        bound = np.pad(value[:, 1:], ((0, 0), (0, 1)))
        names = np.where(value, "value", np.where(first == 0, "filler", np.where(bound, "key", "query")))
        return names if tokens.ndim == 2 else np.where(tokens == 0, "filler", names[..., None])


@cache
def _slot_weight(slots: int, exponent: float) -> Float32[np.ndarray, " slots"]:
    """1/p_g up to a constant factor, where p_g ∝ (g+1)^(exponent−1)."""
    return (np.arange(slots, dtype=np.float32) + 1) ** np.float32(1 - exponent)
