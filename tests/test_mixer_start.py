"""The weights that mechanisms start with, and the options that their constructors refuse."""

import pytest
import torch
import torch.nn.functional as F
from mixers import build, every_mechanism

from recall_lab.mixer.decay import MambaDecay
from recall_lab.mixer.feature_map import Hedgehog
from recall_lab.mixer.short_conv import ShortConv


@every_mechanism
def test_projections_have_no_bias_and_lengths_start_at_what_is_neutral(name):
    d_value = 4 if name == "ttt_linear" else 6  # its values are as wide as its keys
    mixer = build(name, d_key=4, d_value=d_value, qk_norm=True, output_gate=True, output_norm=True)
    shapes = {part: tuple(getattr(mixer, f"{part}_proj").weight.shape) for part in "qkvog"}
    n, v = mixer.pairs, 2 * d_value
    assert n == (2 if name == "gated_delta_product" else 1)
    assert shapes == {"q": (8, 16), "k": (n * 8, 16), "v": (n * v, 16), "o": (16, v), "g": (v, 16)}
    assert all(getattr(mixer, f"{part}_proj").bias is None for part in "qkvog")
    length = 2.0 if name == "mesa" else 4.0  # a query is divided by √d_key = 2, except in mesa
    assert mixer.q_length.tolist() == [length, length]
    assert mixer.norm.weight.shape == (d_value,)
    assert mixer.norm.eps == 1e-5


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta", "kda", "mesa", "comba", "gated_delta_product"])
def test_the_projection_of_beta_has_no_bias(name):
    assert build(name).b_proj.bias is None
    assert build(name).b_proj.weight.shape == (2 * build(name).pairs, 16)


def test_mamba_decay_starts_at_the_published_values():
    """A uniform in (0, 16), Δ log-uniform in [.001, .1]: means 8 and ln .01."""
    torch.manual_seed(0)
    decay = MambaDecay(2, heads=4000, width=3)
    a, dt = decay.A_log.detach().exp(), F.softplus(decay.dt_bias.detach().double())
    assert (a.shape, dt.shape, decay.a_proj.weight.shape) == ((4000,), (12000,), (12000, 2))
    assert decay.a_proj.bias is None
    assert 0 < float(a.min()) < 0.1
    assert 15.9 < float(a.max()) <= 16
    assert float(a.mean()) == pytest.approx(8, abs=0.3)
    assert 0.999e-3 < float(dt.min()) < 1.01e-3
    assert 0.099 < float(dt.max()) < 0.1001
    assert float(dt.log().mean()) == pytest.approx(-4.605, abs=0.05)
    g, made = decay(torch.zeros(1, 5, 2))
    assert g.shape == made.shape == (1, 4000, 5, 3)
    torch.testing.assert_close(g, -a[:, None, None].expand_as(made) * made)
    g, made = MambaDecay(2, heads=3)(torch.zeros(1, 5, 2))
    assert g.shape == made.shape == (1, 3, 5)


def test_starting_values_of_gates():
    torch.manual_seed(0)
    mesa, rwkv7, mamba2 = build("mesa", d_key=4), build("rwkv7", d_key=4), build("mamba2")
    torch.testing.assert_close(F.softplus(mesa.ridge) + 0.25, torch.ones(2, 4))
    assert rwkv7.w_proj.bias[[0, -1]].tolist() == [-6.5, -1.5]
    assert rwkv7.w_proj.bias.diff().detach().numpy() == pytest.approx(5 / 7, rel=1e-5)
    assert not rwkv7.a_proj.bias.any()
    assert torch.equal(rwkv7.xi, torch.full((8,), 0.71))
    assert torch.equal(rwkv7.alpha, torch.full((8,), 1.02))
    assert mamba2.D.tolist() == [1, 1]
    gsa = build("gsa", d_key=4)
    assert gsa.f_proj.weight.shape == (8, 16)
    assert gsa.f_proj.bias is None
    torch.testing.assert_close(
        gsa.gates(torch.zeros(1, 1, 16))["log_decay"].exp(), torch.full((1, 2, 1, 4), 0.5**0.125)
    )
    comba = build("comba")
    assert torch.sigmoid(comba.b).tolist() == pytest.approx([0.7310586] * 2)
    assert comba.D.tolist() == [1, 1]
    assert build("comba", correction=0.02).D.tolist() == pytest.approx([0.02] * 2)
    assert build("softmax", learned_sink=True).sink_bias.tolist() == [0, 0]
    level = build("log_linear", levels=3).level_proj.bias
    torch.testing.assert_close(F.softplus(level), torch.ones(6), rtol=0, atol=1e-4)


