"""The engine for softmax attention over a cache. A policy decides which positions C_t are attended to:

    o_t = Σ_{s∈C_t} softmax_s(q_t·k_s / √d_key) v_s,      C_t ⊆ {0 … t}, never empty.

A static policy (window, sink_window, heavy_hitter, merging) fixes C_t without q_t: a token that has left C_t never
comes back, so the state is bounded. A dynamic policy (top_k, paged) chooses C_t by q_t (`recall_lab.mixer.selection`)
and has to keep every token it may choose from. The control random_k keeps every token, but chooses without q_t.
Masked logits are −∞, so their weights are exactly zero.

Positions are an option (`recall_lab.mixer.positions`): with rotary embeddings a key is rotated by its own position when
it enters the cache, with ALiBi −m_h (t − s) is added to its logits. A token that is kept keeps its own position,
whatever was evicted between it and the query.

`attend` computes any number of positions from the state before them. For one position it is the recurrence; `parallel`
calls it on one block of positions after another. With a static policy, time and storage are therefore linear in t, and
no t × t matrix is formed.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recall_lab.checks import choice, number, require, share, whole_number
from recall_lab.mixer.base import Mixer, query_scale
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.mixer.positions import KINDS, Bias, distance_bias, rotate, rotated_channels, slopes
from recall_lab.shapes import Attention, Gates, Query, State, Value

CachedKey = Float[Tensor, "b h s k"]
"""The keys of the state, then those of the new positions."""
CachedValue = Float[Tensor, "b h s v"]
"""The values of the state, then those of the new positions."""
Cached = Float[Tensor, "b h s d"]
"""CachedKey, CachedValue, or their ages."""
Kept = Float[Tensor, "b h kept d"]
"""The part of a Cached that the next state keeps."""


def extend(state: State, k: Query, v: Value) -> State:
    """The k and v of the state, followed by the new ones: b h s d each.

    Where the state has it, also `age` (b h s 1): how many positions before the next token each token is.
    """
    cached = {"k": torch.cat([state["k"], k], dim=2), "v": torch.cat([state["v"], v], dim=2)}
    if "age" in state:
        b, h, t, _ = k.shape
        new = torch.arange(t, 0, -1, device=k.device).to(state["age"])[:, None]  # t 1
        cached["age"] = torch.cat([state["age"] + t, new.expand(b, h, t, 1)], dim=2)
    return cached


def score(q: Query, k: CachedKey) -> Attention:
    """q_t·k_s / √d_key in float32 or better, so that half precision does not affect which tokens are chosen."""
    with without_autocast(q):
        return (full_precision(q) * query_scale(q.shape[-1])) @ full_precision(k).mT


def causal(q: Query, k: CachedKey, bias: Bias | None = None) -> Attention:
    """q_t·k_s / √d_key plus the bias, −∞ where s comes after t; the queries are at the last positions of k."""
    return hide_future(score(q, k)) if bias is None else score(q, k) + bias


def hide_future(logits: Attention) -> Attention:
    """The logits, −∞ where s comes after t; the queries are at the last positions."""
    t, s = logits.shape[-2:]
    return logits + logits.new_full((t, s), -torch.inf).triu(s - t + 1)


def only(logits: Attention, chosen: Bool[Tensor, "b h t s"]) -> Attention:
    """The logits where `chosen` is True, −∞ elsewhere.

    Equals logits.masked_fill(~chosen, −∞), in less than half the time: 1 − 1/chosen is 0 for True and −∞ for False.
    """
    return logits + (1 - chosen.to(logits).reciprocal())


def recent(logits: Attention, count: int) -> Attention:
    """The logits of each query's last `count` tokens, its own included, −∞ elsewhere; the keys end with its own."""
    t, s = logits.shape[-2:]
    return logits + logits.new_full((t, s), -torch.inf).tril(s - t - count)


