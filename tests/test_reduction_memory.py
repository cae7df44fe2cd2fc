"""Mechanisms with a matrix or vector state in special cases: equal to another mechanism, or with a known answer."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recall_lab.mixer.based import Based
from recall_lab.mixer.delta_rule import DeltaRule
from recall_lab.mixer.gated_delta import GatedDelta
from recall_lab.mixer.gated_linear import GatedLinear
from recall_lab.mixer.gla import GLA
from recall_lab.mixer.kda import KDA
from recall_lab.mixer.linear import Linear
from recall_lab.mixer.log_linear import LogLinear
from recall_lab.mixer.lstm import LSTM
from recall_lab.mixer.mamba2 import Mamba2
from recall_lab.mixer.matrix_memory import Update, chunked, step
from recall_lab.mixer.mesa import Mesa
from recall_lab.mixer.rnn import RNN
from recall_lab.mixer.rwkv7 import RWKV7
from recall_lab.mixer.softmax import Softmax

properties = settings(deadline=None, max_examples=15, derandomize=True)
seeds, lengths = st.integers(0, 2**31), st.integers(1, 80)


class Draw:
    """Random q, k, v (unit q and k) and gates of one batch with two heads, float64."""

    def __init__(self, seed: int, length: int, d_key: int = 5, d_value: int = 3) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.shape = (1, 2, length)
        self.q, self.k = (F.normalize(self.normal(d_key), dim=-1) for _ in range(2))
        self.v = self.normal(d_value)
        self.g, self.beta = -self.uniform(), self.uniform()
        self.one, self.zero = torch.ones_like(self.g), torch.zeros_like(self.g)
        self.S = torch.randn(1, 2, d_key, d_value, generator=self.generator, dtype=torch.float64)

    def normal(self, *width: int) -> Tensor:
        return torch.randn(*self.shape, *width, generator=self.generator, dtype=torch.float64)

    def uniform(self, *width: int) -> Tensor:
        return torch.rand(*self.shape, *width, generator=self.generator, dtype=torch.float64)

    def run(self, kind: type, gates: dict[str, Tensor], state_name: str | None = "S", **options) -> tuple[Tensor, ...]:
        mixer = kind(d_model=2, heads=2, d_key=self.q.shape[-1], d_value=self.v.shape[-1], **options).double()
        o, state = mixer.parallel(self.q, self.k, self.v, gates, {state_name: self.S} if state_name else None)
        return o, *state.values()


def same(x: tuple[Tensor, ...], y: tuple[Tensor, ...], tolerance: float = 1e-10) -> bool:
    return len(x) == len(y) and all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(x, y, strict=True)
    )


@properties
@given(seed=seeds, length=lengths)
def test_gates_of_one_have_no_effect(seed, length):
    x = Draw(seed, length)
    channels = torch.zeros_like(x.k)
    linear, delta = x.run(Linear, {}), x.run(DeltaRule, {"beta": x.beta})
    assert same(x.run(GatedLinear, {"log_decay": x.zero, "write": x.one}), linear)
    assert same(x.run(GLA, {"log_decay": channels}), linear)
    assert same(x.run(GatedDelta, {"log_decay": x.zero, "beta": x.beta}), delta)
    assert same(x.run(KDA, {"log_decay": channels, "beta": x.beta}), delta)


@properties
@given(seed=seeds, length=lengths)
def test_equal_channels_are_one_decay(seed, length):
    x = Draw(seed, length)
    channels = x.g[..., None].expand_as(x.k)
    assert same(x.run(GLA, {"log_decay": channels}), x.run(GatedLinear, {"log_decay": x.g}))
    gated = x.run(GatedDelta, {"log_decay": x.g, "beta": x.beta})
    assert same(x.run(KDA, {"log_decay": channels, "beta": x.beta}), gated)


@properties
@given(seed=seeds, length=lengths)
def test_a_write_of_zero_leaves_the_state(seed, length):
    x = Draw(seed, length)
    for kind, gates in (
        (GatedLinear, {"write": x.zero}),
        (DeltaRule, {"beta": x.zero}),
        (GatedDelta, {"log_decay": x.zero, "beta": x.zero}),
        (KDA, {"log_decay": torch.zeros_like(x.k), "beta": x.zero}),
        (Mamba2, {"log_decay": x.zero, "write": x.zero, "skip": x.zero}),
    ):
        _, S = x.run(kind, gates)
        assert torch.equal(S, x.S), kind
    _, S = x.run(GatedDelta, {"log_decay": x.g, "beta": x.zero})
    assert torch.allclose(S, x.S * x.g.sum(-1).exp()[..., None, None])


@properties
@given(seed=seeds, length=lengths)
def test_mamba2_is_gated_linear_with_its_scale_and_a_skip(seed, length):
    x = Draw(seed, length)
    o, S = x.run(Mamba2, {"log_decay": x.g, "write": x.beta, "skip": 0.5 * x.one})
    scaled, state = x.run(GatedLinear, {"log_decay": x.g, "write": x.beta})
    assert same((o, S), (scaled * math.sqrt(5) + 0.5 * x.v, state))


@properties
@given(seed=seeds, length=lengths)
def test_rwkv7_with_equal_decays_and_full_erasure_is_a_delta_rule(seed, length):
    """a = 1, κ = k, k̃ = k give S' − κ κᵀS + k vᵀ with S before the decay: without decay, the delta rule with β = 1."""
    x = Draw(seed, length)
    gates = {"log_decay": torch.zeros_like(x.k), "a": torch.ones_like(x.k)}
    o, S = x.run(RWKV7, gates)
    delta, state = x.run(DeltaRule, {"beta": x.one})
    assert same((o, S), (delta * math.sqrt(5), state))


