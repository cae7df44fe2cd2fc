"""Recall of keys that are bound again: what overwriting is for (as in DeltaNet, arXiv 2102.11174, section 4)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from recall_lab.task.base import IGNORE, Batch, Task, distinct, require, unscored, whole


@dataclass(frozen=True, kw_only=True)
class Updates(Task):
    """Key and value pairs in which keys come again with another value, then each key: what is its latest value?

    Token ids as in mqar: 0 is filler, 1 … V/2−1 are keys, V/2 … V−1 are values. The context holds, in random order,
    each of `pairs` keys once and `updates` further times a key drawn from them independently; no value stands twice,
    so that every update changes something. Each key is then asked once, at the first place of a slot of two, the
    slots being uniform behind the context. Factors: `source`, the place of the latest value; `rebindings`, how
    often the key was bound again; `stale`, the place of the value before the latest (IGNORE where there is none).

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
    """n: places of a sequence."""
    pairs: int = 8
    """Different keys, each asked once."""
    updates: int = 8
    """Rebindings, over all keys together."""

    scales: ClassVar[tuple[str, ...]] = ("length", "pairs", "updates")

    def __post_init__(self) -> None:
        whole(self, vocab=4, length=1, pairs=1, updates=0)
        require(self.vocab % 2 == 0, f"vocab={self.vocab}: an even number")
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

        # Bindings sorted by key, then by time: the last of each key's run is the latest.
        row = np.arange(sequences)[:, None]
        bindings = np.bincount((which + pairs * row).ravel(), minlength=sequences * pairs).reshape(sequences, pairs)
        in_time = np.sort(which * bound + np.arange(bound), axis=1) % bound
        end = bindings.cumsum(axis=1) - 1
        latest = np.take_along_axis(in_time, end, axis=1)
        before = np.take_along_axis(in_time, end - 1, axis=1)

        tokens = np.zeros((sequences, self.length), dtype=np.int32)
        tokens[:, 0 : 2 * bound : 2] = np.take_along_axis(key, which, axis=1)
        tokens[:, 1 : 2 * bound : 2] = value
        place = 2 * bound + 2 * distinct(rng, sequences, pairs, self.length // 2 - bound)
        targets, source, rebindings, stale = (unscored(sequences, self.length) for _ in range(4))
        tokens[row, place] = key
        targets[row, place] = np.take_along_axis(value, latest, axis=1)
        source[row, place] = 2 * latest + 1
        rebindings[row, place] = bindings - 1
        stale[row, place] = np.where(bindings > 1, 2 * before + 1, IGNORE)
        return Batch(tokens, targets, {"source": source, "rebindings": rebindings, "stale": stale})

    def solve(self, tokens: Int[np.ndarray, "b t"]) -> Int[np.ndarray, "b t"]:
        targets = unscored(*tokens.shape)
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            memory: dict[int, int] = {}
            for place, (token, following) in enumerate(zip(row, [*row[1:], 0], strict=True)):
                if 0 < token < self.vocab // 2:
                    if following >= self.vocab // 2:
                        memory[token] = following
                    else:
                        answer[place] = memory[token]
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t"]) -> np.ndarray:
        value = tokens >= self.vocab // 2
        bound = np.pad(value[:, 1:], ((0, 0), (0, 1)))
        return np.where(value, "value", np.where(tokens == 0, "filler", np.where(bound, "key", "query")))
