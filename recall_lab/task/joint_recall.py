"""Joint recall: what a key means depends on the context it is asked in (arXiv 2507.00449)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from recall_lab.task.base import Batch, Task, distinct, put, require, unscored, whole


@dataclass(frozen=True, kw_only=True)
class JointRecall(Task):
    """[context key value key value …] for several contexts that bind the same keys, then each [context key].

    Token ids: 0 is filler, 1 … contexts are contexts, then keys, then as many values. Every context binds all of the
    `pairs` keys, in an order of its own; no value stands twice. Every (context, key) is asked once, in a slot of two
    places, the slots being uniform behind the bindings; the label stands at the key. Who ignores the context is
    right once in `contexts`. Factor: `source`, the place of the value.

    >>> task = JointRecall(vocab=17, length=18, contexts=2, pairs=2)
    >>> batch = task.sample(1, np.random.default_rng(0))
    >>> print(*batch.tokens[0])
    2 3 14 4 15 1 3 10 4 13 2 4 1 4 1 3 2 3
    >>> print(*np.where(batch.scored, batch.targets, 0)[0])
    0 0 0 0 0 0 0 0 0 0 0 15 0 13 0 10 0 14
    """

    vocab: int = 256
    """V: token ids; of those that are neither filler nor context half are keys, half values."""
    length: int = 128
    """n: places of a sequence."""
    contexts: int = 3
    """C: contexts, each with a table of its own."""
    pairs: int = 8
    """D: keys, the same in every context."""

    scales: ClassVar[tuple[str, ...]] = ("length", "pairs")

    def __post_init__(self) -> None:
        whole(self, vocab=4, length=1, contexts=1, pairs=1)
        bound = self.contexts * self.pairs
        require(
            bound <= self._pool,
            f"contexts={self.contexts} of pairs={self.pairs} need {bound} values, but vocab={self.vocab} has only "
            f"{self._pool}",
        )
        need = self.contexts + 4 * bound
        require(
            need <= self.length,
            f"contexts={self.contexts} of pairs={self.pairs} need a length of at least {need}, not {self.length}",
        )

    @property
    def _pool(self) -> int:
        """Keys, and as many values."""
        return (self.vocab - 1 - self.contexts) // 2

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
        behind = contexts * block
        tokens = np.zeros((sequences, self.length), dtype=np.int32)
        targets, source = unscored(sequences, self.length), unscored(sequences, self.length)
        tokens[:, 0:behind:block] = context
        tokens[:, start] = key
        tokens[:, start + 1] = value
        place = behind + 2 * distinct(rng, sequences, bound, (self.length - behind) // 2)
        put(tokens, place, context.repeat(pairs, axis=1))
        put(tokens, place + 1, key)
        put(targets, place + 1, value)
        put(source, place + 1, start + 1)
        return Batch(tokens, targets, {"source": source})

    def solve(self, tokens: Int[np.ndarray, "b t"]) -> Int[np.ndarray, "b t"]:
        targets = unscored(*tokens.shape)
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            memory: dict[tuple[int, int], int] = {}
            context = 0
            for place, (token, following) in enumerate(zip(row, [*row[1:], 0], strict=True)):
                if 0 < token <= self.contexts:
                    context = token
                elif self.contexts < token <= self.contexts + self._pool:
                    if following > self.contexts + self._pool:
                        memory[context, token] = following
                    else:
                        answer[place] = memory[context, token]
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t"]) -> np.ndarray:
        limits = [1, 1 + self.contexts, 1 + self.contexts + self._pool]
        names = np.array(["filler", "context", "key", "value"])[np.digitize(tokens, limits)]
        bound = np.pad(names[:, 1:] == "value", ((0, 0), (0, 1)))
        return np.where((names == "key") & ~bound, "query", names)
