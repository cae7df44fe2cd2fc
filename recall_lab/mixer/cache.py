"""The engine for softmax attention over a cache. A policy decides which positions C_t are attended to:

    o_t = Σ_{s∈C_t} softmax_s(q_t·k_s / √d_key) v_s,      C_t ⊆ {0 … t}, never empty.

A static policy (window, sink_window, heavy_hitter, merging) fixes C_t without q_t: a token that has left C_t never
comes back, so the state is bounded. A dynamic policy (top_k, paged) chooses C_t by q_t and has to keep every token.
Masked logits are −∞, so their weights are exactly zero.

`attend` computes any number of positions from the state before them. For one position it is the recurrence; `parallel`
calls it on one block of positions after another. With a static policy, time and storage are therefore linear in t, and
no t × t matrix is formed.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recall_lab.checks import whole_number
from recall_lab.mixer.base import Mixer, query_scale
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.shapes import Attention, Gates, Query, State, Value

CachedKey = Float[Tensor, "b h s k"]
"""The keys of the state, then those of the new positions."""
CachedValue = Float[Tensor, "b h s v"]
"""The values of the state, then those of the new positions."""
Cached = Float[Tensor, "b h s d"]
"""CachedKey or CachedValue."""
Kept = Float[Tensor, "b h kept d"]
"""The part of a Cached that the next state keeps."""


def extend(state: State, k: Query, v: Value) -> tuple[CachedKey, CachedValue]:
    """The keys and values of the state, followed by the new ones."""
    return torch.cat([state["k"], k], dim=2), torch.cat([state["v"], v], dim=2)


def score(q: Query, k: CachedKey) -> Attention:
    """q_t·k_s / √d_key in float32 or better, so that half precision does not affect which tokens are chosen."""
    with without_autocast(q):
        return (full_precision(q) * query_scale(q.shape[-1])) @ full_precision(k).mT


def causal(q: Query, k: CachedKey) -> Attention:
    """q_t·k_s / √d_key, −∞ where s comes after t; the queries are at the last positions of k."""
    logits = score(q, k)
    t, s = logits.shape[-2:]
    return logits + logits.new_full((t, s), -torch.inf).triu(s - t + 1)


def only(logits: Attention, chosen: Bool[Tensor, "b h t s"]) -> Attention:
    """The logits where `chosen` is True, −∞ elsewhere.

    Equals logits.masked_fill(~chosen, −∞), in less than half the time: 1 − 1/chosen is 0 for True and −∞ for False.
    """
    return logits + (1 - chosen.to(logits).reciprocal())


def read(logits: Attention, v: CachedValue) -> Value:
    """Σ_s softmax_s(logits) v_s, the softmax in the precision of the logits."""
    return torch.softmax(logits, dim=-1).to(v.dtype) @ v


def largest(x: Tensor, count: int) -> Bool[Tensor, "..."]:
    """True at the `count` largest entries along the last axis; among equal ones the earliest are taken."""
    if count >= x.shape[-1]:
        return torch.ones_like(x, dtype=torch.bool)
    least = x.topk(count, sorted=False).values.amin(-1, keepdim=True)
    above, equal = x > least, x == least
    vacant = count - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= vacant))


@dataclass(eq=False, repr=False, kw_only=True)
class Cache(Mixer):
    """Softmax attention over all past tokens.

    A policy overrides `logits` (the positions attended to) and `keep` (the tokens kept in the state), or `attend` where
    its state holds more than k and v.
    """

    block: ClassVar[int] = 64
    """Positions that `parallel` computes at a time."""

    def logits(self, q: Query, k: CachedKey) -> Attention:
        """q·k / √d_key, −∞ where a position is not attended to; k ends with the keys of q's own positions."""
        return causal(q, k)

    def keep(self, x: Cached) -> Kept:
        """The part of the keys or values that the state holds after the last position."""
        return x

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        """The outputs of any number of positions and the state after them, from the state before them."""
        keys, values = extend(state, k, v)
        return read(self.logits(q, keys), values), {"k": self.keep(keys), "v": self.keep(values)}

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        state = self.empty_state(q, v) if state is None else state
        if not q.shape[2]:
            return v, state
        # Splitting, unlike slicing in the loop, has a backward pass that is linear in t.
        parts = [x.split(self.block, dim=2) for x in (q, k, v, *gates.values())]
        outputs = []
        for q_block, k_block, v_block, *gate_blocks in zip(*parts, strict=True):
            gate = dict(zip(gates, gate_blocks, strict=True))
            o, state = self.attend(q_block, k_block, v_block, gate, state)
            outputs.append(o)
        return torch.cat(outputs, dim=2), state

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        return self.attend(q, k, v, gates, state)

    def empty_state(self, q: Query, v: Value) -> State:
        return {"k": q[:, :, :0], "v": v[:, :, :0]}


@dataclass(eq=False, repr=False, kw_only=True)
class Budget(Cache):
    """A cache of which each query attends to at most `budget` tokens or slots.

    With a budget of at least the sequence length it equals softmax. It has the same parameters as softmax, so a trained
    softmax model can be evaluated with any policy and budget. Raises ValueError for a budget below `least_budget`.
    """

    budget: int = 64
    """Largest number of tokens (merging: slots) that a query attends to, its own included."""

    least_budget: ClassVar[int] = 1
    """The smallest budget at which the policy is defined."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("budget", self.budget, self.least_budget)
