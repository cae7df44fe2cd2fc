"""The LSTM (Hochreiter and Schmidhuber 1997)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from recall_lab.mixer.base import Mixer
from recall_lab.shapes import Gates, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class LSTM(Mixer):
    """A vector state with gates for what is written, kept and read out.

    [i, f, z, r] = W [q_t, k_t, v_t] + U h_{t−1} + b,  c_t = σ(f) c_{t−1} + σ(i) tanh(z),  o_t = h_t = σ(r) tanh(c_t),
    with σ = sigmoid, independently per head;  no A: h is not linear in v;  state: h and c, d_value numbers each per
    head. Source: Hochreiter and Schmidhuber, Neural Computation 9 (1997), with the forget gate of Gers et al. (2000),
    whose bias starts at 1.
    """

    compiles: ClassVar[bool] = False
    linear_in_v: ClassVar[bool] = False
    no_weight_decay: ClassVar[tuple[str, ...]] = ("bias",)

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs, width = 2 * self.d_key + self.d_value, self.d_value
        self.input_weight = nn.Parameter(torch.empty(self.heads, inputs, 4 * width).uniform_(-1, 1) * inputs**-0.5)
        self.hidden_weight = nn.Parameter(torch.empty(self.heads, width, 4 * width).uniform_(-1, 1) * width**-0.5)
        bias = torch.zeros(self.heads, 1, 4 * width)
        bias[..., width : 2 * width] = 1
        self.bias = nn.Parameter(bias)

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        state = self.empty_state(q, v) if state is None else state
        if not q.shape[2]:
            return v, state
        h, c = state["h"], state["c"]  # b h 1 v
        inputs = torch.cat([q, k, v], dim=-1) @ self.input_weight + self.bias  # b h t 4v
        outputs = []
        for x in inputs.split(1, dim=2):
            write, keep, new, show = (x + h @ self.hidden_weight).chunk(4, dim=-1)
            c = torch.sigmoid(keep) * c + torch.sigmoid(write) * torch.tanh(new)
            h = torch.sigmoid(show) * torch.tanh(c)
            outputs.append(h)
        return torch.cat(outputs, dim=2), {"h": h, "c": c}

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        return self.parallel(q, k, v, gates, state)

    def empty_state(self, q: Query, v: Value) -> State:
        return {name: v.new_zeros(*v.shape[:2], 1, self.d_value) for name in ("h", "c")}
