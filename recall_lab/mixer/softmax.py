"""Softmax attention with a KV cache (Vaswani et al., arXiv 1706.03762)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from recall_lab.mixer.cache import Cache, extend
from recall_lab.shapes import Gates, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Softmax(Cache):
    """Every past token kept, and weighed anew for every query.

    o_t = Σ_{s≤t} softmax_s(q_t·k_s / √d_key) v_s;  A is that softmax;  state: all k and v so far.
    Source: Vaswani et al., arXiv 1706.03762.
    """

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, memory: State | None = None) -> tuple[Value, State]:
        if memory is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True), {"k": k, "v": v}
        k, v = extend(memory, k, v)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen), {"k": k, "v": v}
