"""Softmax attention with a KV cache (Vaswani et al., arXiv 1706.03762)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from recall_lab.mixer.base import Mixer
from recall_lab.shapes import Gates, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Softmax(Mixer):
    """Every past token kept, and weighed anew for every query.

    o_t = Σ_{s≤t} softmax_s(q_t·k_s / √d_key) v_s;  A is that softmax;  state: all k and v so far.
    Source: Vaswani et al., arXiv 1706.03762.
    """

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, memory: State | None = None) -> tuple[Value, State]:
        if memory is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True), {"k": k, "v": v}
        past = memory["k"].shape[2]
        k, v = torch.cat([memory["k"], k], dim=2), torch.cat([memory["v"], v], dim=2)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(past)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen), {"k": k, "v": v}

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, memory: State) -> tuple[Value, State]:
        k, v = torch.cat([memory["k"], k], dim=2), torch.cat([memory["v"], v], dim=2)
        weight = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1)
        return weight @ v, {"k": k, "v": v}

    def empty(self, q: Query, v: Value) -> State:
        return {"k": q[:, :, :0], "v": v[:, :, :0]}