def latest(x: Cached, count: int) -> Kept:
    """The last `count` − 1 tokens, or all if there are fewer: what a window of `count` holds at the next token."""
    return x[:, :, max(x.shape[2] - count + 1, 0) :]


def read(logits: Attention, v: CachedValue) -> Value:
    """Σ_s softmax_s(logits) v_s, the softmax in the precision of the logits."""
    return torch.softmax(logits, dim=-1).to(v.dtype) @ v


def softmax_or_zero(logits: Float[Tensor, "*rows s"]) -> Float[Tensor, "*rows s"]:
    """The softmax along the last axis; a row of −∞ alone has weights of zero, and a gradient of zero."""
    nothing = (logits == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(logits.masked_fill(nothing, 0), dim=-1).masked_fill(nothing, 0)


def largest(x: Tensor, count: int) -> Bool[Tensor, "..."]:
    """True at the `count` largest entries along the last axis; among equal ones the earliest are taken.

    If fewer than `count` entries are above −∞, entries equal to −∞ may be True. x must not require a gradient.
    """
    if count >= x.shape[-1]:
        return torch.ones_like(x, dtype=torch.bool)
    if x.device.type == "cpu" and x.shape[-2] > 1:
        # On a CPU numpy finds the limit in an eighth of the time of topk. Ties at the limit are rare, so they are
        # looked for first; on a GPU, such a branch would make the host wait for the device. One query has little to
        # gain, and must allow a derivative by torch.func, whose tensors have no numpy array.
        rest, top = torch.from_numpy(np.partition(x.numpy(), -count)).split([x.shape[-1] - count, count], dim=-1)
        least, following = top[..., :1], rest.amax(-1, keepdim=True)
        if not ((following == least) & (least > -torch.inf)).any():
            return x >= least
    else:
        least = x.topk(count, sorted=False).values.amin(-1, keepdim=True)
    above, equal = x > least, x == least
    vacant = count - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= vacant))