def test_recurrent_weights_are_uniform_within_one_over_the_root_of_their_inputs():
    """d_key = 8 and d_value = 32: an input has 2·8 + 32 = 48 channels, a state 32."""
    torch.manual_seed(0)
    lstm, rnn = (build(name, d_key=8, d_value=32) for name in ("lstm", "rnn"))
    for parameter, inputs in ((lstm.input_weight, 48), (lstm.hidden_weight, 32), (rnn.input_weight, 48)):
        weight = parameter.detach()
        assert weight.shape[1] == inputs
        limit = inputs**-0.5
        assert 0.99 * limit < float(weight.max()) <= limit
        assert -limit <= float(weight.min()) < -0.99 * limit
        assert float(weight.std()) == pytest.approx(limit / 3**0.5, rel=0.05)
    gates = lstm.bias.detach().unflatten(-1, (4, 32))
    assert gates.mean(-1).tolist() == [[[0, 1, 0, 0]]] * 2  # the forget gate is open
    assert lstm.hidden_weight.shape == (2, 32, 128)
    assert rnn.bias.shape == (2, 1, 32)
    assert not rnn.bias.any()
    squared = rnn.hidden_weight @ rnn.hidden_weight.mT
    torch.testing.assert_close(squared, torch.eye(32).expand(2, -1, -1), rtol=0, atol=1e-5)


def test_a_convolution_starts_uniform_and_hedgehog_as_the_identity():
    torch.manual_seed(0)
    weight = ShortConv(3000, 4).weight.detach()
    assert weight.shape == (3000, 1, 4)
    assert -0.5 <= float(weight.min()) < -0.499
    assert 0.499 < float(weight.max()) <= 0.5
    hedgehog = Hedgehog(3).linear
    assert torch.equal(hedgehog.weight, torch.eye(3))
    assert not hedgehog.bias.any()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("linear", {"d_model": 0}, "d_model=0: must be a whole number of at least 1"),
        ("linear", {"d_model": 15}, "d_model=15 is not divisible by heads=2"),
        ("gated_linear", {"decay": 0.0}, "decay=0.0: must be a number above 0"),
        ("gated_linear", {"decay": 1.1}, "decay=1.1: must be at most 1"),
        ("gated_linear", {"decay": "none"}, "decay='none'"),
        ("gated_linear", {"write": "none"}, "write='none'"),
        (
            "linear",
            {"normalizer": True, "feature_map": "identity"},
            "feature_map=identity: must be a positive map where normalizer=true",
        ),
        ("paged", {"budget": 10, "page": 4}, "page=4: must divide budget=10"),
        ("sink_window", {"budget": 4, "sinks": 4}, "sinks=4: must be less than budget=4"),
        ("sink_window", {"sinks": -1}, "sinks=-1: must be a whole number of at least 0"),
        ("window", {"budget": 0}, "budget=0: must be a whole number of at least 1"),
        ("heavy_hitter", {"budget": 2}, "budget=2: must be a whole number of at least 3"),
        ("based", {"window": -1}, "window=-1: must be a whole number of at least 0"),
        ("log_linear", {"levels": 0}, "levels=0: must be a whole number of at least 1"),
        ("hgrn2", {"lower_bound": -0.1}, "lower_bound=-0.1: must be a number of at least 0"),
        ("gated_delta_product", {"householders": 0}, "householders=0: must be a whole number of at least 1"),
        ("ttt_linear", {"mini_batch": 0}, "mini_batch=0: must be a whole number of at least 1"),
        ("ttt_linear", {"d_key": 4}, "d_value=8: must equal d_key=4 in ttt_linear"),
        ("gsa", {"slots": 0}, "slots=0: must be a whole number of at least 1"),
        ("comba", {"correction": True}, "correction=True: must be a number"),
        ("hgrn2", {"lower_bound": 1}, "lower_bound=1: must be below 1"),
    ],
)
def test_impossible_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gated_linear", {"decay": 0.01, "write": -0.5}),
        ("gated_linear", {"decay": 1}),
        ("sink_window", {"budget": 4, "sinks": 3}),
        ("sink_window", {"sinks": 0}),
        ("window", {"budget": 1}),
        ("heavy_hitter", {"budget": 3}),
        ("based", {"window": 0}),
        ("log_linear", {"levels": 1}),
        ("hgrn2", {"lower_bound": 0.999}),
    ],
)
def test_options_at_their_limits_are_possible(name, options):
    assert all(getattr(build(name, **options), key) == value for key, value in options.items())


def test_learned_gates_have_a_projection_and_fixed_ones_have_none():
    learned, fixed = build("gated_linear", decay="learned", write="learned"), build("gated_linear", decay=0.9, write=1)
    assert learned.decay_proj.weight.shape == learned.write_proj.weight.shape == (2, 16)
    assert fixed.decay_proj is fixed.write_proj is None
    assert build("softmax", learned_sink=False).sink_bias is None
    assert build("softmax", short_conv=0).conv is None
    assert build("softmax", short_conv=3, d_key=4, d_value=6).conv.weight.shape == (28, 1, 3)


@pytest.mark.parametrize(
    ("name", "option"),
    [("delta_rule", "allow_neg_eigval"), ("gated_delta", "allow_neg_eigval"),
     ("gated_delta_product", "allow_neg_eigval"), ("gated_delta_product", "gated"), ("linear", "normalizer"),
     ("softmax", "learned_sink")]
)  # fmt: skip
def test_one_is_no_flag(name, option):
    mixer = build(name)
    setattr(mixer, option, 1)
    with pytest.raises(ValueError, match=f"^{option}=1: must be"):
        type(mixer).__post_init__(mixer)
