"""Softmax attention with a forget gate (Forgetting Transformer, Lin et al., arXiv 2503.02130)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from recall_lab.mixer.cache import Cache, causal, extend, read
from recall_lab.mixer.numerics import finite_log_decay, full_precision, without_autocast
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Forgetting(Cache):
    """Softmax attention in which each new token lowers the weights of all earlier ones.

    o_t = Σ_{s≤t} softmax_s(q_t·k_s / √d_key + Σ_{r=s+1..t} g_r) v_s,  g_r = log σ(f_proj x_r) ≤ 0 per head;  A is that
    softmax;  state: all k and v so far, and `decay`, for each token the sum of g after it. Each sum of g is computed
    from its own terms and never as a difference of two longer sums, so its error does not grow with the length.
    A g below −10⁴ (−inf included) is treated as −10⁴. With positions=alibi the slope −m_h is added to every g.
    Source: Lin et al., arXiv 2503.02130.
    """

    neutral_gates: ClassVar[Mapping[str, float]] = {"log_forget": 0.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.f_proj = nn.Linear(self.d_model, self.heads)

    def gates(self, x: Hidden) -> Gates:
        """log_forget g: b h t."""
        return {"log_forget": F.logsigmoid(full_precision(self.f_proj(x))).transpose(1, 2)}

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        after = extend(state, k, v)
        g = finite_log_decay(full_precision(gates["log_forget"]))[..., None]  # b h t 1
        ones = g.new_ones(g.shape[2], g.shape[2])
        with without_autocast(q):
            total = ones.tril() @ g  # b h t 1: from the first new position to t
            between = ones.tril() @ (g * ones.tril(-1))  # b h t t: after s, up to t
            rest = (ones.triu(1) @ g)[..., 0]  # b h t: after each new position
        cached = state["decay"]  # b h s
        logits = causal(q, after["k"], self.bias(q, after)) + torch.cat(
            [cached[:, :, None] + total, between], dim=-1
        )  # b h t s+t
        # Weights below e^−80 of the largest are set to zero: their products can be subnormal in float32, which is slow.
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) - 80, -torch.inf)
        decay = torch.cat([cached + total[:, :, -1], rest], dim=-1)
        return read(logits, after["v"]), after | {"decay": decay}

    def empty_state(self, q: Query, v: Value) -> State:
        return super().empty_state(q, v) | {"decay": full_precision(q)[:, :, :0, 0]}
