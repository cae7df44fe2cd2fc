"""Softmax attention with a forget gate (Forgetting Transformer, Lin et al., arXiv 2503.02130)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from recall_lab.mixer.cache import Cache, causal, extend, weigh
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Forgetting(Cache):
    """Softmax that lets old tokens fade by what has been read since.

    o_t = Σ_{s≤t} softmax_s(q_t·k_s / √d_key + Σ_{r=s+1..t} g_r) v_s,  g_r = log σ(f_proj x_r) ≤ 0 a head;  A is that
    softmax;  state: all k and v so far, and for each token the sum of g since. Every sum of g runs over just the
    places it stands for, never being a difference of longer ones, so its error does not grow with what lies before.
    Source: Lin et al., arXiv 2503.02130.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.f_proj = nn.Linear(self.d_model, self.heads)

    def gates(self, x: Hidden) -> Gates:
        return {"log_forget": F.logsigmoid(full_precision(self.f_proj(x))).transpose(1, 2)}

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        k, v = extend(state, k, v)
        g = full_precision(gates["log_forget"])[..., None]  # b h t 1
        t = g.shape[2]
        ones = g.new_ones(t, t)
        with without_autocast(q):
            since_memory, between, since = ones.tril() @ g, ones.tril() @ (g * ones.tril(-1)), ones.triu(1) @ g
        faded = state["decay"][:, :, None]  # b h 1 s
        logits = causal(q, k) + torch.cat([faded + since_memory, between], dim=-1)
        # A weight below e^−80 is nought, lest numbers too small for float32 to hold well slow every product down.
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) - 80, -torch.inf)
        decay = torch.cat([state["decay"] + since_memory[:, :, -1], since[..., 0]], dim=-1)
        return weigh(logits, v), {"k": k, "v": v, "decay": decay}

    def empty_state(self, q: Query, v: Value) -> State:
        return super().empty_state(q, v) | {"decay": full_precision(q)[:, :, :0, 0]}