@properties
@given(seed=seeds, length=lengths, channels=st.booleans())
def test_reading_before_the_decay(seed, length, channels):
    """The same as reading the decayed state with the decay taken out of the key."""
    x = Draw(seed, length)
    g = x.g[..., None].expand_as(x.k) * x.uniform(5) if channels else x.g
    a, b = 0.5 * x.normal(5), 0.5 * x.normal(5)
    undone = a * (-(g if channels else g[..., None])).exp()
    first = chunked(x.q, Update(x.k, x.v, g, a, b, reads_before_decay=True), x.S)
    second = chunked(x.q, Update(x.k, x.v, g, undone, b), x.S)
    assert same(first, second, 1e-8)


@properties
@given(seed=seeds, beta=st.floats(0, 2))
def test_the_delta_rule_is_a_step_of_gradient_descent(seed, beta):
    """A step on ½‖Sᵀk − v‖² with learning rate β; gated delta starts from the decayed state."""
    x = Draw(seed, 1)
    for decay in (x.zero, x.g):
        start = (x.S * decay.exp()[..., None]).requires_grad_()
        loss = 0.5 * (x.k @ start - x.v).square().sum()
        (gradient,) = torch.autograd.grad(loss, start)
        _, S = x.run(GatedDelta, {"log_decay": decay, "beta": beta * x.one})
        assert torch.allclose(S, start - beta * gradient)


@properties
@given(seed=seeds)
def test_delta_and_mesa_answer_orthogonal_keys_exactly(seed):
    """For a key with several values, the delta rule (β = 1) answers the last one; linear attention adds them up."""
    x = Draw(seed, 10, d_key=5)
    x.k = torch.eye(5, dtype=torch.float64).repeat(2, 1).expand(1, 2, 10, 5)
    x.q, last = x.k[:, :, 5:], x.v[:, :, 5:]
    update = Update(x.k, x.v, erase_read=-x.k)
    _, delta = chunked(x.q.new_zeros(1, 2, 10, 5), update, torch.zeros_like(x.S))
    _, linear = chunked(x.q.new_zeros(1, 2, 10, 5), Update(x.k, x.v), torch.zeros_like(x.S))
    assert torch.allclose(x.q @ delta, last)
    assert torch.allclose(x.q @ linear, last + x.v[:, :, :5])
    x.k, x.v = x.k[:, :, :5], last
    ridge = torch.full_like(x.k, 1e-9)
    o, *_ = x.run(Mesa, {"log_decay": x.zero[..., :5], "write": x.one[..., :5], "ridge": ridge}, state_name=None)
    assert torch.allclose(o.diagonal(dim1=-2, dim2=-1)[..., -1], last.diagonal(dim1=-2, dim2=-1)[..., -1])


