"""The oracle's gates: given, fixed by the mixer's options, or neutral; and what is refused."""

from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CONF, config
from hydra.utils import instantiate
from mixers import LINEAR_IN_V
from torch import nn

from recall_lab.mixer.base import Mixer
from recall_lab.mixer.delta_rule import DeltaRule
from recall_lab.mixer.forgetting import Forgetting
from recall_lab.mixer.gated_delta import GatedDelta
from recall_lab.mixer.gated_linear import GatedLinear
from recall_lab.mixer.linear import Linear
from recall_lab.mixer.matrix_memory import MatrixMemory, Update
from recall_lab.mixer.neutral import weight_kept
from recall_lab.mixer.softmax import Softmax
from recall_lab.oracle import Oracle, _neutral, check_neutral, ineffective_options

YAMLS = sorted(path.relative_to(CONF / "mixer").with_suffix("").as_posix() for path in (CONF / "mixer").rglob("*.yaml"))
MECHANISMS = [name for name in YAMLS if name not in ("hybrid", "module")]
SIZES = {"pairs": 8, "d_key": 16, "reads": 16}


def draw(make, **more):
    oracle = Oracle(**SIZES, **more)
    return oracle.trace(oracle.mixer(make), np.random.default_rng(0))


def make(name):
    return instantiate(config(f"mixer={name}").mixer)


@dataclass(eq=False, repr=False, kw_only=True)
class Leaky(MatrixMemory):
    """S_t = γ S_{t−1} + (1 − γ) k_t v_tᵀ with a learned γ: it cannot write a pair and forget nothing."""

    start: float = 0.98

    def __post_init__(self) -> None:
        super().__post_init__()
        self.leak = nn.Parameter(torch.full((self.heads,), self.start).logit())

    def gates(self, x):
        return {"log_decay": F.logsigmoid(self.leak)[:, None].expand(len(x), -1, x.shape[1])}

    def update(self, k, v, gates):
        return Update(k, v * -gates["log_decay"].expm1()[..., None], gates["log_decay"])


@dataclass(eq=False, repr=False, kw_only=True)
class Declared(Leaky):
    neutral_gates: ClassVar = {"log_decay": -1e-3}


@dataclass(eq=False, repr=False, kw_only=True)
class Half(DeltaRule):
    """β = ½ unless it is learned, and no neutral value is declared."""

    neutral_gates: ClassVar = {}

    def gates(self, x):
        return {"beta": torch.full_like(super().gates(x)["beta"], 0.5)}


@dataclass(eq=False, repr=False, kw_only=True)
class Undeclared(Forgetting):
    neutral_gates: ClassVar = {}


@dataclass(eq=False, repr=False, kw_only=True)
class Silent(Linear):
    """Its gate is zero, so nothing is written."""

    def gates(self, x):
        return {"write": x.new_zeros(len(x), self.heads, x.shape[1])}

    def update(self, k, v, gates):
        return Update(k, v * gates["write"][..., None])


@dataclass(eq=False, repr=False, kw_only=True)
class Open(Silent):
    """The same with a gate of one, which is neutral as it is: no declaration is needed."""

    def gates(self, x):
        return {"write": x.new_ones(len(x), self.heads, x.shape[1])}


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_configured_mechanism_passes_or_is_refused_by_its_option(name):
    mixer = Oracle(**SIZES).mixer(make(name))
    if name == "ttt_linear":
        with pytest.raises(
            ValueError, match=r"^TTTLinear does not declare at which value of rate it writes every pair"
        ):
            check_neutral(mixer, {})
        return
    check_neutral(mixer, {})
    if getattr(mixer, "positions", "none") != "none":
        with pytest.raises(ValueError, match=r"^mixer.positions has no effect with the oracle: .* without positions$"):
            draw(make(name))
    elif name == "delta_rule/neg_eigval":
        with pytest.raises(ValueError, match=r"^mixer.allow_neg_eigval has no effect with the oracle: it only shapes"):
            draw(make(name))
    else:
        assert draw(make(name)).o.isfinite().all()


