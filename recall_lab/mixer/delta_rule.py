"""The delta rule: DeltaNet (Schlag et al., arXiv 2102.11174; Yang et al., arXiv 2406.06484)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from recall_lab.checks import flag
from recall_lab.mixer.matrix_memory import MatrixMemory, Update, delta_update
from recall_lab.shapes import Gates, Hidden, Query, Value


@dataclass(eq=False, repr=False, kw_only=True)
class DeltaRule(MatrixMemory):
    """Each write first removes the value that the state returns for that key.

    S_t = (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ,  o_t = S_tᵀ q_t / √d: one step of gradient descent with rate β_t
    on ½‖Sᵀk_t − v_t‖²;  A_ts = q_tᵀ Π_{r=s+1..t} (I − β_r k_r k_rᵀ) β_s k_s / √d;  state: S.
    β = sigmoid(·) starts near ½.
    Source: Schlag et al., arXiv 2102.11174; parallel form Yang et al., arXiv 2406.06484.
    """

    qk_norm: bool = True

    allow_neg_eigval: bool = False
    """β in (0, 2) instead of (0, 1): I − β k kᵀ may reflect as well as erase (Grazzi et al., arXiv 2411.12537)."""

    neutral_gates: ClassVar[Mapping[str, float]] = {"beta": 1.0}
    gate_options: ClassVar[tuple[str, ...]] = ("allow_neg_eigval",)

    def __post_init__(self) -> None:
        super().__post_init__()
        flag("allow_neg_eigval", self.allow_neg_eigval)
        self.b_proj = nn.Linear(self.d_model, self.heads, bias=False)

    def gates(self, x: Hidden) -> Gates:
        """beta β: b h t."""
        beta = torch.sigmoid(self.b_proj(x)).transpose(1, 2)
        return {"beta": 2 * beta if self.allow_neg_eigval else beta}

    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        return delta_update(k, v, gates)
