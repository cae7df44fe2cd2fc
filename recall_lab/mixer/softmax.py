"""Softmax attention with a KV cache (Vaswani et al., arXiv 1706.03762)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from recall_lab.mixer.cache import Cache, causal, extend
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Softmax(Cache):
    """Every past token kept, and weighed anew for every query.

    o_t = Σ_{s≤t} softmax_s(q_t·k_s / √d_key) v_s;  A is that softmax;  state: all k and v so far.
    With the sink, e^b stands beside the other terms in softmax's denominator, b learned a head: a query that finds
    nothing may put its weight there, and a row of A sums to less than one.
    Source: Vaswani et al., arXiv 1706.03762; the sink: Agarwal et al., arXiv 2508.10925.
    """

    sink: bool = False
    """One more logit, learned a head, that has no value behind it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sink_bias = nn.Parameter(torch.zeros(self.heads)) if self.sink else None

    def gates(self, x: Hidden) -> Gates:
        return {} if self.sink_bias is None else {"sink": self.sink_bias[:, None].expand(x.shape[0], -1, x.shape[1])}

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        if gates:
            return super().parallel(q, k, v, gates, state)
        if state is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True), {"k": k, "v": v}
        k, v = extend(state, k, v)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen), {"k": k, "v": v}

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        if not gates:
            return super().attend(q, k, v, gates, state)
        k, v = extend(state, k, v)
        weight = torch.softmax(torch.cat([gates["sink"][..., None], causal(q, k)], dim=-1), dim=-1)[..., 1:]
        return weight.to(v.dtype) @ v, {"k": k, "v": v}
