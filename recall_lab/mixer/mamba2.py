"""Mamba-2 (Dao and Gu, arXiv 2405.21060)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from recall_lab.mixer.decay import MambaDecay
from recall_lab.mixer.matrix_memory import MatrixMemory, Update
from recall_lab.shapes import Gates, Hidden, Query, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Mamba2(MatrixMemory):
    """One learned step size Δ sets both how much is forgotten and how much is written.

    S_t = e^{A Δ_t} S_{t−1} + Δ_t k_t v_tᵀ,  o_t = S_tᵀ q_t + D v_t, with one A = −e^{A_log} < 0 and one D per head;
    A_ts = e^{A Σ_{r=s+1..t} Δ_r} Δ_s q_t·k_s + D [s = t];  state: S.
    In the paper's letters C = q, B = k, x = v. Here every head has its own B and C; in the paper all heads share them.
    D starts at 1. The paper's norm and gate of the output are the options output_norm and output_gate.
    Source: Dao and Gu, arXiv 2405.21060.
    """

    conv_activation: bool = True

    neutral_gates: ClassVar[Mapping[str, float]] = {"log_decay": 0.0, "write": 1.0, "skip": 0.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.decay = MambaDecay(self.d_model, self.heads)
        self.D = nn.Parameter(torch.ones(self.heads))

    def gates(self, x: Hidden) -> Gates:
        """log_decay AΔ, write Δ and skip D: b h t each."""
        g, dt = self.decay(x)
        return {"log_decay": g, "write": dt, "skip": self.D[:, None].expand_as(dt)}

    def query(self, q: Query) -> Query:
        return q

    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        return Update(k, v * gates["write"][..., None], gates["log_decay"])

    def output(self, o: Tensor, v: Value, gates: Gates) -> Value:
        return o + gates["skip"][..., None] * v
