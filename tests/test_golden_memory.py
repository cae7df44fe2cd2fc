"""Mechanisms with a matrix state against the float64 reference of flash-linear-attention (golden/INDEX.md).

Outputs, states and gradients.
"""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN, golden, ratio
from torch import Tensor
from torch.func import functional_call

from recall_lab.mixer import inner_descent, matrix_memory
from recall_lab.mixer.base import Mixer
from recall_lab.mixer.based import Based
from recall_lab.mixer.decay import MambaDecay
from recall_lab.mixer.delta_rule import DeltaRule
from recall_lab.mixer.feature_map import Hedgehog, dpfp, taylor
from recall_lab.mixer.gated_delta import GatedDelta
from recall_lab.mixer.gated_delta_product import GatedDeltaProduct
from recall_lab.mixer.gated_linear import GatedLinear
from recall_lab.mixer.gla import GLA
from recall_lab.mixer.gsa import GSA
from recall_lab.mixer.hgrn2 import HGRN2
from recall_lab.mixer.kda import KDA
from recall_lab.mixer.linear import Linear
from recall_lab.mixer.log_linear import LogLinear
from recall_lab.mixer.mamba2 import Mamba2
from recall_lab.mixer.matrix_memory import Update
from recall_lab.mixer.mesa import Mesa
from recall_lab.mixer.rwkv7 import RWKV7
from recall_lab.mixer.short_conv import ShortConv

Arrays = dict[str, Tensor]
Case = Callable[[Arrays, Arrays | None, str], tuple[Tensor, Arrays]]
"""(inputs, initial states by their golden names or None, form) → outputs and final states by their golden names."""


