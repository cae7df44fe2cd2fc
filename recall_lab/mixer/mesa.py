"""MesaNet (von Oswald et al., arXiv 2506.05233)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from recall_lab.mixer.base import Mixer
from recall_lab.mixer.decay import MambaDecay
from recall_lab.mixer.least_squares import System, solve_all, solve_step
from recall_lab.mixer.matrix_memory import Update, chunked, step
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Mesa(Mixer):
    """The read-out of the exact ridge regression from keys to values over all pairs so far.

    H_t = γ_t H_{t−1} + β_t k_t k_tᵀ,  S_t = γ_t S_{t−1} + β_t k_t v_tᵀ,  o_t = S_tᵀ (H_t + Λ)⁻¹ q_t. The matrix
    W = (H + Λ)⁻¹ S minimises Σ_s β_s Π_r γ_r ‖Wᵀk_s − v_s‖² + tr WᵀΛW.  A_ts = β_s Π_{r=s+1..t} γ_r q_tᵀ (H_t + Λ)⁻¹
    k_s;  state: H and S. log γ is Mamba's decay; β = sigmoid(·) starts near ½; Λ = softplus(·) + ¼ is a diagonal with
    one entry per key channel and head, 1 at the start. The gradient is that of the exact solution; there is no
    second derivative.
    How small Λ may be depends on the dtype. With unit keys of mean cosine 0, .99, .9999 (64 channels, 512 pairs) the
    largest relative error of an output in float32 is 3e−5, 2e−3, 5e−2 at Λ = 1e−4 and 4e−4, 4e−3, 6e−2 at 1e−5. At
    1e−6 and cosine .99 or more, rounding would dominate and ValueError is raised. In float64 the error is below 2e−9 at
    Λ = 1e−8.
    Raises ValueError where H + Λ is not positive definite beyond rounding error, or not finite.
    Source: von Oswald et al., arXiv 2506.05233.
    """

    qk_norm: bool = True
    conv_activation: bool = True

    compiles: ClassVar[bool] = False
    neutral_gates: ClassVar[Mapping[str, float]] = {"log_decay": 0.0, "write": 1.0, "ridge": 1e-4}
    no_weight_decay: ClassVar[tuple[str, ...]] = ("ridge",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.q_length is not None:
            nn.init.constant_(self.q_length, self.d_key**0.5)  # the query is not divided by √d_key here
        self.decay = MambaDecay(self.d_model, self.heads)
        self.b_proj = nn.Linear(self.d_model, self.heads, bias=False)
        self.ridge = nn.Parameter(torch.full((self.heads, self.d_key), math.log(math.expm1(0.75))))

    def gates(self, x: Hidden) -> Gates:
        """log_decay log γ and write β: b h t each; ridge, the diagonal of Λ: b h t k."""
        ridge = (F.softplus(self.ridge) + 0.25)[:, None].expand(x.shape[0], -1, x.shape[1], -1)
        return {"log_decay": self.decay(x)[0], "write": torch.sigmoid(self.b_proj(x)).transpose(1, 2), "ridge": ridge}

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        state = self.empty_state(q, v) if state is None else state
        if q.shape[2] == 0:
            return v, state
        with without_autocast(q):
            system, writes = _parts(k, v, gates, state)
            x, H = solve_all(full_precision(q), system)
            o, S = chunked(x, writes, state["S"])
        return o.to(v.dtype), {"H": H, "S": S}

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        with without_autocast(q):
            system, writes = _parts(k, v, gates, state)
            x, H = solve_step(full_precision(q), system)
            o, S = step(x, writes, state["S"])
        return o.to(v.dtype), {"H": H, "S": S}

    def empty_state(self, q: Query, v: Value) -> State:
        zeros = full_precision(v).new_zeros
        return {"H": zeros(*q.shape[:2], q.shape[-1], q.shape[-1]), "S": zeros(*q.shape[:2], q.shape[-1], v.shape[-1])}


def _parts(k: Query, v: Value, gates: Gates, state: State) -> tuple[System, Update]:
    """What determines H, and what is written to S."""
    k, v, g, ridge = (full_precision(x) for x in (k, v, gates["log_decay"], gates["ridge"]))
    write = full_precision(gates["write"])[..., None]  # b h t 1
    return System(k, write, g, ridge, state["H"]), Update(k, write * v, g)
