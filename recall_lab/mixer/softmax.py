"""Softmax attention with a KV cache (Vaswani et al., arXiv 1706.03762)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from recall_lab.checks import flag
from recall_lab.mixer.cache import Cache, causal, extend
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Softmax(Cache):
    """Every query attends to all past tokens.

    o_t = Σ_{s≤t} softmax_s(q_t·k_s / √d_key) v_s;  A is that softmax;  state: all k and v so far.
    With a learned sink, e^b is added to the denominator of the softmax, b learned per head: a query that matches no
    key can put its weight on the sink, and the rows of A sum to less than one.
    Without positions the order of past tokens has no effect; rotary rotates q and k, alibi adds −m_h (t − s) to logits.
    Source: Vaswani et al., arXiv 1706.03762; the learned sink: Agarwal et al., arXiv 2508.10925.
    """

    learned_sink: bool = False
    """One more logit per head, learned, that has no key and no value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        flag("learned_sink", self.learned_sink)
        self.sink_bias = nn.Parameter(torch.zeros(self.heads)) if self.learned_sink else None

    @property
    def fixed_gates(self) -> frozenset[str]:
        return frozenset({"sink_logit"} if self.learned_sink else ())

    def gates(self, x: Hidden) -> Gates:
        """sink_logit b: b h t, with a learned sink only."""
        if self.sink_bias is None:
            return {}
        return {"sink_logit": self.sink_bias[:, None].expand(x.shape[0], -1, x.shape[1])}

    def attend_all(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        if gates:
            return super().attend_all(q, k, v, gates, state)
        first = not state["k"].shape[2]
        cached = {"k": k, "v": v} if first else extend(state, k, v)
        keys, values = cached["k"], cached["v"]
        bias = self.bias(q, cached)
        if bias is not None:
            with without_autocast(q):
                q, keys, values = full_precision(q), full_precision(keys), full_precision(values)
                return F.scaled_dot_product_attention(q, keys, values, attn_mask=bias).to(v.dtype), cached
        if first:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True), cached
        t, s = q.shape[2], keys.shape[2]
        seen = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen), cached

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        if not gates:
            return super().attend(q, k, v, gates, state)
        cached = extend(state, k, v)
        logits = causal(q, cached["k"], self.bias(q, cached))  # b h t s
        weight = torch.softmax(torch.cat([gates["sink_logit"][..., None], logits], dim=-1), dim=-1)[..., 1:]
        return weight.to(v.dtype) @ cached["v"], cached
