"""MesaNet (von Oswald et al., arXiv 2506.05233)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recall_lab.mixer.base import Mixer
from recall_lab.mixer.decay import MambaDecay
from recall_lab.mixer.matrix_memory import Update, chunked, step
from recall_lab.mixer.numerics import full_precision, log_decay_sums, without_autocast
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Mesa(Mixer):
    """The answer of exact least squares over all pairs so far.

    H_t = γ_t H_{t−1} + β_t k_t k_tᵀ,  S_t = γ_t S_{t−1} + β_t k_t v_tᵀ,  o_t = S_tᵀ (H_t + Λ)⁻¹ q_t, S (H + Λ)⁻¹
    minimising Σ_s β_s Π_r γ_r ‖Wᵀk_s − v_s‖² + tr WᵀΛW;  A_ts = β_s Π_{r=s+1..t} γ_r q_tᵀ (H_t + Λ)⁻¹ k_s;
    state: H and S. log γ is Mamba's decay, β = sigmoid(·), Λ = softplus(·) + ¼ a key channel, 1 at the start.
    The gradient is that of the exact solution, once differentiable.
    Source: von Oswald et al., arXiv 2506.05233.
    """

    qk_norm: bool = True
    conv_activation: bool = True

    chunk: ClassVar[int] = 32
    """Places whose H is held at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.q_length is not None:
            # Nothing divides by √d_key here.
            nn.init.constant_(self.q_length, self.d_key**0.5)
        self.decay = MambaDecay(self.d_model, self.heads)
        self.b_proj = nn.Linear(self.d_model, self.heads, bias=False)
        self.ridge = nn.Parameter(torch.full((self.heads, self.d_key), math.log(math.expm1(0.75))))

    def gates(self, x: Hidden) -> Gates:
        """log_decay log γ and write β: b h t each; ridge, the diagonal of Λ: b h t k."""
        ridge = (F.softplus(self.ridge) + 0.25)[:, None].expand(x.shape[0], -1, x.shape[1], -1)
        return {
            "log_decay": self.decay(x)[0],
            "write": torch.sigmoid(self.b_proj(x)).transpose(1, 2),
            "ridge": ridge,
        }

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        state = self.empty_state(q, v) if state is None else state
        with without_autocast(q):
            q, k, wide = full_precision(q), full_precision(k), full_precision(v)
            g, beta, ridge = (full_precision(gates[name]) for name in ("log_decay", "write", "ridge"))
            beta = beta[..., None]
            system = tuple(x.detach() for x in (k, beta, g, ridge, state["H"]))
            # One step of iterative refinement: it takes off the rounding of the first solution, which stands as a
            # constant, and carries the whole gradient, because the residual depends on everything.
            first = _solve(q.detach(), *system, self.chunk)
            image, H = chunked(first, Update(k, beta * k, g), state["H"])
            x = first + _Inverse.apply(q - image - ridge * first, *system, self.chunk)
            o, S = chunked(x, Update(k, beta * wide, g), state["S"])
        return o.to(v.dtype), {"H": H, "S": S}

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        with without_autocast(q):
            q, k, wide = full_precision(q), full_precision(k), full_precision(v)
            g, beta, ridge = (full_precision(gates[name]) for name in ("log_decay", "write", "ridge"))
            beta = beta[..., None]
            _, H = step(q, Update(k, beta * k, g), state["H"])
            x = torch.linalg.solve(H + torch.diag_embed(ridge[:, :, 0]), q.mT).mT
            o, S = step(x, Update(k, beta * wide, g), state["S"])
        return o.to(v.dtype), {"H": H, "S": S}

    def empty_state(self, q: Query, v: Value) -> State:
        zeros = full_precision(v).new_zeros
        return {"H": zeros(*q.shape[:2], q.shape[-1], q.shape[-1]), "S": zeros(*q.shape[:2], q.shape[-1], v.shape[-1])}


@torch.no_grad()
def _solve(r: Tensor, k: Tensor, beta: Tensor, g: Tensor, ridge: Tensor, H: Tensor, chunk: int) -> Tensor:
    """x_t = (H_t + diag ridge_t)⁻¹ r_t for all t by Cholesky, holding the H_t of one chunk at a time."""
    solutions = []
    for r_c, k_c, beta_c, g_c, ridge_c in zip(*(x.split(chunk, dim=2) for x in (r, k, beta, g, ridge)), strict=True):
        written = ((beta_c * k_c)[..., None] * k_c[..., None, :]).flatten(-2)
        kept = g_c.cumsum(-1).exp()[..., None] * H.flatten(-2)[:, :, None]
        systems = (log_decay_sums(g_c).exp() @ written + kept).unflatten(-1, H.shape[-2:])
        H = systems[:, :, -1]
        factor, _ = torch.linalg.cholesky_ex(systems + torch.diag_embed(ridge_c))
        solutions.append(torch.cholesky_solve(r_c[..., None], factor)[..., 0])
    return torch.cat(solutions, dim=2)


class _Inverse(torch.autograd.Function):
    """r_t → (H_t + diag ridge_t)⁻¹ r_t, the matrices (symmetric) being constants."""

    @staticmethod
    def forward(ctx, r: Tensor, *system) -> Tensor:
        ctx.chunk = system[-1]
        ctx.save_for_backward(*system[:-1])
        return _solve(r, *system)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _solve(grad, *ctx.saved_tensors, ctx.chunk), None, None, None, None, None, None
