"""DeltaFormer (Zhong et al., arXiv 2505.19488)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from recall_lab.checks import choice
from recall_lab.mixer.cache import Cache, causal, read, softmax_or_zero
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class DeltaFormer(Cache):
    """Softmax attention to corrected values: a token subtracts from its value what attention to earlier ones returns.

    u_t = v_t − β_t Σ_{s<t} softmax_{s<t}(x_t·k_s / √d_key) u_s,  o_t = Σ_{s≤t} softmax_{s≤t}(q_t·k_s / √d_key) u_s;
    x is q or, with lookup=key, k.  A = P (I + diag(β) L)⁻¹ with the weights P of the second softmax and L of the
    first;  state: k and u of all tokens so far. u_0 = v_0. β = sigmoid(·) starts near ½; β = 0 is softmax.
    The u of a block of positions are the solution of one triangular system. flash-linear-attention's function compares
    q with k; its layer passes k in place of q, as lookup=key does, and its β has no sigmoid.
    Source: Zhong et al., arXiv 2505.19488.
    """

    lookup: str = "query"
    """query or key: the vector x with which a token attends to earlier ones, to correct its value."""

    neutral_gates: ClassVar[Mapping[str, float]] = {"beta": 0.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("lookup", self.lookup, ("query", "key"))
        self.b_proj = nn.Linear(self.d_model, self.heads)

    def gates(self, x: Hidden) -> Gates:
        """beta β: b h t."""
        return {"beta": torch.sigmoid(self.b_proj(x)).transpose(1, 2)}

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        keys = torch.cat([state["k"], k], dim=2)
        t, past = k.shape[2], state["k"].shape[2]
        bias = self.bias(q, {"k": keys})
        logits = causal(q, keys, bias)  # b h t s
        with without_autocast(q):
            found = logits if self.lookup == "query" else causal(k, keys, bias)
            own = torch.eye(t, dtype=torch.bool, device=q.device)
            found = torch.cat([found[..., :past], found[..., past:].masked_fill(own, -torch.inf)], dim=-1)
            removed = full_precision(gates["beta"])[..., None] * softmax_or_zero(found)  # b h t s
            u = full_precision(v) - removed[..., :past] @ state["v"]
            u = torch.linalg.solve_triangular(removed[..., past:], u, upper=False, unitriangular=True)
            u = torch.cat([state["v"], u], dim=2)
            return read(logits, u).to(v.dtype), {"k": keys, "v": u}

    def empty_state(self, q: Query, v: Value) -> State:
        state = super().empty_state(q, v)
        return state | {"v": full_precision(state["v"])}