@dataclass(eq=False, repr=False, kw_only=True)
class Cache(Mixer):
    """Softmax attention over all past tokens.

    A policy overrides `logits` (the positions attended to) and `keep` (the tokens kept in the state), or `attend` where
    its state holds more than k and v. It receives q and k after rotation. With rotary positions the state also holds
    `seen`, the number of tokens so far (b h 1); with ALiBi, if `gaps` is true, the `age` of each token (see `extend`).
    Raises ValueError for a share that does not rotate an even number of channels, and for an option of rotary
    embeddings with other positions.
    """

    positions: str = "none"
    """none: the order of past tokens has no effect; rotary: q and k are rotated; alibi: distant keys are penalised."""
    rotary_share: float | int = 0.5
    """Share of each head's channels that is rotated. The others match keys by content alone, at any distance."""
    rotary_base: float | int = 10000
    """The angle per position of the channel pair i of r/2 is rotary_base^(−2i/r)."""

    position_options: ClassVar[tuple[str, ...]] = ("positions", "rotary_share", "rotary_base")
    gaps: ClassVar[bool] = False
    """Whether tokens between two kept ones may be evicted, so that distances cannot be computed from their order."""
    block: ClassVar[int] = 64
    """Positions that `parallel` computes at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("positions", self.positions, KINDS)
        share("rotary_share", self.rotary_share)
        number("rotary_base", self.rotary_base, least=1)
        if self.positions == "rotary":
            self.rotated = rotated_channels(self.rotary_share, self.d_key)
        for name in ("rotary_share", "rotary_base"):
            value = getattr(self, name)
            used = self.positions == "rotary" or value == getattr(type(self), name)
            require(used, f"{name}={value} has an effect only with positions=rotary, not {self.positions}")

    @property
    def state_limit(self) -> int | None:
        return None

    def with_positions(self, q: Query, k: Query, state: State) -> tuple[Query, Query, State]:
        """q and k rotated by their positions after those of the state, and the part of the next state that counts them.

        Without rotary they are unchanged, and that part is empty.
        """
        if self.positions != "rotary":
            return q, k, {}
        position = state["seen"][:, :1] + torch.arange(q.shape[2], device=q.device)  # b 1 t
        q, k = (rotate(x, position, self.rotated, self.rotary_base) for x in (q, k))
        return q, k, {"seen": state["seen"] + q.shape[2]}

    def slope(self, q: Query) -> Float[Tensor, "h"] | None:
        """ALiBi's m_h for the heads of q; None with other positions."""
        return slopes(q.shape[1], q) if self.positions == "alibi" else None

    def bias(self, q: Query, cached: State) -> Bias | None:
        """ALiBi's bias for q and the tokens of `extend`, −∞ where a token comes after q; None with other positions."""
        slope = self.slope(q)
        if slope is None:
            return None
        if "age" in cached:
            age = cached["age"].mT  # b h 1 s
        else:
            age = torch.arange(cached["k"].shape[2], 0, -1, device=q.device).to(slope)[None, None, None]  # 1 1 1 s
        return distance_bias(age, q.shape[2], slope)

    def logits(self, q: Query, k: CachedKey, bias: Bias | None = None) -> Attention:
        """q·k / √d_key + bias, −∞ where a position is not attended to; k ends with the keys of q's own positions."""
        return causal(q, k, bias)

    def keep(self, x: Cached) -> Kept:
        """The part of the keys, values or ages that the state holds after the last position."""
        return x

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        """The outputs of any number of positions and the state after them, from the state before them."""
        cached = extend(state, k, v)
        logits = self.logits(q, cached["k"], self.bias(q, cached))
        return read(logits, cached["v"]), {name: self.keep(x) for name, x in cached.items()}

    def attend_one(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        """`attend` for one position."""
        return self.attend(q, k, v, gates, state)

    def attend_all(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        """`attend` on one block of positions after another."""
        # Splitting, unlike slicing in the loop, has a backward pass that is linear in t.
        parts = [x.split(self.block, dim=2) for x in (q, k, v, *gates.values())]
        outputs = []
        for q_block, k_block, v_block, *gate_blocks in zip(*parts, strict=True):
            gate = dict(zip(gates, gate_blocks, strict=True))
            o, state = self.attend(q_block, k_block, v_block, gate, state)
            outputs.append(o)
        return torch.cat(outputs, dim=2), state

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        state = self.empty_state(q, v) if state is None else state
        if not q.shape[2]:
            return v, state
        q, k, seen = self.with_positions(q, k, state)
        o, after = self.attend_all(q, k, v, gates, state)
        return o, after | seen

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        q, k, seen = self.with_positions(q, k, state)
        o, after = self.attend_one(q, k, v, gates, state)
        return o, after | seen

    def empty_state(self, q: Query, v: Value) -> State:
        state = {"k": q[:, :, :0], "v": v[:, :, :0]}
        if self.positions == "rotary":
            state["seen"] = full_precision(q).new_zeros(*q.shape[:2], 1)
        if self.positions == "alibi" and self.gaps:
            state["age"] = full_precision(q)[:, :, :0, :1]
        return state


@dataclass(eq=False, repr=False, kw_only=True)
class Budget(Cache):
    """A cache of which each query attends to at most `budget` tokens or slots.

    With a budget of at least the sequence length it equals softmax. Unless it adds parameters, it has those of softmax,
    so a trained softmax model can be evaluated with any such policy and budget.
    Raises ValueError for a budget below `least_budget`.
    """

    budget: int = 64
    """Largest number of tokens (merging: slots) that a query attends to, its own included."""

    least_budget: ClassVar[int] = 1
    """The smallest budget at which the policy is defined."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("budget", self.budget, self.least_budget)


@dataclass(eq=False, repr=False, kw_only=True)
class Static(Budget):
    """A policy that keeps at most `budget` tokens or slots, chosen without the query, so that its state is bounded."""

    @property
    def state_limit(self) -> int | None:
        return self.budget
