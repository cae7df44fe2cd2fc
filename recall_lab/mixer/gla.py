"""Gated linear attention (Yang et al., arXiv 2312.06635)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import nn

from recall_lab.mixer.matrix_memory import MatrixMemory, Update
from recall_lab.shapes import Gates, Hidden, Query, Value


@dataclass(eq=False, repr=False, kw_only=True)
class GLA(MatrixMemory):
    """Every key channel has its own decay.

    S_t = diag(α_t) S_{t−1} + k_t v_tᵀ,  o_t = S_tᵀ q_t / √d;  A_ts = Σ_c q_tc k_sc Π_{r=s+1..t} α_rc / √d;  state: S.
    α = sigmoid(W x + b)^(1/16), near 1 at the start. W has full rank here, and rank 16 in the paper.
    Source: Yang et al., arXiv 2312.06635.
    """

    compiles: ClassVar[bool] = False
    neutral_gates: ClassVar[Mapping[str, float]] = {"log_decay": 0.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.decay_proj = nn.Linear(self.d_model, self.heads * self.d_key)

    def gates(self, x: Hidden) -> Gates:
        """log_decay g = log α: b h t k."""
        g = F.logsigmoid(self.decay_proj(x)) / 16
        return {"log_decay": g.unflatten(-1, (self.heads, -1)).transpose(1, 2)}

    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        return Update(k, v, gates["log_decay"])
