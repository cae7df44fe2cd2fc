"""Comba (Hu et al., arXiv 2506.02475)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from recall_lab.checks import number
from recall_lab.mixer.decay import MambaDecay
from recall_lab.mixer.matrix_memory import MatrixMemory, Update
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Comba(MatrixMemory):
    """The gated delta rule with a weaker erasure, and a query from which a multiple of the key is subtracted.

    S_t = e^{g_t} S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ p_t)ᵀ with p_t = b k_t,  o_t = S_tᵀ q_t / √d;
    A_ts = q_tᵀ (Π_{r=s+1..t} (e^{g_r} − β_r k_r p_rᵀ)) β_s k_s / √d, later factors on the left;  state: S.
    S_{t−1}ᵀ p_t is read from the state before its decay. g is Mamba's decay; β = sigmoid(·) starts near ½;
    b = sigmoid(·), one per head, starts at .73. SiLU follows the short convolution, D b k is subtracted from q, with
    one learned D per head, and then keys have unit length. In flash-linear-attention 0.6.0 p is scaled to unit length
    as well, so that b has no effect there.
    Source: Hu et al., arXiv 2506.02475.
    """

    qk_norm: bool = True
    conv_activation: bool = True

    correction: float | int = 1.0
    """D at the start. The authors' other choice, for small models, is .02."""

    neutral_gates: ClassVar[Mapping[str, float]] = {"log_decay": 0.0, "beta": 1.0, "feedback": 1.0}
    gate_options: ClassVar[tuple[str, ...]] = ("correction",)

    def __post_init__(self) -> None:
        super().__post_init__()
        number("correction", self.correction)
        self.decay = MambaDecay(self.d_model, self.heads)
        self.b_proj = nn.Linear(self.d_model, self.heads, bias=False)
        self.b = nn.Parameter(torch.ones(self.heads))
        self.D = nn.Parameter(torch.full((self.heads,), float(self.correction)))

    def gates(self, x: Hidden) -> Gates:
        """log_decay g, beta β and feedback b: b h t each."""
        beta = torch.sigmoid(self.b_proj(x)).transpose(1, 2)
        return {"log_decay": self.decay(x)[0], "beta": beta, "feedback": torch.sigmoid(self.b)[:, None].expand_as(beta)}

    def project(self, x: Hidden, state: State | None = None) -> tuple[Query, Query, Value, Gates, State]:
        q, k, v, _, carried = self.vectors(x, state)
        gates = self.gates(x)
        corrected = q - self.D[:, None, None] * gates["feedback"][..., None] * k
        return *self.normalized(corrected, k), v, gates, carried

    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        beta = gates["beta"][..., None]  # b h t 1
        p = gates["feedback"][..., None] * k
        return Update(k, beta * v, gates["log_decay"], erase_read=-beta * p, reads_before_decay=True)