@properties
@given(seed=seeds)
def test_mesa_with_one_pair(seed):
    """(β k kᵀ + Λ)⁻¹ by Sherman and Morrison: o = β c / (1 + β κ) v with c = kᵀΛ⁻¹q and κ = kᵀΛ⁻¹k."""
    x = Draw(seed, 1)
    ridge = 0.25 + x.uniform(5)
    c, kappa = ((x.k * y / ridge).sum(-1) for y in (x.q, x.k))
    o, *_ = x.run(Mesa, {"log_decay": x.g, "write": x.beta, "ridge": ridge}, state_name=None)
    assert torch.allclose(o, (x.beta * c / (1 + x.beta * kappa))[..., None] * x.v)


@properties
@given(seed=seeds, length=st.integers(1, 40))
def test_mesa_minimises_the_weighted_squares(seed, length):
    """At Wᵀ = S ᵀ(H + Λ)⁻¹ the gradient of the weighted squares with their ridge is zero."""
    x = Draw(seed, length)
    ridge = (0.25 + torch.rand(5, generator=x.generator, dtype=torch.float64)).expand_as(x.k)
    _, H, S = x.run(Mesa, {"log_decay": x.g, "write": x.beta, "ridge": ridge}, state_name=None)
    W = torch.linalg.solve(H + torch.diag_embed(ridge[:, :, 0]), S).requires_grad_()
    age = (x.g.flip(-1).cumsum(-1).flip(-1) - x.g).exp()
    loss = ((age * x.beta)[..., None] * (x.k @ W - x.v).square()).sum() + (ridge[:, :, 0, :, None] * W.square()).sum()
    (gradient,) = torch.autograd.grad(loss, W)
    assert gradient.abs().max() < 1e-9


@properties
@given(seed=seeds, length=lengths)
def test_log_linear_with_equal_levels_is_gated_linear(seed, length):
    x = Draw(seed, length)
    x.S = torch.zeros_like(x.S)
    o, *levels = x.run(LogLinear, {"log_decay": x.g, "level": x.one[..., None].expand(-1, -1, -1, 8)}, state_name=None)
    gated, S = x.run(GatedLinear, {"log_decay": x.g})
    assert same((o, sum(levels)), (gated * math.sqrt(5), S))
    assert len(levels) == (length - 1).bit_count() + 1


@properties
@given(seed=seeds, length=lengths, extra=st.integers(0, 3))
def test_based_with_a_window_over_everything_is_softmax(seed, length, extra):
    x = Draw(seed, length)
    x.q = 3 * x.q  # far from where the Taylor series would be accurate
    o, *_ = x.run(Based, {}, state_name=None, window=length + extra)
    exact, *_ = x.run(Softmax, {}, state_name=None)
    assert torch.allclose(o, exact, rtol=1e-3, atol=1e-3)  # the denominator has an extra 1e−6
    series, *_ = x.run(Based, {}, state_name=None, window=0)
    linear, *_ = x.run(Linear, {}, state_name=None, feature_map="taylor", normalizer=True)
    assert torch.allclose(series, linear, atol=1e-5)


@properties
@given(seed=seeds, length=lengths, window=st.integers(1, 12))
def test_based_weighs_its_window_exactly(seed, length, window):
    """Versus explicit weights: e^z for the last `window` tokens, 1 + z + z²/2 for earlier ones."""
    x = Draw(seed, length)
    z = 4 * x.q @ x.k.mT / math.sqrt(5)
    age = torch.arange(length)[:, None] - torch.arange(length)
    weight = torch.where(age < window, z.exp(), 1 + z + z.square() / 2).tril()
    x.q = 4 * x.q
    o, *_ = x.run(Based, {}, state_name=None, window=window)
    assert torch.allclose(o, weight @ x.v / (weight.sum(-1, keepdim=True) + 1e-6), atol=1e-9)


