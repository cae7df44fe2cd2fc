"""Gated DeltaProduct (Siems et al., arXiv 2502.10297)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from recall_lab.checks import flag, whole_number
from recall_lab.mixer.decay import MambaDecay
from recall_lab.mixer.matrix_memory import MatrixMemory, Update, delta_update
from recall_lab.shapes import Gates, Hidden, Query, Value


@dataclass(eq=False, repr=False, kw_only=True)
class GatedDeltaProduct(MatrixMemory):
    """Several writes of the delta rule per token, each with its own key, value and write strength β, after one decay.

    S_t^0 = e^{g_t} S_{t−1},  S_t^j = S_t^{j−1} + β_tj k_tj (v_tj − S_t^{j−1}ᵀ k_tj)ᵀ for j = 1 … n,  S_t = S_t^n,
    o_t = S_tᵀ q_t / √d;  no A: o_t = Σ_s Σ_j A_tsj v_sj has n weights per token, not one;  state: S.
    A product of n factors I − β k kᵀ with β in (0, 2) can be any product of n reflections (β = 2). Two of them make
    a rotation, which permutes three elements cyclically; one factor can only swap two elements.
    g is Mamba's decay and β = 2 sigmoid(·) starts near 1. Keys have unit length, and SiLU follows the short
    convolution. In the oracle, which gives one pair per token, this is the gated delta rule.
    Source: Siems et al., arXiv 2502.10297.
    """

    qk_norm: bool = True
    conv_activation: bool = True

    householders: int = 2
    """n: keys and values per token."""
    allow_neg_eigval: bool = True
    """β in (0, 2) instead of (0, 1), as in gated_delta."""
    gated: bool = True
    """Whether the state decays. Without decay this is DeltaProduct."""

    linear_in_v: ClassVar[bool] = False
    neutral_gates: ClassVar[Mapping[str, float]] = {"log_decay": 0.0, "beta": 1.0, "more_beta": 0.0}
    gate_options: ClassVar[tuple[str, ...]] = ("allow_neg_eigval", "householders")

    def __post_init__(self) -> None:
        whole_number("householders", self.householders)
        super().__post_init__()
        flag("allow_neg_eigval", self.allow_neg_eigval)
        flag("gated", self.gated)
        self.decay = MambaDecay(self.d_model, self.heads) if self.gated else None
        self.b_proj = nn.Linear(self.d_model, self.heads * self.householders, bias=False)

    @property
    def pairs(self) -> int:
        return self.householders

    @property
    def fixed_gates(self) -> frozenset[str]:
        return frozenset() if self.gated else frozenset({"log_decay"})

    def gates(self, x: Hidden) -> Gates:
        """log_decay g, unless the state does not decay, and beta β_t1: b h t each; more_beta, the others: b h t n−1."""
        beta = torch.sigmoid(self.b_proj(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # b h t n
        beta = 2 * beta if self.allow_neg_eigval else beta
        decay = {} if self.decay is None else {"log_decay": self.decay(x)[0]}
        return decay | {"beta": beta[..., 0], "more_beta": beta[..., 1:]}

    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        if "more_k" in gates:
            beta = torch.cat([gates["beta"][..., None], gates["more_beta"]], dim=-1)  # b h t n
            gates = {**gates, "beta": beta.flatten(2)}
            if "log_decay" in gates:
                gates["log_decay"] = F.pad(gates["log_decay"][..., None], (0, beta.shape[-1] - 1)).flatten(2)
        return delta_update(k, v, gates)
