"""Linear attention (Katharopoulos et al., arXiv 2006.16236)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from recall_lab.mixer.matrix_memory import MatrixMemory, Update
from recall_lab.shapes import Gates, Query, Value

FEATURES = {
    "identity": lambda x: x,
    "elu+1": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "softplus": F.softplus,
}


@dataclass(eq=False, repr=False, kw_only=True)
class Linear(MatrixMemory):
    """Every pair added to one matrix, none ever taken away.

    S_t = S_{t−1} + φ(k_t) v_tᵀ,  o_t = S_tᵀ φ(q_t) / √d;  A_ts = φ(q_t)·φ(k_s) / √d for s ≤ t;  state: S.
    With the normaliser, o_t is divided by φ(q_t)·Σ_{s≤t} φ(k_s) / √d + 1e−10 (φ must be positive), whose sum is
    carried as one more column of S.
    Source: Katharopoulos et al., arXiv 2006.16236.
    """

    feature_map: str = "identity"
    """φ: identity, elu+1, relu or softplus."""
    normalizer: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feature_map not in FEATURES:
            raise ValueError(f"feature_map={self.feature_map!r}: one of {', '.join(FEATURES)}")
        if self.normalizer and self.feature_map == "identity":
            raise ValueError("normalizer=true needs a positive feature_map, not identity")

    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        k = FEATURES[self.feature_map](k)
        return Update(k, torch.cat([v, torch.ones_like(v[..., :1])], dim=-1) if self.normalizer else v)