@pytest.mark.parametrize("name", ["elu+1", "softplus", "taylor", "hedgehog", "dpfp", "relu"])
def test_normalised_weights_add_up_to_one(name):
    x = Draw(0, 50, d_key=32)
    mixer = Linear(d_model=64, heads=2, feature_map=name, normalizer=True).double()
    A = mixer.effective_attention(x.q, x.k, {})
    assert torch.allclose(A.sum(-1), torch.ones(1, 2, 50, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize(("kind", "reference"), [(RNN, torch.nn.RNN), (LSTM, torch.nn.LSTM)])
def test_vector_states_equal_those_of_torch(kind, reference):
    mixer = kind(d_model=8).double()
    mixer.bias.data += torch.randn_like(mixer.bias)
    theirs = reference(24, 8, batch_first=True).double()
    theirs.weight_ih_l0.data, theirs.weight_hh_l0.data = mixer.input_weight[0].data.mT, mixer.hidden_weight[0].data.mT
    theirs.bias_ih_l0.data, theirs.bias_hh_l0.data = mixer.bias[0, 0].data, torch.zeros(len(mixer.bias[0, 0])).double()
    q, k, v = torch.randn(3, 2, 1, 30, 8, dtype=torch.float64)
    o, state = mixer.parallel(q, k, v, {})
    expected, last = theirs(torch.cat([q, k, v], dim=-1)[:, 0])
    assert torch.allclose(o[:, 0], expected)
    for mine, other in zip(state.values(), last if isinstance(last, tuple) else (last,), strict=True):
        assert torch.allclose(mine[:, 0, 0], other[0])


def test_beta_reaches_two_only_where_allowed():
    for kind in (DeltaRule, GatedDelta):
        for allowed, most in ((False, 1), (True, 2)):
            mixer = kind(d_model=4, allow_neg_eigval=allowed)
            mixer.b_proj.weight.data.fill_(100)
            assert mixer.gates(torch.ones(1, 1, 4))["beta"].item() == most


def initial_values(mixer) -> dict[str, tuple[Tensor, float, float]]:
    """The initial values of a mechanism that matter for recall: name → tensor, smallest, largest value."""
    values = {}
    if hasattr(mixer, "decay") and isinstance(mixer.decay, torch.nn.Module):
        values["A"] = (mixer.decay.A_log.exp(), 0, 16)
        values["dt"] = (F.softplus(mixer.decay.dt_bias), 0.99e-3, 0.101)
    if isinstance(mixer, Mamba2):
        values["D"] = (mixer.D, 1, 1)
    if isinstance(mixer, Mesa):
        values["ridge"] = (F.softplus(mixer.ridge) + 0.25, 0.999, 1.001)
    if isinstance(mixer, LogLinear):
        values["level"] = (F.softplus(mixer.level_proj.bias), 0.999, 1.001)
    if isinstance(mixer, RWKV7):
        values["w"] = (mixer.w_proj.bias, -6.5, -1.5)
    if isinstance(mixer, LSTM):
        values["forget"] = (mixer.bias[..., 16:32], 1, 1)
    return values


@pytest.mark.parametrize("kind", [GatedDelta, KDA, LSTM, LogLinear, Mamba2, Mesa, RWKV7])
def test_special_initial_values(kind):
    torch.manual_seed(0)
    values = initial_values(kind(d_model=32, heads=2))
    assert values
    for name, (tensor, least, most) in values.items():
        assert (tensor >= least).all(), name
        assert (tensor <= most).all(), name


def test_a_state_that_keeps_nothing_or_everything():
    """Over two chunks of forgetting everything, and over one step without decay."""
    x = Draw(3, 70)
    _, S = chunked(x.q, Update(x.k, x.v, torch.full_like(x.g, -torch.inf)), x.S)
    assert torch.allclose(S, x.k[:, :, -1:].mT @ x.v[:, :, -1:])
    o, S = step(x.q[:, :, :1], Update(x.k[:, :, :1], x.v[:, :, :1]), x.S)
    assert torch.equal(S, x.S + x.k[:, :, :1].mT @ x.v[:, :, :1])
    assert torch.equal(o, x.q[:, :, :1] @ S)
