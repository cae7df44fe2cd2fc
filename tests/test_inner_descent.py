"""TTT-Linear: its gradient and its steps against automatic differentiation, and the weights that it starts with."""

import pytest
import torch
from mixers import build, close
from torch import Tensor

from recall_lab.contract.mixer import draw
from recall_lab.mixer.inner_descent import Norm, gradient, layer_norm


def test_the_gradient_is_that_of_the_loss():
    generator = torch.Generator().manual_seed(0)
    z, target = (torch.randn(3, 2, 5, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    norm = Norm(*(torch.randn(2, 1, 6, generator=generator, dtype=torch.float64) for _ in range(2)))
    z.requires_grad_()
    normal = torch.nn.functional.layer_norm(z, (6,), eps=1e-6) * norm.scale + norm.shift
    assert close(layer_norm(z, norm), normal)
    (expected,) = torch.autograd.grad((normal - target).square().sum() / 2, z)
    assert close(gradient(z, target, norm), expected)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_outputs_are_those_of_a_model_trained_by_automatic_differentiation(size):
    """Each token adds its gradient at the start of its mini-batch; the sum is scaled by the share of the position."""
    mixer = build("ttt_linear", heads=1, mini_batch=size).double()
    with torch.no_grad():
        mixer.scale.copy_(torch.linspace(0.5, 1.5, 16))
        mixer.shift.copy_(torch.linspace(-1, 1, 16))
    q, k, v, gates, _ = mixer.project(draw(mixer, 20, batch=1))
    o, state = mixer.parallel(q, k, v, gates)
    q, k, v, rate = (x[0, 0].detach() for x in (q, k, v, gates["rate"]))
    W, c = mixer.first_weight[0].detach(), mixer.first_c[0, 0].detach()

    def model(x: Tensor, W: Tensor, c: Tensor) -> Tensor:
        hidden = torch.nn.functional.layer_norm(x @ W + c, (16,), eps=1e-6)
        return x + hidden * mixer.scale[0, 0].detach() + mixer.shift[0, 0].detach()

    outputs = []
    for t in range(20):
        if t % size == 0:
            W, c = (W_t, c_t) if t else (W, c)
            W.requires_grad_()
            c.requires_grad_()
            sums = [torch.zeros_like(W), torch.zeros_like(c)]
        loss = (model(k[t], W, c) - v[t]).square().sum() / 2
        sums = [x + rate[t] / 16 * d for x, d in zip(sums, torch.autograd.grad(loss, [W, c]), strict=True)]
        share = mixer.shares[t % size].detach()
        W_t, c_t = (x.detach() - share * d for x, d in zip((W, c), sums, strict=True))
        outputs.append(model(q[t], W_t, c_t))
    assert close(o[0, 0], torch.stack(outputs), 1e-9)
    started = (W_t, c_t) if 20 % size == 0 else (W, c)
    assert close(state["W"][0, 0], started[0], 1e-9)
    assert close(state["c"][0, 0, 0], started[1], 1e-9)
    assert state["keys"].shape == (1, 1, 20 % size, 16)


def test_it_starts_as_published():
    mixer = build("ttt_linear", d_model=64, heads=1)
    assert float(mixer.first_weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert not mixer.first_c.any()
    assert torch.equal(mixer.scale, torch.ones(1, 1, 64))
    assert not mixer.shift.any()
    assert mixer.shares[[0, 1, 15]].tolist() == [1, 0.5, 0.0625]
    assert float(mixer.rate_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.3)
    assert mixer.gates(torch.zeros(1, 1, 64))["rate"].tolist() == [[[0.5]]]
    first = mixer.initial_state(3)
    assert torch.equal(first["W"], mixer.first_weight.expand(3, -1, -1, -1))


def test_a_share_below_zero_is_none():
    """Such a position reads the model of the start of its mini-batch."""
    mixer = build("ttt_linear", short_conv=0).double()
    q, k, v, gates, _ = mixer.project(draw(mixer, 10))
    with torch.no_grad():
        mixer.shares.fill_(-1)
    norm = Norm(mixer.scale, mixer.shift)
    assert close(mixer.parallel(q, k, v, gates)[0], q + layer_norm(q @ mixer.first_weight + mixer.first_c, norm))
