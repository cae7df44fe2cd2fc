"""What a mixer is: the part of a block that carries information from one token to another.

The base holds what all mechanisms share (projections, short convolution, norms, output gate); a mechanism adds
its mathematics as `parallel` and `recurrence`, which depend on nothing but their arguments and the mechanism's
own options. Everything else follows from those two.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from recall_lab.mixer.short_conv import ShortConv
from recall_lab.shapes import Attention, Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Mixer(nn.Module, ABC):
    """y = o_proj(gate(norm(mechanism(q, k, v, gates)))), with q, k, v projected from x and convolved.

    A mechanism is a subclass, itself a dataclass declared like this one, that adds its options as fields and its
    own weights in `__post_init__` (after calling the base's).
    """

    d_model: int
    heads: int = 1
    d_key: int | None = None
    """Width of a key, of each head; d_model / heads where none is given."""
    d_value: int | None = None
    """Width of a value, of each head; d_model / heads where none is given."""
    short_conv: int = 4
    """Width of the causal depthwise convolution over q, k and v; 0 for none."""
    conv_activation: bool = False
    """SiLU behind the short convolution (or, where that is 0, on the projections)."""
    qk_norm: bool = False
    """k scaled to unit length (l2), and q to a learned length a head (Henry et al., arXiv 2010.04245).

    That length starts at d_key, where q·k / √d_key spreads as widely as it does for q and k of unit variance; at 1
    the scores of a softmax would be nearly equal and the read-out of a memory nearly nothing."""
    output_norm: bool = False
    """RMS norm of each head's output."""
    output_gate: bool = False
    """o ⊙ SiLU(g_proj x)."""

    linear_in_v: ClassVar[bool] = True
    """Whether o = A v for weights A that do not depend on v."""
    neutral_gates: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """Gate name → the value at which the mechanism writes every pair completely and forgets nothing.

    A mechanism that has no such value declares the nearest one it has."""
    gate_options: ClassVar[tuple[str, ...]] = ()
    """Names of options that act on how gates are computed from x and on nothing else.

    They have no effect where gates are given as numbers."""

    def __post_init__(self) -> None:
        super().__init__()
        least = {"d_model": 1, "heads": 1, "d_key": 1, "d_value": 1, "short_conv": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is None and name in ("d_key", "d_value"):
                if self.d_model % self.heads:
                    raise ValueError(
                        f"d_model={self.d_model} is not divisible by heads={self.heads}; give {name} yourself, "
                        "or choose heads that divide d_model"
                    )
                setattr(self, name, self.d_model // self.heads)
            elif not isinstance(value, int) or value < smallest:
                raise ValueError(f"{name}={value!r}: a whole number of at least {smallest}")
        keys, values = self.heads * self.d_key, self.heads * self.d_value
        self.q_proj = nn.Linear(self.d_model, keys, bias=False)
        self.k_proj = nn.Linear(self.d_model, keys, bias=False)
        self.v_proj = nn.Linear(self.d_model, values, bias=False)
        self.o_proj = nn.Linear(values, self.d_model, bias=False)
        self.conv = ShortConv(2 * keys + values, self.short_conv) if self.short_conv else None
        self.q_length = nn.Parameter(torch.full((self.heads,), float(self.d_key))) if self.qk_norm else None
        self.norm = nn.RMSNorm(self.d_value, eps=1e-5) if self.output_norm else None
        self.g_proj = nn.Linear(self.d_model, values, bias=False) if self.output_gate else None

    @property
    def fixed_gates(self) -> frozenset[str]:
        """Names of the gates that this mixer's options set to a constant, whatever x is (decay=0.9)."""
        return frozenset()

    # The mechanism: pure functions of (q, k, v, gates), all b h t d.

    def gates(self, x: Hidden) -> Gates:
        """What the mechanism draws from x besides q, k and v: name → b h t (…)."""
        return {}

    @abstractmethod
    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        """All positions at once: the outputs (b h t v) and the state after the last position.

        `state` is the one an earlier segment ended with (None: the empty state). Any width of v is accepted.
        """

    @abstractmethod
    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        """One position (t = 1), from the state before it: the definition that `parallel` must equal."""

    @abstractmethod
    def empty_state(self, q: Query, v: Value) -> State:
        """The state before the first position, for tensors of the batch, widths, type and device of q and v."""

    # What follows from it.

    def run_recurrence(
        self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None
    ) -> tuple[Value, State]:
        """The outputs and the final state of `parallel`, computed by one `recurrence` per position: slow, for tests."""
        state = self.empty_state(q, v) if state is None else state
        outputs = []
        for t in range(q.shape[2]):
            here = slice(t, t + 1)
            gate = {name: value[:, :, here] for name, value in gates.items()}
            o, state = self.recurrence(q[:, :, here], k[:, :, here], v[:, :, here], gate, state)
            outputs.append(o)
        return torch.cat(outputs, dim=2), state

    def effective_attention(self, q: Query, k: Query, gates: Gates) -> Attention:
        """A (b h t s) with o = A v: the mechanism run on the identity in place of v.

        Raises TypeError for a mechanism that is not linear in v.
        """
        if not self.linear_in_v:
            raise TypeError(
                f"{type(self).__name__} is not linear in v: it has no effective attention, only an influence"
            )
        b, h, t, _ = q.shape
        identity = torch.eye(t, dtype=q.dtype, device=q.device).expand(b, h, t, t)
        return self.parallel(q, k, identity, gates)[0]

    def project(self, x: Hidden, state: State | None = None) -> tuple[Query, Query, Value, Gates, State]:
        """q, k, v and gates of x, and the short convolution's part of the new state."""
        qkv = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        carried: State = {}
        if self.conv is not None:
            mixed, carried["conv"] = self.conv(torch.cat(qkv, dim=-1), None if state is None else state["conv"])
            qkv = mixed.split([part.shape[-1] for part in qkv], dim=-1)
        if self.conv_activation:
            qkv = [F.silu(part) for part in qkv]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        if self.qk_norm:
            q, k = self.q_length[:, None, None] * F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return q, k, v, self.gates(x), carried

    def read_out(self, o: Value, x: Hidden) -> Hidden:
        """From the mechanism's outputs back to the width of the model: norm, gate, o_proj."""
        if self.norm is not None:
            o = self.norm(o)
        o = o.transpose(1, 2).flatten(2)
        if self.g_proj is not None:
            o = o * F.silu(self.g_proj(x))
        return self.o_proj(o)

    def forward(self, x: Hidden, state: State | None = None) -> tuple[Hidden, State]:
        """The whole segment x at once, continuing from `state`; also the state it leaves."""
        q, k, v, gates, carried = self.project(x, state)
        before = None if state is None else {name: part for name, part in state.items() if name != "conv"}
        o, after = self.parallel(q, k, v, gates, before)
        return self.read_out(o, x), after | carried

    def step(self, x: Hidden, state: State) -> tuple[Hidden, State]:
        """One token (t = 1), from the state the token before left: what decoding runs."""
        q, k, v, gates, carried = self.project(x, state)
        before = {name: part for name, part in state.items() if name != "conv"}
        o, after = self.recurrence(q, k, v, gates, before)
        return self.read_out(o, x), after | carried

    def initial_state(self, batch: int = 1) -> State:
        """The state before the first token, on the weights' device and in their type."""
        x = self.q_proj.weight.new_zeros(batch, 1, self.d_model)
        q = x.new_zeros(batch, self.heads, 1, self.d_key)
        state = self.empty_state(q, x.new_zeros(batch, self.heads, 1, self.d_value))
        return state if self.conv is None else state | {"conv": self.conv.empty_cache(x)}

    @torch.no_grad()
    def state_size(self, length: int) -> tuple[int, int]:
        """(elements, bytes) carried from place `length` to the next, for one sequence.

        Counted on the state that `step` hands on, short-convolution cache included; nothing is derived.
        """
        x = self.q_proj.weight.new_zeros(1, length, self.d_model)
        state = self.initial_state()
        if length > 1:
            _, state = self.forward(x[:, 1:], state)
        _, state = self.step(x[:, :1], state)
        return sum(p.numel() for p in state.values()), sum(p.numel() * p.element_size() for p in state.values())


@dataclass(frozen=True)
class Trace:
    """What one mixer saw and gave on one batch. A trained model makes one a layer, the oracle one from random
    vectors; a probe does not know the difference."""

    mixer: Mixer
    q: Query
    k: Query
    v: Value
    gates: Gates
    o: Value
    """The mechanism's own outputs, before norm, gate and o_proj: A v where it is linear in v."""
    source: Int[Tensor, "b t"]
    """For each query the place that holds its answer; IGNORE where nothing is asked."""
    layer: int = 0
    candidates: Float[Tensor, "n v"] | None = None
    """The values that an answer is told apart from; the sequence's own where None."""
