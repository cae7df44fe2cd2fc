"""The solver of mesa: x_t = (H_t + Λ_t)⁻¹ q_t at every position t, with H_t = γ_t H_{t−1} + β_t k_t k_tᵀ.

H_t + Λ_t is factorised by Cholesky's method at each position, once for the solution and once more for its gradient, so
that no factor is kept for the backward pass. With λ = (H + Λ)⁻¹ dx, the gradient of a solution x in the direction dx is
λ for q and −λ xᵀ for H + Λ. It is that of λᵀ (q − (H + Λ) x) with λ and x taken as constants, and is computed so.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from recall_lab.checks import require
from recall_lab.mixer.matrix_memory import Update, chunked, step
from recall_lab.mixer.numerics import log_decay_sums
from recall_lab.shapes import Query

Matrices = Float[Tensor, "*batch k k"]
Vectors = Float[Tensor, "*batch k"]


class System(NamedTuple):
    """What determines H_t + Λ_t at every position of a segment.

    k          the keys, b h t k.
    write      β, b h t 1.
    log_decay  log γ, b h t.
    ridge      the diagonal of Λ, b h t k.
    H          H before the segment, b h k k.
    """

    k: Tensor
    write: Tensor
    log_decay: Tensor
    ridge: Tensor
    H: Tensor

    def update(self) -> Update:
        """H as the state of a matrix_memory whose values are its keys."""
        return Update(self.k, self.write * self.k, self.log_decay)


def solve_step(q: Query, system: System) -> tuple[Query, Matrices]:
    """x (b h 1 k) and H after it (b h k k) at one position."""
    _, H = step(q, system.update(), system.H)
    return solve(H[:, :, None], system.ridge, q), H


def solve_all(q: Query, system: System) -> tuple[Query, Matrices]:
    """x (b h t k) at all positions and H (b h k k) after the last."""
    constant = System(*(x.detach() for x in system))
    x = _solve_chunks(q.detach(), constant)
    image, H = chunked(x, system.update(), system.H)
    return Solution.apply(q - image - system.ridge * x, x, constant), H


def solve(H: Matrices, ridge: Vectors, r: Vectors) -> Vectors:
    """(H + diag ridge)⁻¹ r for positive semidefinite H.

    Raises ValueError where H + diag ridge is not positive definite beyond the rounding error of its dtype: where a
    pivot of its factorisation is no larger than eps ‖H + diag ridge‖, or a number is not finite.
    """
    matrix = H + torch.diag_embed(ridge)
    factor, info = torch.linalg.cholesky_ex(matrix)
    pivots = factor.detach().diagonal(dim1=-2, dim2=-1).square()
    rounding = torch.finfo(H.dtype).eps * matrix.detach().norm(dim=(-2, -1))
    definite = (info == 0) & (pivots.amin(-1) > rounding)  # false for nan
    require(
        definite.is_meta or bool(definite.all()),
        "ridge: must be larger, since the keys are nearly linearly dependent and H + ridge is not positive definite in "
        f"{str(H.dtype).removeprefix('torch.')}, or a key or gate is not finite",
    )
    return torch.cholesky_solve(r[..., None], factor)[..., 0]


class Solution(torch.autograd.Function):
    """The solution x, from its residual r_t = q_t − (H_t + Λ_t) x_t: zero, but its gradient is (H_t + Λ_t)⁻¹ dx_t.

    The matrices are symmetric, so the gradient solves the same system.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, residual: Query, x: Query, system: System) -> Query:
        ctx.save_for_backward(*system)
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Query) -> tuple[Query, None, None]:
        return _solve_chunks(grad, System(*ctx.saved_tensors)), None, None  # type: ignore[attr-defined]


MATRICES = 256
"""Number of matrices H_t that exist at a time, about; they then fit in the processor's cache."""


@torch.no_grad()
def _solve_chunks(r: Query, system: System) -> Query:
    """(H_t + Λ_t)⁻¹ r_t for all t, a few positions at a time."""
    H, solutions = system.H, []
    chunk = min(max(1, MATRICES // max(1, H.shape[:2].numel())), 32)
    parts = (x.split(chunk, dim=2) for x in (r, *system[:-1]))
    for r_c, k, write, g, ridge in zip(*parts, strict=True):
        written = ((write * k)[..., None] * k[..., None, :]).flatten(-2)  # b h t (k k)
        kept = g.cumsum(-1).exp()[..., None]  # b h t 1
        systems = torch.addcmul(log_decay_sums(g).exp() @ written, kept, H.flatten(-2)[:, :, None])  # b h t (k k)
        systems = systems.unflatten(-1, H.shape[-2:])  # b h t k k
        H = systems[:, :, -1]
        solutions.append(solve(systems, ridge, r_c))
    return torch.cat(solutions, dim=2)
