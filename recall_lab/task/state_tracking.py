"""State tracking: word problems of permutation groups (Liu et al., arXiv 2210.10749; Merrill et al., 2404.08819)."""

from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np
from jaxtyping import Int, Shaped

from recall_lab.checks import choice, whole_number
from recall_lab.task.base import Batch, Task, unscored

GROUPS = {"parity": 2, "s3": 3, "s4": 4, "s5": 5}
"""Name → how many elements the group permutes; parity is the group of the permutations of two."""


@dataclass(frozen=True, kw_only=True)
class StateTracking(Task):
    """A sequence of group elements; the target at each position is the product of all elements up to it.

    Unlike in recall, the answer depends on every token so far, so there is no `source`. Token ids and classes are the
    group's elements, permutations in lexicographic order (0 the identity): s_t = g_t ∘ s_{t−1}. For parity these
    are bits and their sum modulo 2. Elements are uniform and independent, so every state is uniform too.

    >>> batch = StateTracking(group="parity", length=8).sample(1, np.random.default_rng(0))
    >>> print(*batch.tokens[0])
    1 0 0 1 0 0 0 0
    >>> print(*batch.targets[0])
    1 1 1 0 0 0 0 0
    """

    length: int = 64
    """n: positions of a sequence, all of them scored."""
    group: str = "s5"
    """parity, s3, s4 or s5. Only s5 is not solvable; its word problem is NC¹-complete, so no transformer of constant
    depth solves it at every length unless TC⁰ = NC¹."""

    def __post_init__(self) -> None:
        whole_number("length", self.length)
        choice("group", self.group, GROUPS)

    @property
    def vocab(self) -> int:
        return len(_elements(self.group))

    @property
    def chance(self) -> float:
        return 1 / self.vocab

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        # Independent uniform states give independent uniform elements, and quotients need no loop over time.
        state = rng.integers(self.vocab, size=(sequences, self.length), dtype=np.int32)
        before = np.zeros(state.shape, dtype=np.int32)
        before[:, 1:] = state[:, :-1]
        return Batch(_quotient(self.group)[state, before], state)

    def solve(self, tokens: Int[np.ndarray, "b t"]) -> Int[np.ndarray, "b t"]:
        elements = [tuple(element) for element in _elements(self.group).tolist()]
        targets = unscored(*tokens.shape)
        for row, answer in zip(tokens.tolist(), targets, strict=True):
            state = elements[0]
            for t, token in enumerate(row):
                state = tuple(elements[token][i] for i in state)
                answer[t] = elements.index(state)
        return targets

    def roles(self, tokens: Int[np.ndarray, "b t"]) -> Shaped[np.ndarray, "b t"]:
        return np.full(tokens.shape, "query")


@cache
def _elements(group: str) -> Int[np.ndarray, "elements permuted"]:
    """Every permutation of the group, in lexicographic order."""
    return np.array(list(permutations(range(GROUPS[group]))))


@cache
def _quotient(group: str) -> Int[np.ndarray, "elements elements"]:
    """[s, r] → the element g with g ∘ r = s."""
    elements = _elements(group)
    weight = elements.shape[1] ** np.arange(elements.shape[1])[::-1]
    product = elements[:, elements.argsort(axis=1)]
    return np.searchsorted(elements @ weight, product @ weight).astype(np.int32)
