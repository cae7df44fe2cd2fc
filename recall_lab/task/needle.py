"""A needle in a haystack: one thing to remember among many that do not matter (RULER, arXiv 2404.06654)."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Int

from recall_lab.task.base import Batch, Task, distinct, others, put, require, unscored, whole

HAYSTACKS = ("repeat", "noise", "needles")


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """[MARK key value] somewhere in a haystack, and at the very end [MARK key]: what was the value?

    Token ids: 0 is MARK, 1 … words are the haystack's words, then keys, then as many values. The haystack is a
    motif of all the words repeated without end (`repeat`), words drawn independently (`noise`), or needles with
    other keys and other values (`needles`; up to two words pad its end); needles take the place of as many words.
    The asked value stands exactly once.
    Depth is the share of the haystack, in words or in other needles, that stands before the needle. Variants as in
    RULER: several needles of which one is asked (multi-key), several values of one key (multi-value: the query
    [MARK key key …] is scored at each repetition of the key, the j-th asking for the j-th value), several keys asked
    one after the other (multi-query). Factors: `source`, the place of the value; `depth` of the needle in per cent.

    >>> task = Needle(vocab=13, words=4, length=16, haystack="repeat")
    >>> batch = task.sample(1, np.random.default_rng(0))
    >>> print(*batch.tokens[0])
    1 2 3 4 1 2 0 8 11 2 3 4 1 2 0 8
    >>> print(batch.targets[0, -1], batch.factors["source"][0, -1], batch.factors["depth"][0, -1])
    11 8 55
    """

    vocab: int = 256
    """V: token ids; of those that are neither MARK nor words half are keys, half values."""
    length: int = 64
    """n: places of a sequence, the query included."""
    haystack: str = "noise"
    """repeat, noise or needles."""
    words: int = 8
    """Words of the haystack: the length of its motif, or how many its noise is drawn from."""
    depth: float | int | None = None
    """Share of the haystack before the asked needle, 0 to 1; None: anywhere, every depth equally likely."""
    keys: int = 1
    """Different keys that have a needle (multi-key)."""
    values: int = 1
    """Values of each key, each in a needle of its own (multi-value)."""
    queries: int = 1
    """How many of the keys are asked (multi-query)."""

    def __post_init__(self) -> None:
        whole(self, vocab=4, length=1, words=1, keys=1, values=1, queries=1)
        require(self.haystack in HAYSTACKS, f"haystack={self.haystack!r}: one of {', '.join(HAYSTACKS)}")
        require(self.queries <= self.keys, f"queries={self.queries} but keys={self.keys}: at most all of the keys")
        spared = self.queries * self.values if self.haystack == "needles" else 0
        need = max(self.keys * self.values, spared + (spared > 0))
        require(
            need <= self._pool,
            f"keys={self.keys} of values={self.values} need {need} values, but vocab={self.vocab} with "
            f"words={self.words} has only {self._pool}",
        )
        least = 3 * self.keys * self.values + self.queries * (1 + self.values)
        require(
            least <= self.length,
            f"keys={self.keys}, values={self.values} and queries={self.queries} need a length of at least {least}, "
            f"not {self.length}",
        )
        if self.depth is not None:
            require(0 <= self.depth <= 1, f"depth={self.depth}: from 0 to 1")
            single = self.queries == self.values == 1
            require(
                single,
                f"depth={self.depth} places one needle, but queries={self.queries} and values={self.values} ask for "
                f"{self.queries * self.values}: leave it null",
            )

    @property
    def _pool(self) -> int:
        """Keys, and as many values."""
        return (self.vocab - 1 - self.words) // 2

    @property
    def chance(self) -> float:
        return 1 / self._pool

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        needles, asked = self.keys * self.values, self.queries * self.values
        first_key, first_value = 1 + self.words, 1 + self.words + self._pool
        key = distinct(rng, sequences, self.keys, self._pool)
        value = distinct(rng, sequences, needles, self._pool)
        stretch = self.length - self.queries - asked
        unit = 3 if self.haystack == "needles" else 1
        straws = stretch // unit - 3 * needles // unit
        before = rng.integers(straws + 1, size=(sequences, needles))
        if self.depth is not None:
            before[:, 0] = round(self.depth * straws)
        before.reshape(sequences, self.keys, self.values).sort(axis=2)
        start = unit * before + 3 * before.argsort(axis=1, kind="stable").argsort(axis=1)

        tokens = np.zeros((sequences, self.length), dtype=np.int32)
        if self.haystack == "repeat":
            tokens[:, :stretch] = 1 + np.arange(stretch) % self.words
        else:
            tokens[:, :stretch] = rng.integers(1, 1 + self.words, size=(sequences, stretch), dtype=np.int32)
        if self.haystack == "needles":
            end = stretch - stretch % 3
            tokens[:, 0:end:3] = 0
            tokens[:, 1:end:3] = first_key + others(rng, end // 3, key[:, : self.queries], self._pool)
            tokens[:, 2:end:3] = first_value + others(rng, end // 3, value[:, :asked], self._pool)
        put(tokens, start, 0)
        put(tokens, start + 1, first_key + key.repeat(self.values, axis=1))
        put(tokens, start + 2, first_value + value)

        targets, source, depth = (unscored(sequences, self.length) for _ in range(3))
        query = tokens[:, stretch:].reshape(sequences, self.queries, 1 + self.values)
        query[..., 1:] = first_key + key[:, : self.queries, None]
        tokens[:, stretch:] = query.reshape(sequences, -1)
        place = stretch + np.delete(np.arange(self.queries + asked), np.s_[:: 1 + self.values])
        targets[:, place] = first_value + value[:, :asked]
        source[:, place] = start[:, :asked] + 2
        depth[:, place] = np.rint(100 * before[:, :asked] / max(straws, 1))
        return Batch(tokens, targets, {"source": source, "depth": depth})

    def solve(self, tokens: Int[np.ndarray, "b t"]) -> Int[np.ndarray, "b t"]:
        targets = unscored(*tokens.shape)
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            told: dict[int, list[int]] = {}
            for place, (token, key) in enumerate(pairwise(row), start=1):
                if token:
                    continue
                if place + 1 < len(row) and row[place + 1] > self.words + self._pool:
                    told.setdefault(key, []).append(row[place + 1])
                else:
                    answer[place : place + self.values] = told[key]
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t"]) -> np.ndarray:
        stretch = tokens.shape[1] - self.queries * (1 + self.values)
        limits = [1, 1 + self.words, 1 + self.words + self._pool]
        names = np.array(["marker", "filler", "key", "value"])[np.digitize(tokens, limits)]
        names[:, stretch:] = np.where(names[:, stretch:] == "key", "query", names[:, stretch:])
        return names
