"""The gated delta rule (Yang et al., arXiv 2412.06464)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from recall_lab.checks import flag
from recall_lab.mixer.decay import MambaDecay
from recall_lab.mixer.matrix_memory import MatrixMemory, Update, delta_update
from recall_lab.shapes import Gates, Hidden, Query, Value


@dataclass(eq=False, repr=False, kw_only=True)
class GatedDelta(MatrixMemory):
    """The delta rule on a state that first decays.

    S' = e^{g_t} S_{t−1},  S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ,  o_t = S_tᵀ q_t / √d;
    A_ts = q_tᵀ (Π_{r=s+1..t} e^{g_r} (I − β_r k_r k_rᵀ)) β_s k_s / √d, later factors on the left;  state: S.
    g is Mamba's decay, −e^{A_log} softplus(W x + dt_bias), and β = sigmoid(·) starts near ½. Keys have unit length,
    and SiLU follows the short convolution.
    Source: Yang et al., arXiv 2412.06464.
    """

    qk_norm: bool = True
    conv_activation: bool = True

    allow_neg_eigval: bool = False
    """β in (0, 2) instead of (0, 1): I − β k kᵀ may reflect as well as erase (Grazzi et al., arXiv 2411.12537)."""

    neutral_gates: ClassVar[Mapping[str, float]] = {"log_decay": 0.0, "beta": 1.0}
    gate_options: ClassVar[tuple[str, ...]] = ("allow_neg_eigval",)

    def __post_init__(self) -> None:
        super().__post_init__()
        flag("allow_neg_eigval", self.allow_neg_eigval)
        self.decay = MambaDecay(self.d_model, self.heads)
        self.b_proj = nn.Linear(self.d_model, self.heads, bias=False)

    def gates(self, x: Hidden) -> Gates:
        """log_decay g and beta β: b h t each."""
        beta = torch.sigmoid(self.b_proj(x)).transpose(1, 2)
        return {"log_decay": self.decay(x)[0], "beta": 2 * beta if self.allow_neg_eigval else beta}

    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        return delta_update(k, v, gates)
