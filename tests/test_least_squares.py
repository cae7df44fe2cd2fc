"""The solver of mesa: against its naive form, and where rounding error would decide the result."""

import numpy as np
import pytest
import torch
from torch import Tensor

from recall_lab.mixer.least_squares import System, solve, solve_all, solve_step
from recall_lab.mixer.mesa import Mesa
from recall_lab.oracle import Oracle


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
def test_the_solver_is_its_naive_form(length):
    """Solutions, H and all gradients; step by step too."""
    q, system = draw(length)
    inputs = [x.requires_grad_() for x in (q, *system)]
    results = [solve_all(q, system, chunk=8), naive(q, system)]
    gradients = [torch.autograd.grad(x.sin().sum() + H.cos().sum(), inputs) for x, H in results]
    for x, reference in zip((*results[0], *gradients[0]), (*results[1], *gradients[1]), strict=True):
        assert torch.allclose(x, reference, rtol=1e-10, atol=1e-10)
    if length == 1:
        for x, reference in zip(solve_step(q, system), results[1], strict=True):
            assert torch.allclose(x, reference, rtol=1e-10, atol=1e-10)


def test_a_gradient_is_taken_for_many_outputs_at_once():
    q, system = draw(6)
    q.requires_grad_()
    x, _ = solve_all(q, system, chunk=4)
    directions = torch.randn(3, *x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (batched,) = torch.autograd.grad(x, q, directions, is_grads_batched=True, retain_graph=True)
    singly = [torch.autograd.grad(x, q, direction, retain_graph=True)[0] for direction in directions]
    assert torch.allclose(batched, torch.stack(singly))


def answers(dtype: torch.dtype, form: str = "parallel", **fields) -> Tensor:
    """Mesa's outputs for the oracle's keys and values, which are rounded to float32 first."""
    oracle = Oracle(reads=512, **fields)
    mixer = oracle.mixer(Mesa)
    gates = {"log_decay": 0.0, "write": 1.0, "ridge": oracle.gates["ridge"]}
    rng = np.random.default_rng(0)
    key, pair, value = oracle._writes(1, rng)
    k = torch.from_numpy(key[:, pair[0]])[:, None].float().to(dtype)
    v = torch.from_numpy(rng.standard_normal(k.shape)).float().to(dtype)
    numbers = {
        name: torch.full_like(x, gates[name], dtype=dtype)
        for name, x in mixer.gates(torch.zeros(1, k.shape[2], mixer.d_model)).items()
    }
    with torch.no_grad():
        return getattr(mixer.to(dtype), form)(k, k, v, numbers)[0].double()


NEAR = {"pairs": 512, "keys": "correlated", "cosine": 0.99}


@pytest.mark.parametrize("form", ["parallel", "run_recurrence"])
def test_nearly_dependent_keys_are_refused_where_rounding_decides(form):
    with pytest.raises(ValueError, match="ridge: the keys so far are so nearly dependent .* in float32"):
        answers(torch.float32, form, **NEAR, gates={"ridge": 1e-8})


@pytest.mark.parametrize("form", ["parallel", "run_recurrence"])
@pytest.mark.parametrize(("ridge", "tolerance"), [(1e-4, 2e-3), (1e-5, 8e-3)])
def test_nearly_dependent_keys_in_float32_have_the_accuracy_stated(form, ridge, tolerance):
    reference = answers(torch.float64, "run_recurrence", **NEAR, gates={"ridge": ridge})
    error = answers(torch.float32, form, **NEAR, gates={"ridge": ridge}) - reference
    assert float((error.norm(dim=-1) / reference.norm(dim=-1)).max()) < tolerance


def test_nearly_dependent_keys_in_float64_are_solved():
    reference = answers(torch.float64, "run_recurrence", **NEAR, gates={"ridge": 1e-8})
    error = answers(torch.float64, **NEAR, gates={"ridge": 1e-8}) - reference
    assert float((error.norm(dim=-1) / reference.norm(dim=-1)).max()) < 2e-9


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -2.0])
def test_a_matrix_that_is_not_positive_definite_is_refused(bad):
    H = torch.eye(3).expand(2, 3, 3).clone()
    H[1, 2, 2] = bad
    with pytest.raises(ValueError, match="^ridge: .* not positive definite in float32, or a key or gate is not finite"):
        solve(H, torch.full((2, 3), 0.5), torch.ones(2, 3))
