"""Joint recall: the value of a key depends on the context in which it is queried (arXiv 2507.00449)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int, Shaped

from recall_lab.checks import require, whole_number
from recall_lab.task.base import Batch, Task, distinct, put, unscored


@dataclass(frozen=True, kw_only=True)
class JointRecall(Task):
    """[context key value key value …] for several contexts that bind the same keys, then each [context key].

    Token ids: 0 is filler, 1 … contexts are contexts, then keys, then as many values. Every context binds all of the
    `pairs` keys, in its own order; no value occurs twice. Every (context, key) is queried once, in a slot of two
    positions drawn uniformly from those after the bindings; the key's position is scored. A model that ignores the
    context is right in one of `contexts` cases. Factor: `source`, the position of the value.

    >>> task = JointRecall(vocab=17, length=18, contexts=2, pairs=2)
    >>> batch = task.sample(1, np.random.default_rng(0))
    >>> print(*batch.tokens[0])
    2 3 14 4 15 1 3 10 4 13 2 4 1 4 1 3 2 3
    >>> print(*np.where(batch.scored, batch.targets, 0)[0])
    0 0 0 0 0 0 0 0 0 0 0 15 0 13 0 10 0 14
    """

    vocab: int = 256
    """V: token ids; half of the ids that are neither filler nor contexts are keys, half values."""
    length: int = 128
    """n: positions of a sequence."""
    contexts: int = 3
    """C: contexts, each with its own values for the keys."""
    pairs: int = 8
    """D: keys, the same in every context."""

    scales: ClassVar[tuple[str, ...]] = ("length", "pairs")

    def __post_init__(self) -> None:
        whole_number("vocab", self.vocab, 4)
        whole_number("length", self.length)
        whole_number("contexts", self.contexts)
        whole_number("pairs", self.pairs)
        bound = self.contexts * self.pairs
        require(
            bound <= self._pool,
            f"contexts={self.contexts} and pairs={self.pairs} need {bound} values, but vocab={self.vocab} has only "
            f"{self._pool}",
        )
        need = self.contexts + 4 * bound
        require(
            need <= self.length,
            f"contexts={self.contexts} and pairs={self.pairs} need a length of at least {need}, not {self.length}",
        )

    @property
    def _pool(self) -> int:
        """Number of key ids, and of value ids."""
        return max(0, (self.vocab - 1 - self.contexts) // 2)

    @property
    def chance(self) -> float:
        return 1 / self._pool

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        contexts, pairs = self.contexts, self.pairs
        bound, block = contexts * pairs, 1 + 2 * pairs
        context = distinct(rng, sequences, contexts, contexts) + 1
        order = distinct(rng, sequences * contexts, pairs, pairs).reshape(sequences, bound)
        key = distinct(rng, sequences, pairs, self._pool) + 1 + contexts
        key = np.take_along_axis(key, order, axis=1)
        value = distinct(rng, sequences, bound, self._pool) + 1 + contexts + self._pool

        start = block * np.repeat(np.arange(contexts), pairs) + 1 + 2 * np.tile(np.arange(pairs), contexts)
        end = contexts * block  # of the bindings
        tokens = np.zeros((sequences, self.length), dtype=np.int32)
        targets, source = unscored(sequences, self.length), unscored(sequences, self.length)
        tokens[:, 0:end:block] = context
        tokens[:, start] = key
        tokens[:, start + 1] = value
        slot = end + 2 * distinct(rng, sequences, bound, (self.length - end) // 2)
        put(tokens, slot, context.repeat(pairs, axis=1))
        put(tokens, slot + 1, key)
        put(targets, slot + 1, value)
        put(source, slot + 1, start + 1)
        return Batch(tokens, targets, {"source": source})

    def solve(self, tokens: Int[np.ndarray, "b t"]) -> Int[np.ndarray, "b t"]:
        targets = unscored(*tokens.shape)
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            table: dict[tuple[int, int], int] = {}
            context = 0
            for t, (token, following) in enumerate(zip(row, [*row[1:], 0], strict=True)):
                if 0 < token <= self.contexts:
                    context = token
                elif self.contexts < token <= self.contexts + self._pool:
                    if following > self.contexts + self._pool:
                        table[context, token] = following
                    else:
                        answer[t] = table[context, token]
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t"]) -> Shaped[np.ndarray, "b t"]:
        limits = [1, 1 + self.contexts, 1 + self.contexts + self._pool]
        names = np.array(["filler", "context", "key", "value"])[np.digitize(tokens, limits)]
        bound = np.pad(names[:, 1:] == "value", ((0, 0), (0, 1)))
        return np.where((names == "key") & ~bound, "query", names)
