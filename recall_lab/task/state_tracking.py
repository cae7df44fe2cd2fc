"""State tracking: word problems of permutation groups (Liu et al., arXiv 2210.10749; Merrill et al., 2404.08819)."""

from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np
from jaxtyping import Int

from recall_lab.task.base import Batch, Task, require, unscored, whole

GROUPS = {"parity": 2, "s3": 3, "s4": 4, "s5": 5}
"""Name → how many things the group permutes; the parity of ones is the group of two."""


@dataclass(frozen=True, kw_only=True)
class StateTracking(Task):
    """A word of group elements; at every place the product of all elements so far. Not recall, but its contrast.

    Token ids are the group's elements, permutations in lexicographic order (0 the identity), and so are the classes:
    s_t = g_t ∘ s_{t−1}. For parity these are bits and their sum modulo 2. Elements are uniform and independent, so
    every state is uniform too. The answer stands at no single place, hence no `source`.

    >>> batch = StateTracking(group="parity", length=8).sample(1, np.random.default_rng(0))
    >>> print(*batch.tokens[0])
    1 0 0 1 0 0 0 0
    >>> print(*batch.targets[0])
    1 1 1 0 0 0 0 0
    """

    length: int = 64
    """n: places of a sequence, all of them scored."""
    group: str = "s5"
    """parity, s3, s4 or s5: only s5 is not solvable, which is what puts it beyond constant depth (unless TC⁰ = NC¹)."""

    def __post_init__(self) -> None:
        whole(self, length=1)
        require(self.group in GROUPS, f"group={self.group!r}: one of {', '.join(GROUPS)}")

    @property
    def vocab(self) -> int:
        return len(_elements(self.group))

    @property
    def chance(self) -> float:
        return 1 / self.vocab

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        # Uniform states give uniform elements, and a quotient needs no loop over time where a product does.
        state = rng.integers(self.vocab, size=(sequences, self.length), dtype=np.int32)
        before = np.zeros(state.shape, dtype=np.int32)
        before[:, 1:] = state[:, :-1]
        return Batch(_quotient(self.group)[state, before], state)

    def solve(self, tokens: Int[np.ndarray, "b t"]) -> Int[np.ndarray, "b t"]:
        elements = [tuple(element) for element in _elements(self.group).tolist()]
        targets = unscored(*tokens.shape)
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            state = elements[0]
            for place, token in enumerate(row):
                state = tuple(elements[token][i] for i in state)
                answer[place] = elements.index(state)
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t"]) -> np.ndarray:
        return np.full(tokens.shape, "query")


@cache
def _elements(group: str) -> np.ndarray:
    """Every permutation of the group, in lexicographic order."""
    return np.array(list(permutations(range(GROUPS[group]))))


@cache
def _quotient(group: str) -> np.ndarray:
    """[s, r] → the element g with g ∘ r = s."""
    elements = _elements(group)
    weight = elements.shape[1] ** np.arange(elements.shape[1])[::-1]
    product = elements[:, elements.argsort(axis=1)]
    return np.searchsorted(elements @ weight, product @ weight).astype(np.int32)
