"""Gated slot attention (Zhang et al., arXiv 2409.07146)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recall_lab.checks import whole_number
from recall_lab.mixer import matrix_memory, value_decay
from recall_lab.mixer.base import Mixer, Width
from recall_lab.mixer.matrix_memory import Form, Update
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class GSA(Mixer):
    """Softmax attention to a fixed number of slots, each of which averages keys and values with a decay of its own.

    K_t = K_{t−1} diag(e^{g_t}) + k_t s_tᵀ,  V_t = diag(e^{g_t}) V_{t−1} + s_t v_tᵀ,  p_t = softmax(K_tᵀ q_t),
    o_t = V_tᵀ p_t;  A_ts = Σ_i p_ti s_si Π_{r=s+1..t} e^{g_ri};  state: K, d_key × slots, and V, slots × d_value.
    g = ⅛ log sigmoid(W x) per slot, e^g near .92 at the start, s = 1 − e^g, so a slot is an exponential moving average.
    SiLU follows the short convolution. The paper's norm of the output is the option output_norm.
    Source: Zhang et al., arXiv 2409.07146.
    """

    conv_activation: bool = True

    slots: Width = None  # type: ignore[assignment]  # see Width
    """Number of slots per head; None: d_key."""

    compiles: ClassVar[bool] = False
    neutral_gates: ClassVar[Mapping[str, float]] = {"log_decay": 0.0, "write": 1.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.slots = self.d_key if self.slots is None else self.slots
        whole_number("slots", self.slots)
        self.f_proj = nn.Linear(self.d_model, self.heads * self.slots, bias=False)

    def gates(self, x: Hidden) -> Gates:
        """log_decay g and write s: b h t slots each."""
        g = F.logsigmoid(self.f_proj(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2) / 8
        return {"log_decay": g, "write": -g.expm1()}

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        state = self.empty_state(q, v) if state is None else state
        return self._run(value_decay.chunked, matrix_memory.chunked, q, k, v, gates, state)

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        return self._run(value_decay.step, matrix_memory.step, q, k, v, gates, state)

    def _run(
        self, keys: Callable[..., tuple[Value, Tensor]], values: Form, q: Query, k: Query, v: Value, gates: Gates,
        state: State,
    ) -> tuple[Value, State]:  # fmt: skip
        with without_autocast(q):
            g, s = (full_precision(gates[name]) for name in ("log_decay", "write"))
            logits, K = keys(full_precision(q), full_precision(k), s, g, state["K"])  # b h t slots
            o, V = values(torch.softmax(logits, dim=-1), Update(s, full_precision(v), g), state["V"])
        return o.to(v.dtype), {"K": K, "V": V}

    def empty_state(self, q: Query, v: Value) -> State:
        zeros = full_precision(v).new_zeros
        return {"K": zeros(*q.shape[:2], q.shape[3], self.slots), "V": zeros(*q.shape[:2], self.slots, v.shape[3])}
