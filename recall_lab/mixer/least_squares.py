"""The solver of mesa: x_t = (H_t + Λ_t)⁻¹ q_t at every position t, with H_t = γ_t H_{t−1} + β_t k_t k_tᵀ.

H_t + Λ_t is factorised by Cholesky's method at each position. One step of iterative refinement follows:

    x = x̂ + M (q − (H + Λ) x̂),      M = (H + Λ)⁻¹.

It removes the rounding error of the first solution x̂. With x̂ and M taken as constants it also has the gradient of
the exact solution, since d(M q) = M (dq − d(H + Λ) M q). No Cholesky factor is therefore kept for the backward pass.
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


def solve_all(q: Query, system: System, chunk: int) -> tuple[Query, Matrices]:
    """x (b h t k) at all positions and H (b h k k) after the last; at most `chunk` matrices H_t exist at a time."""
    constant = System(*(x.detach() for x in system))
    first = _solve_chunks(q.detach(), constant, chunk)
    image, H = chunked(first, system.update(), system.H)
    residual = q - image - system.ridge * first
    return first + SolveConstant.apply(residual, constant, chunk), H


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


class SolveConstant(torch.autograd.Function):
    """r_t → (H_t + Λ_t)⁻¹ r_t for a constant system. Its matrices are symmetric: the gradient solves it too."""

    @staticmethod
    def forward(ctx: FunctionCtx, r: Query, system: System, chunk: int) -> Query:
        ctx.save_for_backward(*system)
        ctx.chunk = chunk  # type: ignore[attr-defined]  # a context takes any attribute
        return _solve_chunks(r, system, chunk)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Query) -> tuple[Query, None, None]:
        system = System(*ctx.saved_tensors)  # type: ignore[attr-defined]
        return _solve_chunks(grad, system, ctx.chunk), None, None  # type: ignore[attr-defined]


@torch.no_grad()
def _solve_chunks(r: Query, system: System, chunk: int) -> Query:
    """(H_t + Λ_t)⁻¹ r_t for all t, chunk by chunk."""
    H, solutions = system.H, []
    parts = (x.split(chunk, dim=2) for x in (r, *system[:-1]))
    for r_c, k, write, g, ridge in zip(*parts, strict=True):
        written = ((write * k)[..., None] * k[..., None, :]).flatten(-2)  # b h t (k k)
        kept = g.cumsum(-1).exp()[..., None] * H.flatten(-2)[:, :, None]  # b h t (k k)
        systems = (log_decay_sums(g).exp() @ written + kept).unflatten(-1, H.shape[-2:])  # b h t k k
        H = systems[:, :, -1]
        solutions.append(solve(systems, ridge, r_c))
    return torch.cat(solutions, dim=2)
