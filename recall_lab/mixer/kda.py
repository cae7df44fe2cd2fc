"""Kimi delta attention (Kimi Team, arXiv 2510.26692)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from recall_lab.mixer.decay import MambaDecay
from recall_lab.mixer.matrix_memory import MatrixMemory, Update, delta_update
from recall_lab.shapes import Gates, Hidden, Query, Value


@dataclass(eq=False, repr=False, kw_only=True)
class KDA(MatrixMemory):
    """The gated delta rule with its own decay for every key channel.

    S' = diag(e^{g_t}) S_{t−1},  S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ,  o_t = S_tᵀ q_t / √d;
    A_ts = q_tᵀ (Π_{r=s+1..t} (I − β_r k_r k_rᵀ) diag(e^{g_r})) β_s k_s / √d, later factors on the left;  state: S.
    g = −e^{A_log} softplus(W x + dt_bias), where W has full rank here; in the paper its rank is a head's width.
    β = sigmoid(·) starts near ½.
    Source: Kimi Team, arXiv 2510.26692.
    """

    qk_norm: bool = True
    conv_activation: bool = True

    compiles: ClassVar[bool] = False
    neutral_gates: ClassVar[Mapping[str, float]] = {"log_decay": 0.0, "beta": 1.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.decay = MambaDecay(self.d_model, self.heads, self.d_key)
        self.b_proj = nn.Linear(self.d_model, self.heads, bias=False)

    def gates(self, x: Hidden) -> Gates:
        """log_decay g: b h t k; beta β: b h t."""
        return {"log_decay": self.decay(x)[0], "beta": torch.sigmoid(self.b_proj(x)).transpose(1, 2)}

    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        return delta_update(k, v, gates)
