"""PaTH attention (Yang et al., arXiv 2505.16381)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from recall_lab.checks import flag
from recall_lab.mixer.base import l2_normalize, query_scale
from recall_lab.mixer.cache import Cache, extend, hide_future, read
from recall_lab.mixer.householder import carry
from recall_lab.mixer.numerics import finite_log_decay, full_precision, log_decay_sums, without_autocast
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class PathAttn(Cache):
    """Softmax attention whose positional encoding is a product of Householder-like matrices that depend on the tokens.

    o_t = Σ_{s≤t} softmax_s((k_sᵀ P_{s+1} … P_t q_t + Σ_{r=s+1..t} g_r) / √d_key) v_s,  P_r = I − β_r w_r w_rᵀ;  A is
    that softmax;  state: v of all tokens so far, their k times every later P, and with `forget` their sums of g.
    w has unit length, β = 2 sigmoid(·) starts near 1, and g = log σ(f_proj x) per head, 0 without `forget`.
    In the paper w has a short convolution of its own and, with many heads, a projection of low rank; here it is one
    projection of x.
    Source: Yang et al., arXiv 2505.16381; the forget gate: Lin et al., arXiv 2503.02130.
    """

    forget: bool = False
    """Lower the logits of earlier tokens by a learned gate."""

    neutral_gates: ClassVar[Mapping[str, float]] = {"path": 0.0, "beta": 0.0, "log_forget": 0.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        flag("forget", self.forget)
        self.w_proj = nn.Linear(self.d_model, self.heads * self.d_key, bias=False)
        self.b_proj = nn.Linear(self.d_model, self.heads)
        self.f_proj = nn.Linear(self.d_model, self.heads) if self.forget else None

    @property
    def fixed_gates(self) -> frozenset[str]:
        return frozenset(() if self.forget else {"log_forget"})

    def gates(self, x: Hidden) -> Gates:
        """path w: b h t k; beta β and, with forget, log_forget g: b h t each."""
        w = l2_normalize(self.w_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2))  # b h t k
        gates = {"path": w, "beta": 2 * torch.sigmoid(self.b_proj(x)).transpose(1, 2)}
        g = None if self.f_proj is None else F.logsigmoid(full_precision(self.f_proj(x))).transpose(1, 2)
        return gates if g is None else gates | {"log_forget": g}

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        cached = extend(state, k, v)
        with without_autocast(q):
            exact = [full_precision(x) for x in (q, k, gates["path"], gates["beta"], state["k"])]
            logits, cached["k"] = carry(*exact)
            if self.forget:
                g = finite_log_decay(full_precision(gates["log_forget"]))
                within = log_decay_sums(g)  # b h t t
                before = state["decay"][:, :, None] + within[..., :1] + g[..., :1, None]  # b h t s
                sums = torch.cat([before, within], dim=-1)
                logits, cached["decay"] = logits + sums, sums[:, :, -1]
            bias = self.bias(q, cached)
            logits = hide_future(logits * query_scale(q.shape[-1])) + (0 if bias is None else bias)
        return read(logits, cached["v"]), cached

    def empty_state(self, q: Query, v: Value) -> State:
        state = super().empty_state(q, v) | {"k": full_precision(q)[:, :, :0]}
        return state | {"decay": state["k"][..., 0]} if self.forget else state
