"""RWKV-7 (Peng et al., arXiv 2503.14456)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from recall_lab.mixer.base import l2_normalize
from recall_lab.mixer.matrix_memory import MatrixMemory, Update
from recall_lab.shapes import Gates, Hidden, Query, Value


@dataclass(eq=False, repr=False, kw_only=True)
class RWKV7(MatrixMemory):
    """Every key channel decays, and each write erases along one key while it writes along another.

    S_t = (diag(w_t) − (a_t ⊙ κ_t) κ_tᵀ) S_{t−1} + k̃_t v_tᵀ,  o_t = S_tᵀ q_t;  A_ts = q_tᵀ (Π_{r=s+1..t} (diag(w_r) −
    (a_r ⊙ κ_r) κ_rᵀ)) k̃_s, later factors on the left;  state: S.
    κ = k ⊙ ξ scaled to unit length, k̃ = k ⊙ (1 + (a − 1) ⊙ α), log w = −e^{−½} sigmoid(·), a = sigmoid(·).
    At the start ξ = .71, α = 1.02, a is near ½, and log w is spread over the channels, with half-lives from 760
    tokens to 6.
    The paper's token shift, low-rank projections, group norm and bonus are left out. The options that all mechanisms
    share (short_conv, output_norm, output_gate) are available instead.
    Source: Peng et al., arXiv 2503.14456.
    """

    compiles: ClassVar[bool] = False
    neutral_gates: ClassVar[Mapping[str, float]] = {"log_decay": 0.0, "a": 1.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        keys = self.heads * self.d_key
        self.w_proj = nn.Linear(self.d_model, keys)
        self.a_proj = nn.Linear(self.d_model, keys)
        self.xi = nn.Parameter(torch.full((keys,), 0.71))
        self.alpha = nn.Parameter(torch.full((keys,), 1.02))
        with torch.no_grad():
            self.w_proj.bias.copy_(torch.linspace(-6.5, -1.5, keys))
        nn.init.zeros_(self.a_proj.bias)

    def gates(self, x: Hidden) -> Gates:
        """log_decay log w and a: b h t k each."""
        w, a = (torch.sigmoid(proj(x)).unflatten(-1, (self.heads, -1)) for proj in (self.w_proj, self.a_proj))
        return {"log_decay": -(torch.e**-0.5) * w.transpose(1, 2), "a": a.transpose(1, 2)}

    def query(self, q: Query) -> Query:
        return q

    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        xi, alpha = (weight.unflatten(0, (self.heads, 1, -1)) for weight in (self.xi, self.alpha))
        kappa = l2_normalize(k * xi)
        a = gates["a"]
        return Update(k * (1 + (a - 1) * alpha), v, gates["log_decay"], -kappa, a * kappa, reads_before_decay=True)
