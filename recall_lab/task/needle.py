"""A needle in a haystack: one pair to be recalled from a long distracting text (RULER, arXiv 2404.06654)."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Int, Shaped

from recall_lab.checks import choice, require, share, whole_number
from recall_lab.task.base import Batch, Task, distinct, others, put, unscored

HAYSTACKS = ("repeat", "noise", "needles")


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """[MARK key value] somewhere in a haystack, and at the very end [MARK key]: what was the value?

    Token ids: 0 is MARK, 1 … words are the haystack's words, then keys, then as many values. The haystack consists of
    a motif of all the words, repeated (`repeat`), of words drawn independently (`noise`), or of needles with keys and
    values other than the queried ones (`needles`; up to two words pad its end). The queried value occurs exactly once.
    The depth of a needle is the share of the haystack, in words or in other needles, that precedes it. Variants as in
    RULER: several keys of which one is queried (multi-key); several values per key (multi-value: in the query
    [MARK key key …] every repetition of the key is scored, the j-th with the j-th value in the order of the text);
    several keys queried one after another (multi-query). Factors: `source`, the position of the value; `depth` of the
    needle in per cent.

    >>> task = Needle(vocab=13, words=4, length=16, haystack="repeat")
    >>> batch = task.sample(1, np.random.default_rng(0))
    >>> print(*batch.tokens[0])
    1 2 3 4 1 2 0 8 11 2 3 4 1 2 0 8
    >>> print(batch.targets[0, -1], batch.factors["source"][0, -1], batch.factors["depth"][0, -1])
    11 8 55
    """

    vocab: int = 256
    """V: token ids; half of the ids that are neither MARK nor words are keys, half values."""
    length: int = 64
    """n: positions of a sequence, the query included."""
    haystack: str = "noise"
    """repeat, noise or needles."""
    words: int = 8
    """Number of words: the length of the motif (repeat), or how many words the noise is drawn from."""
    depth: float | int | None = None
    """Share of the haystack before the queried needle, 0 to 1; None: all depths equally likely."""
    keys: int = 1
    """Number of different keys (multi-key)."""
    values: int = 1
    """Values of each key, each in a needle of its own (multi-value)."""
    queries: int = 1
    """How many of the keys are queried (multi-query)."""

    def __post_init__(self) -> None:
        whole_number("vocab", self.vocab, 4)
        for name in ("length", "words", "keys", "values", "queries"):
            whole_number(name, getattr(self, name))
        choice("haystack", self.haystack, HAYSTACKS)
        if self.depth is not None:
            share("depth", self.depth)
        require(self.queries <= self.keys, f"queries={self.queries} but keys={self.keys}: must be at most keys")
        need = self.keys * self.values
        if self.haystack == "needles":  # the haystack needs a value that is not queried
            need = max(need, self.queries * self.values + 1)
        require(
            need <= self._pool,
            f"keys={self.keys} and values={self.values} need {need} values, but vocab={self.vocab} with "
            f"words={self.words} has only {self._pool}",
        )
        least = 3 * self.keys * self.values + self.queries * (1 + self.values)
        require(
            least <= self.length,
            f"keys={self.keys}, values={self.values} and queries={self.queries} need a length of at least {least}, "
            f"not {self.length}",
        )
        require(
            self.depth is None or self.queries == self.values == 1,
            f"depth={self.depth} but queries={self.queries} and values={self.values}: must be null where more than one "
            "needle is queried",
        )

    @property
    def _pool(self) -> int:
        """Number of key ids, and of value ids."""
        return max(0, (self.vocab - 1 - self.words) // 2)

    @property
    def chance(self) -> float:
        return 1 / self._pool

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        queried = self.queries * self.values
        first_key, first_value = 1 + self.words, 1 + self.words + self._pool
        key = distinct(rng, sequences, self.keys, self._pool)
        value = distinct(rng, sequences, self.keys * self.values, self._pool)
        text = self.length - self.queries - queried  # positions before the queries
        before, start = self._positions(sequences, text, rng)

        tokens = np.zeros((sequences, self.length), dtype=np.int32)
        if self.haystack == "repeat":
            tokens[:, :text] = 1 + np.arange(text) % self.words
        else:
            tokens[:, :text] = rng.integers(1, 1 + self.words, size=(sequences, text), dtype=np.int32)
        if self.haystack == "needles":
            end = text - text % 3
            tokens[:, 0:end:3] = 0
            tokens[:, 1:end:3] = first_key + others(rng, end // 3, key[:, : self.queries], self._pool)
            tokens[:, 2:end:3] = first_value + others(rng, end // 3, value[:, :queried], self._pool)
        put(tokens, start, 0)
        put(tokens, start + 1, first_key + key.repeat(self.values, axis=1))
        put(tokens, start + 2, first_value + value)

        targets, source, depth = (unscored(sequences, self.length) for _ in range(3))
        mark = text + (1 + self.values) * np.arange(self.queries)
        query = (mark[:, None] + 1 + np.arange(self.values)).ravel()
        tokens[:, mark] = 0
        tokens[:, query] = first_key + key[:, : self.queries].repeat(self.values, axis=1)
        targets[:, query] = first_value + value[:, :queried]
        source[:, query] = start[:, :queried] + 2
        depth[:, query] = np.rint(100 * before[:, :queried] / max(self._haystack_units(text), 1))
        return Batch(tokens, targets, {"source": source, "depth": depth})

    def _haystack_units(self, text: int) -> int:
        """Number of words (haystack of needles: of further needles) that fit into the text besides the needles."""
        needles = self.keys * self.values
        return text // 3 - needles if self.haystack == "needles" else text - 3 * needles

    def _positions(
        self, sequences: int, text: int, rng: np.random.Generator
    ) -> tuple[Int[np.ndarray, "b needles"], Int[np.ndarray, "b needles"]]:
        """Units of the haystack before each needle, and its position; the needles of a key are in ascending order."""
        units = self._haystack_units(text)
        before = rng.integers(units + 1, size=(sequences, self.keys * self.values))
        if self.depth is not None:
            before[:, 0] = round(self.depth * units)
        before.reshape(sequences, self.keys, self.values).sort(axis=2)
        earlier = before.argsort(axis=1, kind="stable").argsort(axis=1)  # how many needles precede each
        return before, (3 if self.haystack == "needles" else 1) * before + 3 * earlier

    def solve(self, tokens: Int[np.ndarray, "b t"]) -> Int[np.ndarray, "b t"]:
        targets = unscored(*tokens.shape)
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            table: dict[int, list[int]] = {}
            for t, (token, key) in enumerate(pairwise(row), start=1):
                if token:
                    continue
                if t + 1 < len(row) and row[t + 1] > self.words + self._pool:
                    table.setdefault(key, []).append(row[t + 1])
                else:
                    answer[t : t + self.values] = table[key]
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t"]) -> Shaped[np.ndarray, "b t"]:
        text = tokens.shape[1] - self.queries * (1 + self.values)
        limits = [1, 1 + self.words, 1 + self.words + self._pool]
        names = np.array(["marker", "filler", "key", "value"])[np.digitize(tokens, limits)]
        names[:, text:] = np.where(names[:, text:] == "key", "query", names[:, text:])
        return names
