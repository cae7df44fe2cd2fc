"""Softmax attention with a KV cache (Vaswani et al., arXiv 1706.03762)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from recall_lab.checks import flag
from recall_lab.mixer.cache import Cache, causal, extend
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Softmax(Cache):
    """Every query attends to all past tokens.

    o_t = Σ_{s≤t} softmax_s(q_t·k_s / √d_key) v_s;  A is that softmax;  state: all k and v so far.
    With a learned sink, e^b is added to the denominator of the softmax, b learned per head: a query that matches no
    key can put its weight on the sink, and the rows of A sum to less than one.
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

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        if gates:
            return super().parallel(q, k, v, gates, state)
        if state is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True), {"k": k, "v": v}
        keys, values = extend(state, k, v)
        t, s = q.shape[2], keys.shape[2]
        seen = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen), {"k": keys, "v": values}

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        if not gates:
            return super().attend(q, k, v, gates, state)
        keys, values = extend(state, k, v)
        logits = torch.cat([gates["sink_logit"][..., None], causal(q, keys)], dim=-1)  # b h t 1+s
        weight = torch.softmax(logits, dim=-1)[..., 1:]  # b h t s
        return weight.to(v.dtype) @ values, {"k": keys, "v": values}
