"""path_attn and deltaformer: what they cache changes with later tokens, or depends on earlier ones."""

import math

import pytest
import torch
from mixers import build, close
from torch import Tensor

from recall_lab.mixer.base import Mixer
from recall_lab.mixer.deltaformer import DeltaFormer
from recall_lab.mixer.forgetting import Forgetting
from recall_lab.mixer.path_attn import PathAttn
from recall_lab.mixer.softmax import Softmax

N = 70
"""Positions: more than one block."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(length: int = N) -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, 2, length, 4, seed=1), normal(2, 2, length, 4, seed=2), normal(2, 2, length, 3, seed=3)


def path_gates(length: int = N) -> dict[str, Tensor]:
    w = normal(2, 2, length, 4, seed=4)
    return {"path": w / w.norm(dim=-1, keepdim=True), "beta": 2 * torch.sigmoid(normal(2, 2, length, seed=5))}


def forms(mixer: Mixer, *given) -> list[tuple[Tensor, dict[str, Tensor]]]:
    return [mixer.parallel(*given), mixer.run_recurrence(*given)]


def test_path_without_reflections_is_softmax_and_with_a_gate_forgetting():
    q, k, v = qkv()
    none = {"path": path_gates()["path"], "beta": torch.zeros(2, 2, N).double()}
    expected, _ = Softmax(d_model=8, heads=2).parallel(q, k, v, {})
    assert all(close(o, expected, 1e-12) for o, _ in forms(PathAttn(d_model=8, heads=2), q, k, v, none))
    g = normal(2, 2, N, seed=6).abs().neg()
    expected, _ = Forgetting(d_model=8, heads=2).parallel(q, k, v, {"log_forget": g / 2})  # √d_key = 2
    mixer = PathAttn(d_model=8, heads=2, forget=True)
    assert all(close(o, expected, 1e-12) for o, _ in forms(mixer, q, k, v, none | {"log_forget": g}))


def test_the_keys_of_path_are_reflected_by_every_later_token():
    q, k, v = qkv()
    gates = path_gates()
    keys = torch.zeros(2, 2, 0, 4).double()
    for t in range(N):
        w, beta = gates["path"][:, :, t, :, None], gates["beta"][:, :, t, None, None]
        P = torch.eye(4).double() - beta * w @ w.mT
        keys = torch.cat([keys @ P, k[:, :, t : t + 1]], dim=2)
    for o, state in forms(PathAttn(d_model=8, heads=2), q, k, v, gates):
        assert close(state["k"], keys, 1e-12)
        weights = torch.softmax((q[:, :, -1:] @ keys.mT) / 2, dim=-1)
        assert close(o[:, :, -1:], weights @ v, 1e-12)


def test_a_reflection_that_is_repeated_is_undone():
    """With β = 2 and one w for all tokens, logits alternate between q·k and q·(I − 2 w wᵀ) k with the distance."""
    q, k, v = qkv()
    w = path_gates()["path"][:, :, :1]
    even, odd = q @ k.mT, q @ (k - 2 * (k @ w.mT) @ w).mT
    distance = torch.arange(N)[:, None] - torch.arange(N)
    logits = torch.where(distance % 2 == 0, even, odd).masked_fill(distance < 0, -torch.inf)
    gates = {"path": w.expand(-1, -1, N, -1), "beta": torch.full((2, 2, N), 2.0).double()}
    for o, _ in forms(PathAttn(d_model=8, heads=2), q, k, v, gates):
        assert close(o, torch.softmax(logits / 2, dim=-1) @ v, 1e-12)


def test_a_forget_gate_of_minus_infinity_leaves_no_weight_on_earlier_tokens():
    q, k, _ = qkv()
    g = normal(2, 2, N, seed=6).abs().neg()
    g[..., [0, 9, 64]] = -torch.inf
    g.requires_grad_()
    mixer = PathAttn(d_model=8, heads=2, forget=True)
    for o, state in forms(mixer, q, k, torch.eye(N).double().expand(2, 2, N, N), path_gates() | {"log_forget": g}):
        assert not o[:, :, 9:64, :9].any()
        assert not o[:, :, 64:, :64].any()
        assert o.sum(-1).allclose(torch.ones(()).double())
        assert all(part.isfinite().all() for part in state.values())
        assert torch.autograd.grad(o.square().sum(), g)[0].isfinite().all()


def test_the_reflections_start_with_unit_vectors_and_beta_between_zero_and_two():
    with torch.no_grad():
        gates = build("path_attn", forget=True).gates(
            torch.randn(3, 50, 16, generator=torch.Generator().manual_seed(0))
        )
    assert torch.allclose(gates["path"].norm(dim=-1), torch.ones(()))
    assert 0 < float(gates["beta"].min()) < float(gates["beta"].max()) < 2
    assert float(gates["beta"].mean()) == pytest.approx(1, abs=0.2)
    assert (gates["log_forget"] < 0).all()
    assert build("path_attn").fixed_gates == {"log_forget"}


def deltaformer(q: Tensor, x: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """o and u of one head by its definition, position by position."""
    scale, u, o = 1 / math.sqrt(q.shape[1]), [v[0]], [v[0]]
    for t in range(1, len(q)):
        u.append(v[t] - beta[t] * (torch.softmax(scale * k[:t] @ x[t], dim=0) @ torch.stack(u)))
        o.append(torch.softmax(scale * k[: t + 1] @ q[t], dim=0) @ torch.stack(u))
    return torch.stack(o), torch.stack(u)


@pytest.mark.parametrize("lookup", ["query", "key"])
def test_deltaformer_equals_its_definition(lookup):
    """Outputs, the values kept, and gradients."""
    given = [x.requires_grad_() for x in (*qkv(), torch.sigmoid(normal(2, 2, N, seed=5)))]
    q, k, v, beta = given
    x = q if lookup == "query" else k
    heads = [deltaformer(q[b, h], x[b, h], k[b, h], v[b, h], beta[b, h]) for b in range(2) for h in range(2)]
    expected, kept = (torch.stack(part).unflatten(0, (2, 2)) for part in zip(*heads, strict=True))
    gradient = torch.autograd.grad(expected.sin().sum(), given)
    for o, state in forms(DeltaFormer(d_model=8, heads=2, lookup=lookup), q, k, v, {"beta": beta}):
        assert close(o, expected, 1e-12)
        assert close(state["v"], kept, 1e-12)
        grads = torch.autograd.grad(o.sin().sum(), given)
        assert all(close(one, other, 1e-10) for one, other in zip(grads, gradient, strict=True))


def test_deltaformer_without_removal_is_softmax():
    q, k, v = qkv()
    expected, _ = Softmax(d_model=8, heads=2).parallel(q, k, v, {})
    for o, _ in forms(DeltaFormer(d_model=8, heads=2), q, k, v, {"beta": torch.zeros(2, 2, N).double()}):
        assert close(o, expected, 1e-12)


@pytest.mark.parametrize("lookup", ["query", "key"])
def test_a_second_write_replaces_the_first(lookup):
    """With β = 1 and logits so large that a key finds only itself; the query finds both writes, which add up to one."""
    k = torch.eye(8).double()[None, None, [0, 1, 2, 0, 3]] * 50
    v = normal(1, 1, 5, 3)
    mixer = DeltaFormer(d_model=8, lookup=lookup)
    o, state = mixer.parallel(k, k, v, {"beta": torch.tensor([[[0.0, 0, 0, 1, 0]]]).double()})
    assert close(state["v"][:, :, 3], v[:, :, 3] - v[:, :, 0], 1e-12)
    assert close(o[:, :, 3], v[:, :, 3] / 2, 1e-12)
