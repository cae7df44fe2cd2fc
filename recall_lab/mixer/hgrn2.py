"""HGRN2 (Qin et al., arXiv 2404.07904)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from recall_lab.checks import number, require
from recall_lab.mixer.matrix_memory import MatrixMemory, Update
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class HGRN2(MatrixMemory):
    """Gated linear attention whose key is one minus the forget gate, per channel.

    S_t = diag(f_t) S_{t−1} + k_t v_tᵀ with k_t = 1 − f_t,  o_t = S_tᵀ q_t / √d;
    A_ts = Σ_c q_tc k_sc Π_{r=s+1..t} f_rc / √d;  state: S.
    f = l + (1 − l) sigmoid(k_proj x), convolved as keys are, with the lower bound l; q = SiLU(q_proj x). At the start,
    with l = 0, f is near ½. In the paper l is learned, is 0 in the lowest layer and grows with the layer. The
    recurrence takes k and f as separate inputs: in the oracle, which sets both, it is that of gla.
    Source: Qin et al., arXiv 2404.07904.
    """

    lower_bound: float = 0.0
    """l: the least share of a channel that one token keeps, in [0, 1)."""

    compiles: ClassVar[bool] = False
    neutral_gates: ClassVar[Mapping[str, float]] = {"log_decay": 0.0}
    gate_options: ClassVar[tuple[str, ...]] = ("lower_bound",)

    def __post_init__(self) -> None:
        super().__post_init__()
        number("lower_bound", self.lower_bound, least=0.0)
        require(self.lower_bound < 1, f"lower_bound={self.lower_bound!r}: must be below 1")

    def gates(self, x: Hidden) -> Gates:
        """log_decay g = log f: b h t k."""
        return self.project(x)[3]

    def project(self, x: Hidden, state: State | None = None) -> tuple[Query, Query, Value, Gates, State]:
        q, f, v, _, carried = self.vectors(x, state)
        keep = self.lower_bound
        g = torch.log(keep + (1 - keep) * torch.sigmoid(f)) if keep else F.logsigmoid(f)
        k = (1 - keep) * torch.sigmoid(-f)  # 1 − f, without loss of precision near f = 1
        return *self.normalized(F.silu(q), k), v, {"log_decay": g}, carried

    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        return Update(k, v, gates["log_decay"])
