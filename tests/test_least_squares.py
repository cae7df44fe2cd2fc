"""The solver of mesa versus its naive form, and where rounding errors would determine the result."""

import pytest
import torch
from torch import Tensor

from recall_lab.mixer.least_squares import System, solve, solve_all, solve_step
from recall_lab.mixer.mesa import Mesa


def draw(length: int, width: int = 5) -> tuple[Tensor, System]:
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, 2, *shape, generator=generator, dtype=torch.float64)

    H = normal(width, width)
    system = System(
        k=normal(length, width),
        write=torch.sigmoid(normal(length, 1)),
        log_decay=-normal(length).abs(),
        ridge=0.1 + normal(length, width).abs(),
        H=H @ H.mT,
    )
    return normal(length, width), system


def naive(q: Tensor, system: System) -> tuple[Tensor, Tensor]:
    """The definition: one linear system per position, by an LU factorisation and plain autograd."""
    H, solutions = system.H, []
    for t in range(q.shape[2]):
        k = system.k[:, :, t]
        H = system.log_decay[:, :, t, None, None].exp() * H + (system.write[:, :, t] * k)[..., None] * k[..., None, :]
        matrix = H + torch.diag_embed(system.ridge[:, :, t])
        solutions.append(torch.linalg.solve(matrix, q[:, :, t]))
    return torch.stack(solutions, dim=2), H


@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
def test_the_solver_equals_its_naive_form(length):
    """Solutions, H and all gradients, that of the first H up to its antisymmetric part; and one step."""
    q, system = draw(length)
    inputs = [x.requires_grad_() for x in (q, *system)]
    results = [solve_all(q, system), naive(q, system)]
    gradients = [torch.autograd.grad(x.sin().sum() + H.cos().sum(), inputs) for x, H in results]
    gradients = [(*others, H + H.mT) for *others, H in gradients]
    for x, reference in zip((*results[0], *gradients[0]), (*results[1], *gradients[1]), strict=True):
        assert torch.allclose(x, reference, rtol=1e-10, atol=1e-10)
    if length == 1:
        for x, reference in zip(solve_step(q, system), results[1], strict=True):
            assert torch.allclose(x, reference, rtol=1e-10, atol=1e-10)


def test_a_gradient_is_taken_for_many_outputs_at_once():
    q, system = draw(6)
    q.requires_grad_()
    x, _ = solve_all(q, system)
    directions = torch.randn(3, *x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (batched,) = torch.autograd.grad(x, q, directions, is_grads_batched=True, retain_graph=True)
    singly = [torch.autograd.grad(x, q, direction, retain_graph=True)[0] for direction in directions]
    assert torch.allclose(batched, torch.stack(singly))


def answers(dtype: torch.dtype, ridge: float, form: str = "parallel") -> Tensor:
    """Mesa's outputs for 512 unit keys of mean cosine 0.99 and queries for keys written so far; inputs are float32."""
    generator = torch.Generator().manual_seed(1)
    common, own, v = torch.randn(3, 4, 1, 512, 64, generator=generator, dtype=torch.float64).unbind(0)
    common = common[:, :, :1] / common[:, :, :1].norm(dim=-1, keepdim=True)
    own = own - (own * common).sum(-1, keepdim=True) * common
    k = (0.99**0.5 * common + 0.1 * own / own.norm(dim=-1, keepdim=True)).float()
    queried = (torch.rand(512, generator=generator) * torch.arange(1, 513)).long()
    mixer = Mesa(d_model=64, d_key=64, short_conv=0).to(dtype)
    gates = {
        "log_decay": torch.zeros(4, 1, 512, dtype=dtype),
        "write": torch.ones(4, 1, 512, dtype=dtype),
        "ridge": torch.full((4, 1, 512, 64), ridge, dtype=dtype),
    }
    with torch.no_grad():
        o, _ = getattr(mixer, form)(k[:, :, queried].to(dtype), k.to(dtype), v.float().to(dtype), gates)
    return o.double()


def largest_error(dtype: torch.dtype, ridge: float, form: str) -> float:
    """Largest error of any answer, relative to the recurrence in float64."""
    reference = answers(torch.float64, ridge, "run_recurrence")
    error = answers(dtype, ridge, form) - reference
    return float((error.norm(dim=-1) / reference.norm(dim=-1)).max())


forms = pytest.mark.parametrize("form", ["parallel", "run_recurrence"])


@forms
@pytest.mark.parametrize("ridge", [1e-6, 1e-8])
def test_nearly_dependent_keys_are_refused_where_rounding_decides(form, ridge):
    with pytest.raises(ValueError, match=r"^ridge: must be larger, since the keys are .* dependent .* in float32"):
        answers(torch.float32, ridge, form)


@forms
@pytest.mark.parametrize(("ridge", "largest"), [(1e-4, 2e-3), (1e-5, 8e-3)])
def test_nearly_dependent_keys_in_float32_have_the_stated_accuracy(form, ridge, largest):
    assert largest_error(torch.float32, ridge, form) < largest


def test_nearly_dependent_keys_in_float64_are_solved():
    assert largest_error(torch.float64, 1e-8, "parallel") < 2e-9


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -2.0])
def test_a_matrix_that_is_not_positive_definite_is_refused(bad):
    H = torch.eye(3).repeat(2, 1, 1)
    H[1, 2, 2] = bad
    with pytest.raises(ValueError, match=r"^ridge: .* not positive definite in float32, or a key or gate is not"):
        solve(H, torch.full((2, 3), 0.5), torch.ones(2, 3))
