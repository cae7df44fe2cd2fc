"""One engine for softmax over a cache, of which a policy says what is carried on and what is looked at:

    o_t = Σ_{s∈C_t} softmax_s(q_t·k_s / √d_key) v_s,      C_t ⊆ {0 … t}, never empty.

A static policy has settled C_t before it sees q_t (window, sink_window, heavy_hitter, merging): what falls out of C_t
need not be carried, so its state is bounded. A dynamic one chooses C_t by the query (top_k, paged) and must carry
every token. What is masked has the logit −∞, so its weight is nought and not just small.

`attend` serves any number of places from what the places before them left. One place of it is the recurrence, blocks
of them are the parallel form: what a static policy carries between blocks is bounded, so it is linear in t in time
and memory, without a matrix of t × t.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recall_lab.mixer.base import Mixer
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.shapes import Attention, Gates, Query, State, Value

CachedKey = Float[Tensor, "b h s k"]
"""What is carried, and behind it the new places: s where t are the new ones alone."""
CachedValue = Float[Tensor, "b h s v"]


def extend(state: State, k: Query, v: Value) -> tuple[CachedKey, CachedValue]:
    """The keys and values carried so far, and behind them the new ones."""
    return torch.cat([state["k"], k], dim=2), torch.cat([state["v"], v], dim=2)


def score(q: Query, k: CachedKey) -> Attention:
    """q_t·k_s / √d_key, in at least float32: a choice between tokens must not hang on how half precision rounds."""
    with without_autocast(q):
        return (full_precision(q) * q.shape[-1] ** -0.5) @ full_precision(k).mT


def causal(q: Query, k: CachedKey) -> Attention:
    """q_t·k_s / √d_key, −∞ where s > t; the places of q are the last ones of k."""
    logits = score(q, k)
    t, s = logits.shape[-2:]
    return logits + logits.new_full((t, s), -torch.inf).triu(s - t + 1)


def among(logits: Attention, chosen: Bool[Tensor, "b h t s"]) -> Attention:
    """The logits of what is chosen, −∞ elsewhere: a sum, which is several times faster than filling here and there."""
    return logits + (1 - chosen.to(logits).reciprocal())


def weigh(logits: Attention, v: CachedValue) -> Value:
    """Σ_s softmax_s(logits) v_s."""
    return torch.softmax(logits, dim=-1).to(v.dtype) @ v


def largest(x: Tensor, count: int) -> Bool[Tensor, "..."]:
    """True at the `count` largest entries of the last axis; of equal ones the earliest are taken."""
    if count >= x.shape[-1]:
        return torch.ones_like(x, dtype=torch.bool)
    least = x.topk(count, sorted=False).values.amin(-1, keepdim=True)
    above, level = x > least, x == least
    vacant = count - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above | (level & (level.cumsum(-1, dtype=torch.int32) <= vacant))


@dataclass(eq=False, repr=False, kw_only=True)
class Cache(Mixer):
    """A policy states its `logits` and what to `keep`, or, where it carries more than k and v, its own `attend`."""

    block: ClassVar[int] = 64

    def logits(self, q: Query, k: CachedKey) -> Attention:
        """q·k / √d_key, −∞ at places not looked at; k: what is carried, then the keys of q's own places."""
        return causal(q, k)

    def keep(self, x: Tensor) -> Tensor:
        """What of the keys or values (b h s d) is carried on: all, unless the policy says otherwise."""
        return x

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        """The outputs of any number of places, and the state behind the last, from the state before the first."""
        k, v = extend(state, k, v)
        return weigh(self.logits(q, k), v), {"k": self.keep(k), "v": self.keep(v)}

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        state = self.empty_state(q, v) if state is None else state
        blocks = {name: part.split(self.block, dim=2) for name, part in {**gates, "q": q, "k": k, "v": v}.items()}
        outputs = []
        for block in (dict(zip(blocks, parts, strict=True)) for parts in zip(*blocks.values(), strict=True)):
            o, state = self.attend(block.pop("q"), block.pop("k"), block.pop("v"), block, state)
            outputs.append(o)
        return torch.cat(outputs, dim=2), state

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        return self.attend(q, k, v, gates, state)

    def empty_state(self, q: Query, v: Value) -> State:
        return {"k": q[:, :, :0], "v": v[:, :, :0]}


@dataclass(eq=False, repr=False, kw_only=True)
class Budget(Cache):
    """A cache of which a query looks at no more than `budget` tokens or slots.

    With a budget of at least n it is softmax. The weights are those of softmax too, so a trained softmax model can be
    given another policy and budget. Raises ValueError for a budget below the least one that makes sense.
    """

    budget: int = 64
    """Tokens (merging: slots) that a query may look at, its own included."""

    least: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.budget, int) or self.budget < self.least:
            raise ValueError(f"budget={self.budget!r}: a whole number of at least {self.least}")
