"""Neutral gates: the properties that those of every mechanism must have, and what is refused."""

from dataclasses import dataclass

import pytest
import torch
from conftest import CONF, config
from hydra.utils import instantiate

from recall_lab.mixer.base import Mixer
from recall_lab.mixer.gated_delta import GatedDelta
from recall_lab.mixer.gated_linear import GatedLinear
from recall_lab.mixer.matrix_memory import MatrixMemory, Update
from recall_lab.mixer.mesa import Mesa
from recall_lab.mixer.neutral import (
    answers_one_pair,
    keeps_first_pair,
    number_gates,
    reads_unmapped_keys,
)
from recall_lab.mixer.softmax import Softmax

FILES = sorted(path.relative_to(CONF / "mixer").with_suffix("").as_posix() for path in (CONF / "mixer").rglob("*.yaml"))
MECHANISMS = [name for name in FILES if name not in ("hybrid", "module")]
WITHOUT_NEUTRAL = {"rnn", "lstm", "ttt_linear", "stickbreaking_attn"}
"""Mechanisms that cannot write a pair completely and leave the others, and one that reads earlier tokens only."""
UNMAPPED = {
    "linear", "gated_linear", "gla", "mamba2", "delta_rule", "gated_delta", "kda", "rwkv7", "mesa", "log_linear",
    "hgrn2", "comba", "gated_delta_product",
}  # fmt: skip


def build(name: str, **options) -> Mixer:
    torch.manual_seed(0)
    return instantiate(config(f"mixer={name}").mixer)(**{"d_model": 16, "d_key": 16, "short_conv": 0} | options)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", [name for name in MECHANISMS if name not in WITHOUT_NEUTRAL])
def test_one_pair_is_answered_and_the_first_of_several_is_kept(name, heads):
    mixer = build(name, heads=heads)
    assert answers_one_pair(mixer, mixer.neutral_gates) >= 0.999
    assert reads_unmapped_keys(mixer, mixer.neutral_gates) == (name.partition("/")[0] in UNMAPPED)
    if name.partition("/")[0] in UNMAPPED:
        assert keeps_first_pair(mixer, mixer.neutral_gates, 16) >= 0.999


@pytest.mark.parametrize("name", sorted(WITHOUT_NEUTRAL))
def test_the_others_have_no_neutral_gates(name):
    mixer = build(name)
    assert answers_one_pair(mixer, mixer.neutral_gates) < 0.999


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_declared_name_exists(name):
    """Neutral and fixed gates are gates, gate options are options, exempt parameters are parameters."""
    mixer = build(name)
    gates = set(mixer.gates(torch.zeros(1, 1, 16)))
    if name not in WITHOUT_NEUTRAL:
        assert gates == (set(mixer.neutral_gates) | mixer.fixed_gates) & gates
    assert set(mixer.neutral_gates) <= gates | mixer.fixed_gates
    assert all(hasattr(mixer, option) for option in mixer.gate_options)
    assert set(mixer.no_weight_decay) <= dict(mixer.named_parameters(recurse=False)).keys()


@pytest.mark.parametrize("name", MECHANISMS)
def test_gate_options_have_no_effect_on_gates_given_as_numbers(name):
    mixer = build(name)
    others = {"levels": 3, "lower_bound": 0.5, "correction": 0.5, "householders": 3}
    others["allow_neg_eigval"] = not getattr(mixer, "allow_neg_eigval", False)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, 40, 16, generator=generator) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    for option in mixer.gate_options:
        other = build(name, **{option: others[option]})
        outputs = [m.parallel(q, k, v, number_gates(m, torch.randn(2, 40, 16), {}))[0] for m in (mixer, other)]
        assert torch.equal(*outputs)


def test_given_gates_take_precedence_over_fixed_and_these_over_neutral():
    hidden = torch.zeros(1, 3, 16)
    mixer = build("gated_linear", decay=0.9)
    assert mixer.fixed_gates == {"log_decay"}
    gates = number_gates(mixer, hidden, {})
    assert torch.allclose(gates["log_decay"], torch.tensor(0.9).log().expand(1, 1, 3))
    assert torch.equal(gates["write"], torch.ones(1, 1, 3))
    assert torch.equal(number_gates(mixer, hidden, {"log_decay": -1.0})["log_decay"], -torch.ones(1, 1, 3))
    with pytest.raises(ValueError, match="GatedLinear has no gate 'beta'; its gates: log_decay, write"):
        number_gates(mixer, hidden, {"beta": 1.0})
    assert build("gated_linear/fixed_decay").fixed_gates == {"log_decay", "write"}
    assert GatedLinear(d_model=4).fixed_gates == frozenset()
    assert Softmax(d_model=4, learned_sink=True).fixed_gates == {"sink_logit"}


def test_gates_that_decay_or_write_nothing_are_detected():
    decaying = build("gla")
    assert answers_one_pair(decaying, {"log_decay": -0.01}) >= 0.999
    assert keeps_first_pair(decaying, {"log_decay": -0.01}, 8) == pytest.approx(
        torch.tensor(-0.07).exp().item(), abs=1e-5
    )
    delta = build("delta_rule")
    assert keeps_first_pair(delta, {"beta": 0.5}, 8) >= 0.999  # orthogonal keys do not disturb each other at any rate
    assert answers_one_pair(build("gated_linear"), {"log_decay": 0.0, "write": 0.0}) == 0
    with pytest.raises(ValueError, match="pairs=17 orthogonal keys do not fit d_key=16"):
        keeps_first_pair(delta, {}, 17)


@dataclass(eq=False, repr=False, kw_only=True)
class Leaky(MatrixMemory):
    """S_t = γ S_{t−1} + (1 − γ) k_t v_tᵀ: it cannot write everything and forget nothing."""

    def gates(self, x):
        return {"log_decay": x.new_full((len(x), self.heads, x.shape[1]), 0.5).log()}

    def update(self, k, v, gates):
        return Update(k, v * -gates["log_decay"].expm1()[..., None], gates["log_decay"])


def test_a_mechanism_without_neutral_gates_can_declare_the_nearest():
    """At γ = ½ it forgets, at γ = 1 it writes nothing, and just below 1 it does neither, but scales values down."""
    mixer = Leaky(d_model=16)
    assert answers_one_pair(mixer, {}) >= 0.999
    assert keeps_first_pair(mixer, {}, 8) == pytest.approx(0.5**7, abs=1e-6)
    assert answers_one_pair(mixer, {"log_decay": 0.0}) == 0
    assert keeps_first_pair(mixer, {"log_decay": 0.0}, 8) < 0
    nearest = {"log_decay": -1e-4}
    assert answers_one_pair(mixer, nearest) >= 0.999
    assert keeps_first_pair(mixer, nearest, 8) >= 0.999


def test_mesa_and_gated_delta_keep_what_they_wrote():
    """At neutral gates the answer to the first key is the same, up to 1e-9, after all others are written."""
    mesa = Mesa(d_model=16, short_conv=0).double()
    assert keeps_first_pair(mesa, mesa.neutral_gates, 16) == pytest.approx(1, abs=1e-9)
    gated = GatedDelta(d_model=16, short_conv=0).double()
    assert keeps_first_pair(gated, gated.neutral_gates, 16) == pytest.approx(1, abs=1e-9)
