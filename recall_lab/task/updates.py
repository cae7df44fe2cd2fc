"""Recall of keys whose value changes, which tests overwriting (as in DeltaNet, arXiv 2102.11174, section 4)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int, Shaped

from recall_lab.checks import require, whole_number
from recall_lab.task.base import IGNORE, Batch, Task, distinct, put, unscored


@dataclass(frozen=True, kw_only=True)
class Updates(Task):
    """Key and value pairs in which keys recur with a new value, then each key: what is its latest value?

    Token ids as in mqar: 0 is filler, 1 … V/2−1 are keys, V/2 … V−1 are values. The context holds, in random order,
    one pair for each of `pairs` keys and `updates` further pairs whose keys are drawn from these independently; no
    value occurs twice, so every update changes the value. Each key is then queried once, at the first position of a
    slot of two; the slots are uniform over the positions after the context. Factors: `source`, the position of the
    latest value; `rebindings`, the number of updates of the key; `stale`, the position of the value before the latest
    (IGNORE where there is none).

    >>> task = Updates(vocab=16, length=12, pairs=2, updates=2)
    >>> batch = task.sample(1, np.random.default_rng(3))
    >>> print(*batch.tokens[0])
    2 9 3 10 2 15 3 11 2 0 3 0
    >>> print(*batch.targets[0, [8, 10]], *batch.factors["stale"][0, [8, 10]])
    15 11 1 3
    """

    vocab: int = 256
    """V: token ids; half of them are values."""
    length: int = 64
    """n: positions of a sequence."""
    pairs: int = 8
    """Number of different keys, each queried once."""
    updates: int = 8
    """Number of updates, over all keys together."""

    scales: ClassVar[tuple[str, ...]] = ("length", "pairs", "updates")

    def __post_init__(self) -> None:
        whole_number("vocab", self.vocab, 4)
        whole_number("length", self.length)
        whole_number("pairs", self.pairs)
        whole_number("updates", self.updates, 0)
        require(self.vocab % 2 == 0, f"vocab={self.vocab}: must be even")
        keys, values, bound = self.vocab // 2 - 1, self.vocab // 2, self.pairs + self.updates
        require(self.pairs <= keys, f"pairs={self.pairs} but vocab={self.vocab} has only {keys} keys")
        require(
            bound <= values,
            f"pairs={self.pairs} and updates={self.updates} need {bound} values, but vocab={self.vocab} has only "
            f"{values}",
        )
        need = 2 * (bound + self.pairs)
        require(
            need <= self.length,
            f"pairs={self.pairs} and updates={self.updates} need a length of at least {need}, not {self.length}",
        )

    @property
    def chance(self) -> float:
        return 2 / self.vocab

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        pairs, values, bound = self.pairs, self.vocab // 2, self.pairs + self.updates
        key = distinct(rng, sequences, pairs, values - 1) + 1
        value = distinct(rng, sequences, bound, values) + values
        which = np.empty((sequences, bound), dtype=np.int64)
        which[:, :pairs] = np.arange(pairs)
        which[:, pairs:] = rng.integers(pairs, size=(sequences, self.updates))
        rng.permuted(which, axis=1, out=which)

        # The pairs sorted by key, then by time: the last pair of each key holds its latest value.
        row = np.arange(sequences)[:, None]
        bindings = np.bincount((which + pairs * row).ravel(), minlength=sequences * pairs).reshape(sequences, pairs)
        in_time = np.sort(which * bound + np.arange(bound), axis=1) % bound
        end = bindings.cumsum(axis=1) - 1
        latest = np.take_along_axis(in_time, end, axis=1)
        before = np.take_along_axis(in_time, end - 1, axis=1)

        tokens = np.zeros((sequences, self.length), dtype=np.int32)
        tokens[:, 0 : 2 * bound : 2] = np.take_along_axis(key, which, axis=1)
        tokens[:, 1 : 2 * bound : 2] = value
        query = 2 * bound + 2 * distinct(rng, sequences, pairs, self.length // 2 - bound)
        targets, source, rebindings, stale = (unscored(sequences, self.length) for _ in range(4))
        put(tokens, query, key)
        put(targets, query, np.take_along_axis(value, latest, axis=1))
        put(source, query, 2 * latest + 1)
        put(rebindings, query, bindings - 1)
        put(stale, query, np.where(bindings > 1, 2 * before + 1, IGNORE))
        return Batch(tokens, targets, {"source": source, "rebindings": rebindings, "stale": stale})

    def solve(self, tokens: Int[np.ndarray, "b t"]) -> Int[np.ndarray, "b t"]:
        targets = unscored(*tokens.shape)
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            table: dict[int, int] = {}
            for t, (token, following) in enumerate(zip(row, [*row[1:], 0], strict=True)):
                if 0 < token < self.vocab // 2:
                    if following >= self.vocab // 2:
                        table[token] = following
                    else:
                        answer[t] = table[token]
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t"]) -> Shaped[np.ndarray, "b t"]:
        value = tokens >= self.vocab // 2
        bound = np.pad(value[:, 1:], ((0, 0), (0, 1)))
        return np.where(value, "value", np.where(tokens == 0, "filler", np.where(bound, "key", "query")))
