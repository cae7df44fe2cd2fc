"""Linear attention (Katharopoulos et al., arXiv 2006.16236)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from recall_lab.checks import flag, require
from recall_lab.mixer.base import query_scale
from recall_lab.mixer.feature_map import make_map
from recall_lab.mixer.matrix_memory import MatrixMemory, Update
from recall_lab.mixer.numerics import full_precision
from recall_lab.shapes import Gates, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Linear(MatrixMemory):
    """Every pair is added to one matrix, and none is ever removed.

    S_t = S_{t−1} + φ(k_t) v_tᵀ,  o_t = S_tᵀ φ(q_t) / √d;  A_ts = φ(q_t)·φ(k_s) / √d for s ≤ t;  state: S.
    With the normalizer, o_t is divided by φ(q_t)·Σ_{s≤t} φ(k_s) / √d + 1e−10, and φ must be positive. The sum is
    carried as one more column of S.
    Source: Katharopoulos et al., arXiv 2006.16236.
    """

    feature_map: str = "identity"
    """φ: identity, elu+1, relu, softplus, dpfp, taylor, or hedgehog (learned separately for q and k)."""
    normalizer: bool = False
    """Divide by the sum of the weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        flag("normalizer", self.normalizer)
        self.q_map = make_map(self.feature_map, self.d_key)
        self.k_map = make_map(self.feature_map, self.d_key)
        require(
            not self.normalizer or self.feature_map != "identity",
            "feature_map=identity: must be a positive map where normalizer=true",
        )

    def query(self, q: Query) -> Tensor:
        return self.q_map(q) * query_scale(q.shape[-1])

    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        return Update(self.k_map(k), torch.cat([v, torch.ones_like(v[..., :1])], dim=-1) if self.normalizer else v)

    def output(self, o: Tensor, v: Value, gates: Gates) -> Value:
        return o[..., :-1] / (o[..., -1:] + 1e-10) if self.normalizer else o

    def empty_state(self, q: Query, v: Value) -> State:
        features = self.query(full_precision(q[:, :, :1])).shape[-1]
        return {"S": full_precision(v).new_zeros(*q.shape[:2], features, v.shape[-1] + self.normalizer)}
