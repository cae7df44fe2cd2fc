"""Associative recall with key and value in one token: memory alone, without the need to shift."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from recall_lab.task.base import Batch, Task, alphabet, distinct, put, require, spell, unscored, whole


@dataclass(frozen=True, kw_only=True)
class PairedRecall(Task):
    """Each place carries its key and, in the last channel, a value; a query carries its key and an empty value.

    Token ids as in mqar: 0 is empty, 1 … V/2−1 are keys, V/2 … V−1 are values. The first `pairs` places hold
    distinct keys with distinct values; the places behind them ask keys of the context, each at most once while
    there are any left, in random order. Embeddings of the channels are added, so a single layer without a
    short convolution can solve it: token sequences (mqar) need a shift as well. Factor: `source`, the pair's place.

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
    """n: places of a sequence."""
    pairs: int = 32
    """D: keys bound in the context."""
    queries: int | None = None
    """Places that ask, at random behind the context, the others being empty; None: all."""
    distractors: int = 0
    """Further pairs that nobody asks for, at random places among the queries."""
    key_parts: int = 1
    """Tokens that make a key, a channel each: keys that share parts are correlated, see `base.spell`."""
    key_alphabet: int | None = None
    """A: tokens that each part is chosen from; None: (V/2 − 1) // key_parts. Small ones correlate keys, ≈ 1/A."""

    scales: ClassVar[tuple[str, ...]] = ("length", "pairs")

    def __post_init__(self) -> None:
        whole(self, vocab=4, length=1, pairs=1, queries=1, distractors=0, key_parts=1, key_alphabet=1)
        require(self.vocab % 2 == 0, f"vocab={self.vocab}: an even number")
        alphabet(self.vocab, self.pairs, self.distractors, self.key_parts, self.key_alphabet)
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
        behind = self.length - pairs
        asked = behind - self.distractors if self.queries is None else self.queries
        rounds = [distinct(rng, sequences, pairs, pairs) for _ in range(-(-asked // pairs))]
        pair = np.concatenate(rounds, axis=1)[:, :asked]
        place = distinct(rng, sequences, asked + self.distractors, behind) + pairs
        extra, place = place[:, asked:], place[:, :asked]
        tokens = np.zeros((sequences, self.length, self.key_parts + 1), dtype=np.int32)
        full = np.concatenate([key, value[..., None]], axis=-1)
        tokens[:, :pairs] = full[:, :pairs]
        put(tokens, extra, full[:, pairs:])
        put(tokens[..., :-1], place, np.take_along_axis(key, pair[..., None], axis=1))
        targets, source = unscored(sequences, self.length), unscored(sequences, self.length)
        put(targets, place, np.take_along_axis(value, pair, axis=1))
        put(source, place, pair)
        return Batch(tokens, targets, {"source": source})

    def solve(self, tokens: Int[np.ndarray, "b t c"]) -> Int[np.ndarray, "b t"]:
        targets = unscored(*tokens.shape[:2])
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            memory = {tuple(key): value for *key, value in row if value}
            for place, (*key, value) in enumerate(row):
                if any(key) and not value:
                    answer[place] = memory[tuple(key)]
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t c"]) -> np.ndarray:
        names = np.where(tokens[..., -1:] == 0, "query", "key").repeat(tokens.shape[-1], axis=-1)
        names = np.where(np.arange(tokens.shape[-1]) == tokens.shape[-1] - 1, "value", names)
        return np.where(tokens == 0, "filler", names)
