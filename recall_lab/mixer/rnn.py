"""Elman's network (Elman 1990)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from recall_lab.mixer.base import Mixer
from recall_lab.shapes import Gates, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class RNN(Mixer):
    """A vector state that passes through tanh at every position.

    h_t = tanh(W [q_t, k_t, v_t] + U h_{t−1} + b),  o_t = h_t, independently per head;  no A: o is not linear in v;
    state: h, d_value numbers per head.
    Source: Elman, Cognitive Science 14 (1990). U is orthogonal at the start.
    """

    compiles: ClassVar[bool] = False
    linear_in_v: ClassVar[bool] = False
    no_weight_decay: ClassVar[tuple[str, ...]] = ("bias",)

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs, width = 2 * self.d_key + self.d_value, self.d_value
        self.input_weight = nn.Parameter(torch.empty(self.heads, inputs, width).uniform_(-1, 1) * inputs**-0.5)
        self.hidden_weight = nn.Parameter(torch.empty(self.heads, width, width))
        self.bias = nn.Parameter(torch.zeros(self.heads, 1, width))
        for weight in self.hidden_weight:
            nn.init.orthogonal_(weight)

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        state = self.empty_state(q, v) if state is None else state
        if not q.shape[2]:
            return v, state
        h = state["h"]  # b h 1 v
        inputs = torch.cat([q, k, v], dim=-1) @ self.input_weight + self.bias  # b h t v
        outputs = []
        for x in inputs.split(1, dim=2):
            h = torch.tanh(x + h @ self.hidden_weight)
            outputs.append(h)
        return torch.cat(outputs, dim=2), {"h": h}

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        return self.parallel(q, k, v, gates, state)

    def empty_state(self, q: Query, v: Value) -> State:
        return {"h": v.new_zeros(*v.shape[:2], 1, self.d_value)}
