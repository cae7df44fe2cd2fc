"""Associative recall with key and value at one position: storage alone, without a shift by one token."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int, Shaped

from recall_lab.checks import require
from recall_lab.task.base import Batch, Task, alphabet, check_pairs, distinct, put, spell, unscored


@dataclass(frozen=True, kw_only=True)
class PairedRecall(Task):
    """A pair has its key in the first channels and its value in the last; a query has a key and no value.

    Token ids as in mqar: 0 is empty, 1 … V/2−1 are keys, V/2 … V−1 are values. The first `pairs` positions hold
    different keys with different values. The queries come after them at random positions; any two
    keys are queried equally often, to within one. The embeddings of the channels are added, so a single layer without a
    short convolution can solve this task, whereas mqar also needs a shift by one token.
    Factor: `source`, the position of the pair.

    >>> task = PairedRecall(vocab=16, length=6, pairs=3)
    >>> batch = task.sample(1, np.random.default_rng(0))
    >>> print(*(f"{key}:{value or ''}" for key, value in batch.tokens[0]))
    6:8 7:9 4:13 7: 6: 4:
    >>> print(*batch.targets[0, 3:])
    9 8 13
    """

    vocab: int = 256
    """V: token ids; half of them are values."""
    length: int = 64
    """n: positions of a sequence."""
    pairs: int = 32
    """D: pairs in the context."""
    queries: int | None = None
    """Number of positions after the pairs that hold a query; the others are empty. None: all but the distractors."""
    distractors: int = 0
    """Further pairs that are never queried, at random positions among the queries."""
    key_parts: int = 1
    """Tokens that make up a key, one per channel: keys that share parts are correlated, see `base.spell`."""
    key_alphabet: int | None = None
    """A: token ids that each part is chosen from; None: (V/2 − 1) // key_parts. The mean cosine of keys is ≈ 1/A."""

    scales: ClassVar[tuple[str, ...]] = ("length", "pairs")

    def __post_init__(self) -> None:
        check_pairs(
            self.vocab, self.length, self.pairs, self.queries, self.distractors, self.key_parts, self.key_alphabet
        )
        need = self.pairs + self.distractors + (self.queries or 1)
        require(
            need <= self.length,
            f"pairs={self.pairs}, queries={self.queries or 1} and distractors={self.distractors} need a length of at "
            f"least {need}, not {self.length}",
        )

    @property
    def chance(self) -> float:
        return 2 / self.vocab

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        pairs, bound, values = self.pairs, self.pairs + self.distractors, self.vocab // 2
        letters = alphabet(self.vocab, pairs, self.distractors, self.key_parts, self.key_alphabet)
        key = spell(distinct(rng, sequences, bound, letters**self.key_parts), self.key_parts, letters)
        value = distinct(rng, sequences, bound, values) + values
        after = self.length - pairs
        queries = after - self.distractors if self.queries is None else self.queries
        rounds = [distinct(rng, sequences, pairs, pairs) for _ in range(-(-queries // pairs))]
        pair = np.concatenate(rounds, axis=1)[:, :queries]
        position = distinct(rng, sequences, queries + self.distractors, after) + pairs
        query, extra = position[:, :queries], position[:, queries:]
        tokens = np.zeros((sequences, self.length, self.key_parts + 1), dtype=np.int32)
        full = np.concatenate([key, value[..., None]], axis=-1)
        tokens[:, :pairs] = full[:, :pairs]
        put(tokens, extra, full[:, pairs:])
        put(tokens[..., :-1], query, np.take_along_axis(key, pair[..., None], axis=1))
        targets, source = unscored(sequences, self.length), unscored(sequences, self.length)
        put(targets, query, np.take_along_axis(value, pair, axis=1))
        put(source, query, pair)
        return Batch(tokens, targets, {"source": source})

    def solve(self, tokens: Int[np.ndarray, "b t c"]) -> Int[np.ndarray, "b t"]:
        targets = unscored(*tokens.shape[:2])
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            table = {tuple(key): value for *key, value in row if value}
            for t, (*key, value) in enumerate(row):
                if any(key) and not value:
                    answer[t] = table[tuple(key)]
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t c"]) -> Shaped[np.ndarray, "b t c"]:
        names = np.where(tokens[..., -1:] == 0, "query", "key").repeat(tokens.shape[-1], axis=-1)
        names = np.where(np.arange(tokens.shape[-1]) == tokens.shape[-1] - 1, "value", names)
        return np.where(tokens == 0, "filler", names)