def bhtd(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def through(kind: type[Mixer], gates: Callable[[Arrays], Arrays] = lambda x: {}, **options) -> Case:
    """The function of a mechanism whose gates are taken from the golden inputs; its state S is called ht there."""

    def run(x: Arrays, start: Arrays | None, form: str) -> tuple[Tensor, Arrays]:
        q, k, v = (bhtd(x[name]) for name in "qkv")
        mixer = kind(d_model=2, heads=q.shape[1], d_key=q.shape[-1], d_value=v.shape[-1], short_conv=0, **options)
        start = None if start is None else {"S": start["ht"]}
        o, state = getattr(mixer, form)(q, k, v, gates(x), start)
        return bhtd(o), {"ht": state["S"]} if "S" in state else {}

    return run


def hgrn2(x: Arrays, start: Arrays | None, form: str) -> tuple[Tensor, Arrays]:
    return through(HGRN2, lambda x: {"log_decay": bhtd(x["g"])})(x | {"k": 1 - x["g"].exp()}, start, form)


def normalized(x: Arrays, start: Arrays | None, form: str) -> tuple[Tensor, Arrays]:
    q, k, v = (bhtd(x[name]) for name in "qkv")
    mixer = Linear(d_model=32, heads=2, short_conv=0, feature_map="relu", normalizer=True)
    before = None if start is None else {"S": torch.cat([start["ht"], start["ht_z"].transpose(1, 2).mT], dim=-1)}
    o, state = getattr(mixer, form)(q, k, v, {}, before)
    return bhtd(o), {"ht": state["S"][..., :-1], "ht_z": state["S"][..., -1][:, None]}


def gated_delta_product(x: Arrays, start: Arrays | None, form: str) -> tuple[Tensor, Arrays]:
    """The golden keys, values and rates have n = 2 positions per token."""
    k, v, beta = (bhtd(x[name]).unflatten(2, (-1, 2)) for name in ("k", "v", "beta"))  # b h t n d, b h t n
    more = {"more_k": k[:, :, :, 1:], "more_v": v[:, :, :, 1:], "more_beta": beta[..., 1:]}
    gates = more | {"log_decay": bhtd(x["g"]), "beta": beta[..., 0]}
    first = {"k": bhtd(k[:, :, :, 0]), "v": bhtd(v[:, :, :, 0])}
    return through(GatedDeltaProduct, lambda x: gates)(x | first, start, form)


def mamba2(x: Arrays, start: Arrays | None, form: str) -> tuple[Tensor, Arrays]:
    heads = x["dt_raw"].shape[-1]
    mixer = Mamba2(d_model=heads, heads=heads, d_key=x["B"].shape[-1], d_value=x["x"].shape[-1])
    weights = {"a_proj.weight": torch.eye(heads).to(x["x"]), "A_log": x["A_log"], "dt_bias": x["dt_bias"]}
    g, dt = functional_call(mixer.decay, weights, x["dt_raw"])
    gates = {"log_decay": g, "write": dt, "skip": x["D_skip"][:, None].expand_as(dt)}
    C, B = (bhtd(x[name]).expand(-1, heads, -1, -1) for name in "CB")
    o, state = getattr(mixer, form)(C, B, bhtd(x["x"]), gates, None if start is None else {"S": start["ht"]})
    return bhtd(o), {"ht": state["S"]}


def gsa(x: Arrays, start: Arrays | None, form: str) -> tuple[Tensor, Arrays]:
    """The golden logits are divided by √d_key."""
    q, k, v, s, g = (bhtd(x[name]) for name in ("q", "k", "v", "s", "g"))
    mixer = GSA(d_model=2, heads=q.shape[1], d_key=q.shape[-1], d_value=v.shape[-1], slots=s.shape[-1])
    before = None if start is None else {"K": start["ht_k"], "V": start["ht_v"]}
    o, state = getattr(mixer, form)(q * q.shape[-1] ** -0.5, k, v, {"log_decay": g, "write": s}, before)
    return bhtd(o), {"ht_k": state["K"], "ht_v": state["V"]}


def mesa(x: Arrays, start: Arrays | None, form: str) -> tuple[Tensor, Arrays]:
    q, k, v = (bhtd(x[name]) for name in "qkv")
    mixer = Mesa(d_model=2, heads=q.shape[1], d_key=q.shape[-1], d_value=v.shape[-1])
    gates = {"log_decay": bhtd(x["g"]), "write": bhtd(x["beta"]), "ridge": x["lamb"][:, None].expand_as(q)}
    before = None if start is None else {"H": start["ht_kk"], "S": start["ht_kv"]}
    o, state = getattr(mixer, form)(q, k, v, gates, before)
    return bhtd(o), {"ht_kk": state["H"], "ht_kv": state["S"]}


def ttt_linear(x: Arrays, start: Arrays | None, form: str) -> tuple[Tensor, Arrays]:
    """There the residual is that of z, the rate eta is one of the reading position, and mini-batches have 6 tokens."""
    q, k, v, eta = (bhtd(x[name]) for name in ("q", "k", "v", "eta"))
    q, share, rate = q * q.shape[-1] ** -0.5, eta[..., 0], torch.ones_like(eta[..., 0])
    norm = inner_descent.Norm(x["w"][:, None], x["b"][:, None])
    before = {"ht": q.new_zeros(2, 2, 16, 16), "ht_b": q.new_zeros(2, 2, 1, 16)} if start is None else start
    state, z = inner_descent.empty(before["ht"], before["ht_b"]), []
    every = [slice(None)] if form == "parallel" else [slice(t, t + 1) for t in range(q.shape[2])]
    for here in every:
        run = inner_descent.mini_batches if form == "parallel" else inner_descent.step
        part, state = run(*(y[:, :, here] for y in (q, k, v, rate, share)), norm, state, 6)
        z.append(part)
    read = torch.cat(z, dim=2)
    return bhtd(read + inner_descent.layer_norm(read, norm)), {"ht": state["W"], "ht_b": state["c"]}


def engine(update: Callable[[Arrays], Update], scaled: bool = True) -> Case:
    """The function of the engine itself, for updates that no mechanism of recall_lab makes."""

    def run(x: Arrays, start: Arrays | None, form: str) -> tuple[Tensor, Arrays]:
        class Case(matrix_memory.MatrixMemory):
            def update(self, k, v, gates):
                return update({name: bhtd(value) for name, value in x.items() if not name.startswith("h0")})

            def run_recurrence(self, q, k, v, gates, state=None):
                state = self.empty_state(q, v) if state is None else state
                o, S = matrix_memory.naive(self.query(q), self.update(k, v, gates), state["S"])
                return o, {"S": S}

            def query(self, q):
                return super().query(q) if scaled else q

        q, v = bhtd(x["q" if "q" in x else "r"]), bhtd(x["v"])
        mixer = Case(d_model=2, heads=2, d_key=q.shape[-1], d_value=v.shape[-1])
        o, state = getattr(mixer, form)(q, q, v, {}, None if start is None else {"S": start["ht"]})
        return bhtd(o), {"ht": state["S"]}

    return run


CASES: dict[str, Case] = {
    "linear_attn": through(Linear),
    "linear_attn_normalized": normalized,
    "simple_gla": through(GatedLinear, lambda x: {"log_decay": bhtd(x["g"])}),
    "retention": through(
        GatedLinear,
        lambda x: GatedLinear(d_model=x["q"].shape[2], heads=x["q"].shape[2], decay="retention", write=1.0).gates(
            x["q"][..., 0]
        ),
    ),
    "gla": through(GLA, lambda x: {"log_decay": bhtd(x["g"])}),
    "gsa": gsa,
    "hgrn2": hgrn2,
    "mamba2_ssd": mamba2,
    "delta_rule": through(DeltaRule, lambda x: {"beta": bhtd(x["beta"])}),
    "gated_delta_product": gated_delta_product,
    "gated_delta_rule": through(GatedDelta, lambda x: {"log_decay": bhtd(x["g"]), "beta": bhtd(x["beta"])}),
    "comba": engine(
        lambda x: Update(x["k"], x["beta"][..., None] * x["v"], x["g"], -x["beta"][..., None] * x["p"], None, True)
    ),
    "kda": through(KDA, lambda x: {"log_decay": bhtd(x["g"]), "beta": bhtd(x["beta"])}),
    "rwkv7": engine(
        lambda x: Update(x["k"], x["v"], x["w"], -x["kk"], x["kk"] * x["a"], reads_before_decay=True), scaled=False
    ),
    "dplr": engine(lambda x: Update(x["k"], x["v"], x["g"], x["a"], x["b"], reads_before_decay=True)),
    "iplr": engine(lambda x: Update(x["k"], x["v"], None, x["a"], x["b"])),
    "mesa_net": mesa,
    "ttt_linear": ttt_linear,
    "based": through(Based, window=0),
    "log_linear_attn": through(LogLinear, lambda x: {"log_decay": bhtd(x["g"]), "level": bhtd(x["level_scales"])}),
}
FILES = sorted(path.stem for path in GOLDEN.glob("*.npz") if path.stem.removesuffix("__long") in CASES)


def limits(name: str, dtype: torch.dtype) -> tuple[float, float]:
    """Tolerances of outputs and states, and of gradients."""
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        limit = json.loads(str(arrays["__meta__"]))["tolerance"]
    return (limit["float32"], limit["gradients_float32"]) if dtype == torch.float32 else (limit["float64"],) * 2


@pytest.mark.parametrize("form", ["parallel", "run_recurrence"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", FILES)
def test_golden(name, dtype, form):
    arrays, run = golden(name), CASES[name.removesuffix("__long")]
    given = {key.removeprefix("grad_") for key in arrays if key.startswith("grad_")}
    results = ("o", "ht", "do", "dht", "grad_", "h0")
    inputs = {
        key: value.to(dtype).requires_grad_(key in given)
        for key, value in arrays.items()
        if key in given or not key.startswith(results)
    }
    errors = {}
    o, states = run(inputs, None, form)
    errors |= {key: ratio(value.detach(), arrays[key]) for key, value in {"o": o, **states}.items() if key in arrays}
    if "o_from_h0" in arrays:
        start = {key: arrays[key.replace("ht", "h0")].to(dtype) for key in states}
        after, ends = run(inputs, start, form)
        errors |= {
            f"{key}_from_h0": ratio(x.detach(), arrays[f"{key}_from_h0"]) for key, x in {"o": after, **ends}.items()
        }
    limit, gradient_limit = limits(name, dtype)
    assert max(errors.values()) < limit, errors
    if given:
        loss = sum(
            (x * arrays[f"d{key}"].to(dtype)).sum() for key, x in {"o": o, **states}.items() if f"d{key}" in arrays
        )
        loss.backward()
        errors = {key: ratio(inputs[key].grad, arrays[f"grad_{key}"]) for key in given}
        assert max(errors.values()) < gradient_limit, errors


@pytest.fixture(scope="module")
def parts() -> Arrays:
    return {name: value.double() for name, value in golden("parts").items()}


def test_feature_maps():
    x = {name: value.double() for name, value in golden("feature_maps").items()}
    hedgehog = functional_call(Hedgehog(8), {"linear.weight": x["w_hedgehog"], "linear.bias": x["b_hedgehog"]}, x["x"])
    assert ratio(taylor(x["x"]), x["o"]) < 1e-10
    assert ratio(dpfp(x["x"], nu=2), x["dpfp_nu2"]) < 1e-10
    assert ratio(hedgehog, x["hedgehog"]) < 1e-10


@pytest.mark.parametrize("start", ["", "_from_h0"])
def test_short_convolution(parts, start):
    conv = ShortConv(5, 4)
    cache = parts["h0_conv"] if start else None
    (y,), cache = functional_call(conv, {"weight": parts["conv_w"][:, None]}, ([parts["conv_x"]], cache))
    assert ratio(F.silu(y + parts["conv_b"]), parts["o" + start]) < 1e-10
    assert ratio(cache, parts["ht_conv" + start]) < 1e-10


@pytest.mark.parametrize(("name", "suffix", "width"), [("gdn_gate", "", 1), ("kda_gate", "_k", 6)])
def test_mamba_decay(parts, name, suffix, width):
    weights = {
        "a_proj.weight": torch.eye(2 * width, dtype=torch.float64),
        "A_log": parts["A_log"],
        "dt_bias": parts["dt_bias" + suffix],
    }
    raw = parts["gate_raw" + suffix].reshape(2, 16, -1)
    g, _ = functional_call(MambaDecay(2 * width, 2, width), weights, raw)
    assert ratio(bhtd(g), parts[name]) < 1e-10


def test_rwkv7_keys(parts):
    mixer = RWKV7(d_model=12, heads=2).double()
    mixer.alpha.data = parts["rk_ka"]
    k, a = (bhtd(parts[name].unflatten(-1, (2, 6))) for name in ("rk_k", "rk_a"))
    update = mixer.update(k, k, {"log_decay": k, "a": a})
    assert ratio(bhtd(update.write_key).flatten(2).detach(), parts["rwkv7_k_update"]) < 1e-10
    # The erasing keys of the golden file's formula, −κ and a ⊙ κ with κ of unit length.
    assert torch.allclose(update.erase_read.norm(dim=-1), torch.ones(2, 2, 16, dtype=torch.float64))
    assert torch.allclose(update.erase_key, -update.erase_read * a)
    assert update.reads_before_decay


def test_output_norm_and_gate(parts):
    mixer = Linear(d_model=8, output_norm=True, output_gate=True).double()
    one = torch.eye(8, dtype=torch.float64)
    mixer.g_proj.weight.data, mixer.o_proj.weight.data, mixer.norm.weight.data = one, one, parts["norm_w"]
    y = mixer.read_out(parts["norm_x"][:, None], parts["norm_z"]).detach()
    assert ratio(y, parts["rmsnorm_gated_after"]) < 1e-10
