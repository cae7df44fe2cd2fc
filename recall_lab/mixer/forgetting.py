"""Softmax attention with a forget gate (Forgetting Transformer, Lin et al., arXiv 2503.02130)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from recall_lab.mixer.base import query_scale
from recall_lab.mixer.cache import Cache, extend
from recall_lab.mixer.numerics import finite_log_decay, full_precision, without_autocast
from recall_lab.shapes import Attention, Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Forgetting(Cache):
    """Softmax attention in which each new token lowers the weights of all earlier ones.

    o_t = Σ_{s≤t} softmax_s(q_t·k_s / √d_key + Σ_{r=s+1..t} g_r) v_s,  g_r = log σ(f_proj x_r) ≤ 0 per head;  A is that
    softmax;  state: all k and v so far, and `decay`, for each token the sum of g after it. Each sum of g is computed
    from its own terms and never as a difference of two longer sums, so its error does not grow with the length.
    A g below −10⁴ (−inf included) is treated as −10⁴. With positions=alibi the slope −m_h is added to every g.
    Source: Lin et al., arXiv 2503.02130.
    """

    block: ClassVar[int] = 128
    neutral_gates: ClassVar[Mapping[str, float]] = {"log_forget": 0.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.f_proj = nn.Linear(self.d_model, self.heads)

    def gates(self, x: Hidden) -> Gates:
        """log_forget g: b h t."""
        return {"log_forget": F.logsigmoid(full_precision(self.f_proj(x))).transpose(1, 2)}

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        cached = extend(state, k, v)
        g = finite_log_decay(full_precision(gates["log_forget"]))[..., None]  # b h t 1
        ones = g.new_ones(g.shape[2], g.shape[2])
        with without_autocast(q):
            total = ones.tril() @ g  # b h t 1: from the first new position to t
            between = ones.tril() @ (g * ones.tril(-1))  # b h t t: after s, up to t
            rest = (ones.triu(1) @ g)[..., 0]  # b h t: after each new position
            before = state["decay"]  # b h s
            between = between + torch.full_like(ones, -torch.inf).triu(1)
            bias = torch.cat([before[:, :, None] + total, between], dim=-1).detach()  # b h t s+t
            distance = self.bias(q, cached)
            bias = bias if distance is None else bias + distance
            o = biased(q, cached, bias, torch.cat([before, -total[..., 0]], dim=-1))
        return o.to(v.dtype), cached | {"decay": torch.cat([before + total[:, :, -1], rest], dim=-1)}

    def empty_state(self, q: Query, v: Value) -> State:
        return super().empty_state(q, v) | {"decay": full_precision(q)[:, :, :0, 0]}


def biased(q: Query, cached: State, bias: Attention, key: Float[Tensor, "b h s"]) -> Value:
    """o_t = Σ_s softmax_s(q_t·k_s / √d_key + bias_ts) v_s. The bias is a constant; its gradient goes to `key` instead.

    key  a term that differs from the bias only by a constant per row t: −Σ_{r≤s} g_r up to a constant

    Adding a constant to a row does not change its softmax, so Σ_{r=s+1..t} g_r and key_s have the same gradient. key_s
    enters through one more channel of q and k, 1 and key_s − stop_gradient(key_s), which adds zero to the logits.
    Torch's fused attention can then take the bias as a constant, and stores no attention weights for the backward pass.
    """
    q, k, v = (full_precision(x) for x in (q, cached["k"], cached["v"]))
    scale = query_scale(q.shape[-1])
    q = torch.cat([q, torch.ones_like(q[..., :1])], dim=-1)
    k = torch.cat([k, ((key - key.detach()) / scale)[..., None]], dim=-1)
    # The fused form needs values as wide as keys.
    return F.scaled_dot_product_attention(q, k, F.pad(v, (0, 1)), attn_mask=bias, scale=scale)[..., :-1]