@pytest.mark.parametrize(
    "name", [n for n in MECHANISMS if n.partition("/")[0] in LINEAR_IN_V and n != "stickbreaking_attn"]
)
def test_at_neutral_gates_a_second_write_adds_or_replaces(name):
    mixer = Oracle(**SIZES).mixer(make(name))
    if getattr(mixer, "positions", "none") != "none":
        pytest.skip("its answers depend on positions; the oracle refuses it")
    kept = weight_kept(mixer, _neutral(mixer, {}), 8)
    replaced = name.split("/")[0] in ("delta_rule", "gated_delta", "kda", "rwkv7", "comba")
    assert kept == pytest.approx(0 if replaced else 1, abs=1e-4)


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (Leaky, r"7 further writes leave only 0.868 of the answer to the first key"),
        (Half, r"after a second write of a key, the first keeps 0.500 of its weight, neither all nor none"),
        (Undeclared, r"after a second write of a key, the first keeps 0.0\d\d of its weight"),
        (Silent, r"a single pair is not answered with its value \(cosine 0.000\)"),
    ],
)
def test_a_mechanism_that_declares_nothing_is_tested_and_refused(made, fault):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=fault) as caught:
        draw(made)
    gate = next(iter(made(d_model=16).gates(torch.zeros(1, 1, 16))))
    assert str(caught.value).startswith(f"{made.__name__} does not declare at which value of {gate} it writes")
    assert f"Declare {made.__name__}.neutral_gates = {{'{gate}': …}}" in str(caught.value)
    assert str(caught.value).endswith(f"or set oracle.gates.{gate}")
    assert "\n" not in str(caught.value)


def test_given_or_declared_gates_are_not_refused():
    assert torch.allclose(draw(Leaky, gates={"log_decay": -0.5}).gates["log_decay"], torch.tensor(-0.5))
    assert torch.allclose(draw(Declared).gates["log_decay"], torch.tensor(-1e-3))
    assert torch.allclose(draw(Half, gates={"beta": 0.1}).gates["beta"], torch.tensor(0.1))


def test_a_mechanism_that_declares_nothing_passes_if_its_gates_are_neutral():
    assert torch.allclose(draw(Open).o, draw(Linear).o)
    assert draw(partial(Softmax, learned_sink=True)).gates["sink_logit"].eq(0).all()


def test_fixed_gates_have_an_effect():
    """The oracle does not change decay=0.9 and write=0.5, which are options. Queries have their neutral scale."""
    fixed = draw(partial(GatedLinear, decay=0.9, write=0.5))
    assert torch.allclose(fixed.gates["log_decay"].exp(), torch.tensor(0.9))
    assert torch.allclose(fixed.gates["write"], torch.tensor(0.5))
    assert torch.equal(fixed.q, draw(GatedLinear).q)
    given = draw(GatedLinear, gates={"log_decay": float(np.log(0.9)), "write": 0.5})
    assert torch.allclose(fixed.o, given.o, atol=1e-6)
    wins = draw(partial(GatedLinear, decay=0.9, write=0.5), gates={"log_decay": -1})
    assert torch.allclose(wins.gates["log_decay"], torch.tensor(-1.0))
    assert torch.allclose(draw(make("gated_linear/fixed_decay")).gates["log_decay"].exp(), torch.tensor(1 - 2.0**-5))
    assert not torch.allclose(draw(make("gated_linear/fixed_decay")).o, draw(Linear).o, atol=1e-2)


def test_options_without_an_effect_are_named_with_what_to_set():
    reasons = ineffective_options(GatedDelta)
    assert reasons["allow_neg_eigval"] == (
        "it only shapes learned gates; set oracle.gates.log_decay or oracle.gates.beta"
    )
    assert reasons["d_key"] == "the oracle sets it; set oracle.d_key"
    base = {"heads", "d_key", "d_value", "short_conv", "conv_activation", "qk_norm", "output_norm", "output_gate"}
    assert base <= set(reasons)
    assert set(reasons) <= {f.name for f in fields(GatedDelta)}
    assert not {"decay", "write"} & set(ineffective_options(GatedLinear))
    assert set(ineffective_options(Mixer)) == {f.name for f in fields(Mixer)} - {"d_model"}


def test_the_trace_has_the_device_and_dtype_of_the_weights():
    oracle = Oracle(**SIZES)
    trace = oracle.trace(oracle.mixer(partial(GatedDelta)).double(), np.random.default_rng(0))
    parts = [trace.q, trace.k, trace.v, trace.o, trace.candidates, *trace.gates.values()]
    assert {part.dtype for part in parts} == {torch.float64}
    assert {part.device for part in [*parts, trace.source]} == {torch.device("cpu")}
