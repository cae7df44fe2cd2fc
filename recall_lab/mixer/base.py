"""The contract of a mixer, the part of a block that carries information from one token to later ones.

`Mixer` holds what all mechanisms share: projections, short convolution, norms and output gate. A mechanism is a
subclass that adds its mathematics as `parallel` and `recurrence`, pure functions of (q, k, v, gates), the state and
the options. Everything else follows from these two.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from recall_lab.checks import flag, require, whole_number
from recall_lab.mixer.layer import AnyTrace, Layer
from recall_lab.mixer.short_conv import ShortConv
from recall_lab.shapes import Attention, Gates, Hidden, Query, State, Value

if TYPE_CHECKING:
    Width = int
else:
    Width = int | None
"""A width that may be given as None. `__post_init__` replaces None, so the attribute is always an int."""


@dataclass(eq=False, repr=False, kw_only=True)
class Mixer(Layer):
    """y = o_proj(gate(norm(mechanism(q, k, v, gates)))), q, k, v being projections of x, convolved; x and y are b t m.

    A mechanism is a subclass, itself a dataclass with the same decorator. It declares its options as fields and makes
    its own weights in `__post_init__`, after calling the base's.
    Raises ValueError for sizes or options that are impossible, naming them.
    """

    d_model: int
    heads: int = 1
    d_key: Width = None  # type: ignore[assignment]  # see Width
    """Width of a key, per head; None: d_model / heads."""
    d_value: Width = None  # type: ignore[assignment]  # see Width
    """Width of a value, per head; None: d_model / heads."""
    short_conv: int = 4
    """Width of the causal depthwise convolution over q, k and v; 0: none."""
    conv_activation: bool = False
    """Apply SiLU after the short convolution, or to the projections where there is no convolution."""
    qk_norm: bool = False
    """Scale k to unit length (l2) and q to a learned length per head (Henry et al., arXiv 2010.04245).

    The learned length starts at d_key, so that q·k / √d_key has the same variance as for q and k of unit variance.
    With length 1, the logits of a softmax would be nearly equal and the read-out of a state nearly zero."""
    output_norm: bool = False
    """Apply an RMS norm to each head's output."""
    output_gate: bool = False
    """Multiply the output by SiLU(g_proj x)."""

    linear_in_v: ClassVar[bool] = True
    """Whether o = A v for weights A that do not depend on v."""
    neutral_gates: ClassVar[Mapping[str, float]] = {}
    """Gate name → the value at which the mechanism writes every pair completely and forgets nothing.

    A mechanism that has no such value declares the nearest one it has."""
    gate_options: ClassVar[tuple[str, ...]] = ()
    """Names of options that only affect how gates are computed from x.

    They have no effect where gates are given as numbers."""
    position_options: ClassVar[tuple[str, ...]] = ()
    """Names of options that encode the positions of tokens in q and k, or in their products."""

    def __post_init__(self) -> None:
        super().__init__()
        whole_number("d_model", self.d_model)
        whole_number("heads", self.heads)
        for name in ("d_key", "d_value"):
            if getattr(self, name) is None:
                require(
                    self.d_model % self.heads == 0,
                    f"d_model={self.d_model} is not divisible by heads={self.heads}; give {name} yourself, "
                    "or choose heads that divide d_model",
                )
                setattr(self, name, self.d_model // self.heads)
            whole_number(name, getattr(self, name))
        whole_number("short_conv", self.short_conv, least=0)
        for name in ("conv_activation", "qk_norm", "output_norm", "output_gate"):
            flag(name, getattr(self, name))
        keys, values = self.heads * self.d_key, self.heads * self.d_value
        self.q_proj = nn.Linear(self.d_model, keys, bias=False)
        self.k_proj = nn.Linear(self.d_model, self.pairs * keys, bias=False)
        self.v_proj = nn.Linear(self.d_model, self.pairs * values, bias=False)
        self.o_proj = nn.Linear(values, self.d_model, bias=False)
        self.conv = ShortConv(keys + self.pairs * (keys + values), self.short_conv) if self.short_conv else None
        self.q_length = nn.Parameter(torch.full((self.heads,), float(self.d_key))) if self.qk_norm else None
        self.norm = nn.RMSNorm(self.d_value, eps=1e-5) if self.output_norm else None
        self.g_proj = nn.Linear(self.d_model, values, bias=False) if self.output_gate else None

    @property
    def pairs(self) -> int:
        """How many keys and values every token has. More than one is possible on the engine matrix_memory."""
        return 1

    @property
    def fixed_gates(self) -> frozenset[str]:
        """Names of the gates that this mixer's options set to a constant, independent of x (decay=0.9, for example)."""
        return frozenset()

    @property
    def state_limit(self) -> int | None:
        """Tokens after which the state is largest: 0 if it always has one size, None if it never stops growing."""
        return 0

    # The mechanism, which a subclass defines. q, k and v are b h t d.

    def gates(self, x: Hidden) -> Gates:
        """What the mechanism computes from x besides q, k and v: name → tensor, b h t or b h t and one more axis."""
        return {}

    @abstractmethod
    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        """The outputs at all positions (b h t v) and the state after the last.

        `state` is the state after the preceding segment (None: the empty state). Any width of v is accepted.
        """

    @abstractmethod
    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        """The output at one position (b h 1 v) and the state after it. This defines what `parallel` must equal."""

    @abstractmethod
    def empty_state(self, q: Query, v: Value) -> State:
        """The state before the first position, with the batch size, widths, dtype and device of q and v."""

    # Derived from the mechanism.

    def run_recurrence(
        self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None
    ) -> tuple[Value, State]:
        """The outputs and the final state of `parallel`, computed by one `recurrence` per position: slow, for tests."""
        state = self.empty_state(q, v) if state is None else state
        outputs = [v[:, :, :0]]
        for t in range(q.shape[2]):
            here = slice(t, t + 1)
            gate = {name: value[:, :, here] for name, value in gates.items()}
            o, state = self.recurrence(q[:, :, here], k[:, :, here], v[:, :, here], gate, state)
            outputs.append(o)
        return torch.cat(outputs, dim=2), state

    def effective_attention(self, q: Query, k: Query, gates: Gates) -> Attention:
        """A (b h t s) with o = A v: the mechanism applied to the identity in place of v.

        Raises TypeError for a mechanism that is not linear in v.
        """
        if not self.linear_in_v:
            raise TypeError(
                f"{type(self).__name__} is not linear in v and has no effective attention, only influences ‖∂o_t/∂v_s‖"
            )
        b, h, t, _ = q.shape
        identity = torch.eye(t, dtype=q.dtype, device=q.device).expand(b, h, t, t)
        return self.parallel(q, k, identity, gates)[0] if t else identity

    def project(self, x: Hidden, state: State | None = None) -> tuple[Query, Query, Value, Gates, State]:
        """q, k, v and gates from x (b h t d each), and the short convolution's part of the new state.

        Keys and values of a token besides the first are among the gates, as more_k and more_v (see `vectors`).
        """
        q, k, v, more, carried = self.vectors(x, state)
        if self.q_length is not None and more:
            more["more_k"] = l2_normalize(more["more_k"])
        return *self.normalized(q, k), v, self.gates(x) | more, carried

    def vectors(self, x: Hidden, state: State | None = None) -> tuple[Query, Query, Value, Gates, State]:
        """What `project` returns before q and k are normalized, and without the mechanism's gates.

        With several pairs per token k and v are the first; more_k and more_v (b h t n−1 d) are the others.
        """
        qkv = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        carried: State = {}
        if self.conv is not None:
            qkv, carried["conv"] = self.conv(qkv, None if state is None else state["conv"])
        if self.conv_activation:
            qkv = [F.silu(part) for part in qkv]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        if self.pairs == 1:
            return q, k, v, {}, carried
        k, v = (part.unflatten(-1, (self.pairs, -1)) for part in (k, v))  # b h t n d
        return q, k[:, :, :, 0], v[:, :, :, 0], {"more_k": k[:, :, :, 1:], "more_v": v[:, :, :, 1:]}, carried

    def normalized(self, q: Query, k: Query) -> tuple[Query, Query]:
        """q and k, each scaled to its length with qk_norm."""
        return (q, k) if self.q_length is None else (self.q_length[:, None, None] * l2_normalize(q), l2_normalize(k))

    def read_out(self, o: Value, x: Hidden) -> Hidden:
        """The mixer's output y from the mechanism's outputs o: norm, gate, o_proj."""
        if self.norm is not None:
            o = self.norm(o)
        o = o.transpose(1, 2).flatten(2)
        if self.g_proj is not None:
            o = o * F.silu(self.g_proj(x))
        return self.o_proj(o)

    def forward(self, x: Hidden, state: State | None = None) -> tuple[Hidden, State]:
        if x.shape[1] == 0:
            return x, self.initial_state(len(x)) if state is None else state
        q, k, v, gates, carried = self.project(x, state)
        o, after = self.parallel(q, k, v, gates, None if state is None else without_conv(state))
        return self.read_out(o, x), after | carried

    def step(self, x: Hidden, state: State) -> tuple[Hidden, State]:
        q, k, v, gates, carried = self.project(x, state)
        o, after = self.recurrence(q, k, v, gates, without_conv(state))
        return self.read_out(o, x), after | carried

    def initial_state(self, batch: int = 1) -> State:
        x = self.q_proj.weight.new_zeros(batch, 1, self.d_model)
        q = x.new_zeros(batch, self.heads, 1, self.d_key)
        state = self.empty_state(q, x.new_zeros(batch, self.heads, 1, self.d_value))
        return state if self.conv is None else state | {"conv": self.conv.empty_cache(x)}

    def state_size(self, length: int) -> tuple[int, int]:
        size = super().state_size(length)
        assert size is not None
        return size

    def trace(self, x: Hidden, source: Int[Tensor, "b t"], layer: int) -> tuple["Trace", Hidden]:
        q, k, v, gates, _ = self.project(x)  # b h t k, b h t k, b h t v
        o, _ = self.parallel(q, k, v, gates)  # b h t v
        return Trace(self, q, k, v, gates, o, source, layer), self.read_out(o, x)


def without_conv(state: State) -> State:
    """The mechanism's part of a state, without that of the short convolution."""
    return {name: part for name, part in state.items() if name != "conv"}


def query_scale(d_key: int) -> float:
    """1 / √d_key, the factor of a query before it reads a state or is compared with keys.

    rwkv7, mamba2, log_linear and mesa omit it, as their papers do.
    """
    return d_key**-0.5


SHORT = 1e-3
"""Length of a vector below which `l2_normalize` limits the gradient."""


def l2_normalize(x: Tensor) -> Tensor:
    """x / ‖x‖₂ along the last axis, and 0 for a vector of zeros.

    The gradient is proportional to 1 / ‖x‖. Below ‖x‖ = SHORT it is limited to its size at SHORT. For a vector of
    zeros, whose direction is undefined, it is 0. Otherwise one short vector would dominate the gradient of a batch.
    """
    share = (x.detach().norm(dim=-1, keepdim=True) / SHORT).clamp(max=1)
    x = x.detach() + share * (x - x.detach())  # x itself, with its gradient times share
    return F.normalize(x, dim=-1, eps=max(1e-12, torch.finfo(x.dtype).tiny))


@dataclass(frozen=True)
class Trace(AnyTrace):
    """What one mixer computed on one batch.

    A trained model makes one for each layer, the oracle makes one from random vectors; a probe treats both alike.
    """

    mixer: Mixer
    q: Query
    k: Query
    v: Value
    gates: Gates
    o: Value
    """The mechanism's outputs, before norm, gate and o_proj: A v where it is linear in v."""
    source: Int[Tensor, "b t"]
    """For each query the position of its answer; task.base.IGNORE at positions without a scored query."""
    layer: int = 0
    candidates: Float[Tensor, "n v"] | None = None
    """The values that an answer is compared with; None: the values of its own sequence."""
    roles: Shaped[np.ndarray, "b t"] | None = None
    """The role of each position as a word, as `Task.roles` gives it; None: not known."""
