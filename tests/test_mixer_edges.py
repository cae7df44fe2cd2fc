"""Every mechanism at extreme inputs: empty segments, vectors of zeros, strong decays."""

import math

import pytest
import torch
import torch.nn.functional as F
from mixers import build, close, every_case, every_mechanism, same_state
from torch import Tensor

from recall_lab.contract.mixer import draw, total
from recall_lab.mixer.base import SHORT, l2_normalize
from recall_lab.model import Model


@every_case
@pytest.mark.parametrize("short_conv", [0, 4])
def test_an_empty_segment_has_no_outputs_and_leaves_the_state(name, options, short_conv):
    mixer = build(name, **options, short_conv=short_conv).double()
    x = draw(mixer, 20)
    none = x[:, :0]
    _, state = mixer(x)
    y, same = mixer(none, state)
    assert y.shape == (2, 0, 16)
    assert same_state(same, state, 0)
    y, start = mixer(none)
    assert y.shape == (2, 0, 16)
    assert same_state(start, mixer.initial_state(2), 0)
    token = draw(mixer, 1)
    stepped, expected = mixer.step(token, same), mixer.step(token, state)
    assert torch.equal(stepped[0], expected[0])
    assert same_state(stepped[1], expected[1], 0)


@every_case
@pytest.mark.parametrize("form", ["parallel", "run_recurrence"])
def test_the_forms_of_a_mechanism_take_an_empty_segment(name, options, form):
    mixer = build(name, **options).double()
    q, k, v, gates, _ = mixer.project(draw(mixer, 20))
    _, state = mixer.parallel(q, k, v, gates)
    none = [x[:, :, :0] for x in (q, k, v)]
    o, same = getattr(mixer, form)(*none, {key: gate[:, :, :0] for key, gate in gates.items()}, state)
    assert o.shape == v[:, :, :0].shape
    assert same_state(same, state, 0)


@every_case
def test_effective_attention_of_nothing_and_of_one_position(name, options):
    mixer = build(name, **options)
    if not mixer.linear_in_v:
        pytest.skip("it has no effective attention")
    q, k, v, gates, _ = mixer.project(draw(mixer, 20))
    for length in (0, 1):
        gate = {key: value[:, :, :length] for key, value in gates.items()}
        A = mixer.effective_attention(q[:, :, :length], k[:, :, :length], gate)
        assert A.shape == (2, 2, length, length)
    o, _ = mixer.parallel(q[:, :, :1], k[:, :, :1], v[:, :, :1], gate)
    assert close(A @ v[:, :, :1], o, 1e-5)


def test_a_model_prefills_nothing():
    torch.manual_seed(0)
    model = Model(10, lambda **sizes: build("delta_rule", **sizes), d_model=16, layers=2)
    tokens = torch.arange(6)[None]
    _, states = model.prefill(tokens, model.initial_state())
    logits, same = model.prefill(tokens[:, :0], states)
    assert logits.shape == (1, 0, 10)
    assert all(same_state(x, y, 0) for x, y in zip(same, states, strict=True))


def test_l2_normalize_has_unit_length_and_a_bounded_gradient():
    """Values equal torch's normalize; the gradient is (I − y yᵀ) / max(‖x‖, SHORT), and 0 at x = 0."""
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(l2_normalize(x), F.normalize(x, dim=-1))
    direction = x[0] / x[0].norm()
    for length in (10.0, 1.0, 2 * SHORT, SHORT, SHORT / 2, 1e-9):
        jacobian = torch.autograd.functional.jacobian(l2_normalize, length * direction)
        expected = (torch.eye(8) - direction[:, None] * direction) / max(length, SHORT)
        assert torch.allclose(jacobian, expected, rtol=1e-9, atol=1e-9 / SHORT)
        assert torch.allclose(l2_normalize(length * direction), direction)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        zero = torch.zeros(8, dtype=dtype)
        assert torch.equal(l2_normalize(zero), zero)
        assert not torch.autograd.functional.jacobian(l2_normalize, zero).any()


@every_case
@pytest.mark.parametrize("which", ["q", "k"])
def test_a_zero_query_or_key_has_a_bounded_gradient(name, options, which):
    """A query or key of zeros, as from an embedding of zeros, after the state has been filled."""
    mixer = build(name, **options, qk_norm=True, short_conv=0).double()
    x = draw(mixer, 40)
    projection = getattr(mixer, f"{which}_proj")
    projected = projection(x).detach()
    with_zeros = projected.clone()
    with_zeros[:, 30] = 0
    largest = []
    for value in (projected, with_zeros):
        leaf = value.requires_grad_()
        hook = projection.register_forward_hook(lambda *_, leaf=leaf: leaf)
        total(mixer(x)[0]).backward()
        hook.remove()
        largest.append(float(leaf.grad.abs().max()))
    usual, with_zero = largest
    assert math.isfinite(with_zero)
    assert with_zero <= 100 * usual


@every_mechanism
@pytest.mark.parametrize("strong", [-30.0, -80.0, -1000.0])
def test_strong_decays(name, strong):
    """Strong decays (one tenth of them) and weak ones in the same chunk: float32 is finite and accurate."""
    mixer = build(name, **{"d_key": 8, "qk_norm": True})
    q, k, v, gates, _ = mixer.project(draw(mixer, 100))
    if "log_decay" not in gates:
        pytest.skip("it has no decay")
    generator = torch.Generator().manual_seed(1)
    shape = gates["log_decay"].shape
    g = -0.1 * torch.rand(shape, generator=generator)
    g = torch.where(torch.rand(shape, generator=generator) < 0.1, strong * torch.rand(shape, generator=generator), g)
    assert_right_in_float32(mixer, q, k, v, gates, g)


@pytest.mark.parametrize("name", ["log_linear", "mesa"])
def test_a_log_decay_of_minus_infinity_forgets_everything(name):
    mixer = build(name, **{"d_key": 8, "qk_norm": True})
    q, k, v, gates, _ = mixer.project(draw(mixer, 100))
    g = gates["log_decay"].detach().clone()
    g[:, :, [0, 7, 31, 64, 65, 99]] = -torch.inf
    assert_right_in_float32(mixer, q, k, v, gates, g)


def assert_right_in_float32(mixer, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], g: Tensor) -> None:
    """Outputs, states and gradients of the parallel form in float32 equal those of the recurrence in float64."""
    results = []
    for dtype, form in ((torch.float32, "parallel"), (torch.float64, "run_recurrence")):
        leaf = g.to(dtype, copy=True).requires_grad_()
        given = {key: value.detach().to(dtype) for key, value in gates.items()} | {"log_decay": leaf}
        q_, k_, v_ = (x.detach().to(dtype, copy=True).requires_grad_() for x in (q, k, v))
        o, state = getattr(mixer, form)(q_, k_, v_, given)
        gradients = torch.autograd.grad(total(o, *state.values()), [q_, k_, v_, leaf])
        results.append([o, *state.values(), *gradients])
    for x, reference in zip(*results, strict=True):
        assert torch.isfinite(x).all()
        assert close(x.double(), reference, 2e-5)
