"""`mixer=module`: layers of torch.nn and of other libraries, as they are or through the adapters."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import TINY, recall, run_folders
from conftest import CPU, TASK, config, small_training
from hydra.utils import instantiate
from torch import Tensor, nn

from recall_lab import results, train
from recall_lab.cli import check
from recall_lab.mixer.adapters import Attention, Recurrent
from recall_lab.mixer.layer import AnyTrace, LayerTrace, made_with
from recall_lab.mixer.module import Module
from recall_lab.model import Model
from recall_lab.probe import base as probing
from recall_lab.probe.cost import cost
from recall_lab.probe.effective_attention import effective_attention
from recall_lab.probe.gates import gates
from recall_lab.probe.jacobian import influence_of_inputs
from recall_lab.task.base import IGNORE


class Averaged(nn.Module):
    """The mean of all past inputs and their projection: a layer of another library, which returns a tuple."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return self.proj(x).cumsum(1) / count, None


GRU = partial(nn.GRU, input_size=8, hidden_size=8, batch_first=True)
MAKERS = {
    "GRU adapter": partial(Recurrent, layers=2),
    "LSTM adapter": partial(Recurrent, cell="LSTM"),
    "RNN adapter": partial(Recurrent, cell="RNN"),
    "attention adapter": partial(Attention, heads=2),
    "GRU as it is": GRU,
    "a layer that returns a tuple": Averaged,
}
every_layer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def module(make, d_model: int = 8) -> Module:
    torch.manual_seed(0)
    return Module(d_model=d_model, layer=make)


def draw(b: int, t: int, m: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(b, t, m, generator=torch.Generator().manual_seed(seed))


def traced(make, b: int = 2, t: int = 6) -> LayerTrace:
    trace, _ = module(make).eval().trace(draw(b, t), torch.full((b, t), IGNORE), 3)
    assert isinstance(trace, LayerTrace)
    return trace


@every_layer
def test_split_and_step_by_step_equal_the_whole(make):
    mixer, x = module(make).double().eval(), draw(2, 11).double()
    whole, end = mixer(x)
    first, state = mixer(x[:, :4])
    parts, (none, same) = [first], mixer(x[:, :0], state)
    assert none.shape == (2, 0, 8)
    assert all(torch.equal(same[name], state[name]) for name in state)
    for token in x[:, 4:].split(1, dim=1):
        y, state = mixer.step(token, state)
        parts.append(y)
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-12)
    assert all(torch.allclose(state[name], end[name]) for name in end)
    fresh, _ = mixer(x, mixer.initial_state(2))
    assert torch.allclose(fresh, whole, atol=1e-12)


def test_a_layer_as_it_is_gives_its_own_outputs():
    mixer, x = module(GRU), draw(3, 7)
    assert torch.equal(mixer(x)[0], mixer.inner(x)[0])
    mixer = module(partial(Attention, heads=2))
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    assert torch.allclose(mixer(x)[0], mixer.inner.attention(x, x, x, attn_mask=causal)[0], atol=1e-6)


@pytest.mark.parametrize(
    ("make", "elements"),
    [
        (partial(Recurrent, layers=2), 16),
        (partial(Recurrent, cell="LSTM"), 16),
        (Attention, 8 * 20),
        (GRU, None),
        (Averaged, None),
    ],
)
def test_a_state_is_counted_where_the_layer_has_one(make, elements):
    assert module(make).state_size(20) == (elements and (elements, 4 * elements))


def test_a_model_with_a_state_that_is_not_known_has_no_size():
    known, unknown = partial(Module, layer=Recurrent), partial(Module, layer=Averaged)
    assert Model(9, [known, known], d_model=8).state_size(5) == (16, 64)
    assert Model(9, [known, unknown], d_model=8).state_size(5) is None


def backwards() -> nn.Module:
    return nn.GRU(8, 4, batch_first=True, bidirectional=True)


class Wide(nn.Linear):
    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, d_model + 1)


class Nothing(Averaged):
    def forward(self, x: Tensor) -> dict:
        return {"x": x}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (backwards, "GRU is not causal: outputs before position 6 depend on inputs from there on"),
        (partial(nn.TransformerEncoderLayer, nhead=2, dim_feedforward=8, batch_first=True), "is not causal"),
        (partial(nn.GRU, 8, 8), "GRU mixes the sequences of a batch: .* needs batch_first=true"),
        (Wide, r"Wide: the output must have the shape of the input, \[3, 12, 8\], not \[3, 12, 9\]"),
        (Nothing, "Nothing: must return a tensor, or a tuple that begins with one"),
    ],
)
def test_what_is_no_causal_layer_is_refused_at_its_first_use(make, message):
    mixer = module(make)
    with pytest.raises(ValueError, match=message):
        mixer(draw(3, 12))


def test_the_check_leaves_mode_random_numbers_and_gradients_alone():
    class Dropped(Averaged):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x)[0], 0.5, self.training)

    mixer, x = module(Dropped), draw(2, 8).requires_grad_()
    torch.manual_seed(3)
    y, _ = mixer(x)
    torch.manual_seed(3)
    again, _ = mixer(x)
    assert mixer.inner.training
    assert torch.equal(y, again)
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(Recurrent, cell="GRUU"), "mixer.layer=Recurrent cannot be made: cell='GRUU': must be one of RNN, GRU"),
        (partial(Attention, heads=3), "mixer.layer=Attention cannot be made: heads=3: must divide d_model=8"),
        (partial(Averaged, hiden_size=8), "mixer.layer=Averaged cannot be made: .*hiden_size"),
        (nn.GRU, r"mixer.layer=GRU cannot be made: .*input_size.*; use \+mixer\.layer\.cell=GRU alone"),
        (
            partial(nn.MultiheadAttention, num_heads=2),
            "takes three inputs.*; use mixer.*adapters.Attention, ",
        ),
        (dict, "mixer.layer=dict: must make a torch.nn.Module"),
    ],
)
def test_a_layer_that_cannot_be_made_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        module(make)


def test_the_width_is_passed_under_the_layers_own_name_unless_it_is_given():
    assert module(Averaged).inner.proj.in_features == 8
    assert made_with(partial(nn.MultiheadAttention, num_heads=2), 8).embed_dim == 8
    assert module(partial(Averaged, hidden_size=4)).inner.proj.in_features == 4


@every_layer
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_influence_is_the_norm_of_the_jacobian(make, chunk):
    trace = traced(make)
    found = influence_of_inputs(trace, chunk)
    for b, x in enumerate(trace.x):
        jacobian = torch.autograd.functional.jacobian(lambda z: trace.mixer(z[None])[0][0], x)  # t m s m
        expected = jacobian.permute(0, 2, 1, 3).flatten(2).norm(dim=-1) / 8**0.5
        assert torch.allclose(found[b, 0], expected, atol=1e-6)
    assert not found.triu(1).any()


def test_the_influence_on_a_mean_is_known():
    """The inputs up to t have the weight ‖W‖_F/(√m (t + 1)) each, and the shares are equal."""
    trace = traced(Averaged)
    rows = effective_attention(trace, None)
    norm = float(trace.mixer.inner.proj.weight.detach().norm()) / 8**0.5
    weights = {(r["query"], r["token"]): r["value"] for r in rows if r["metric"] == "influence_weight"}
    assert weights == pytest.approx({(t, s): norm / (t + 1) for t in range(6) for s in range(t + 1)}, rel=1e-5)
    tokens = [r for r in rows if r["metric"] == "influence_effective_tokens" and r["statistic"] == "mean"]
    assert tokens[0]["value"] == pytest.approx(3.5, rel=1e-5)
    assert {row["metric"].startswith("influence_") for row in rows} == {True}
    assert {row["layer"] for row in rows} == {3}


def test_cost_is_time_and_the_size_of_a_known_state(rng):
    rows = cost(traced(Attention), rng, lengths=(8, 16), repeats=1)
    assert {row["metric"] for row in rows} == {"prefill_seconds", "decode_seconds", "state_bytes", "exponent"}
    assert [row["value"] for row in rows if row["metric"] == "state_bytes"] == [4 * 8 * 9, 4 * 8 * 17]
    rows = cost(traced(GRU), rng, lengths=(8, 16), repeats=1)
    assert {row["metric"] for row in rows} == {"prefill_seconds", "exponent"}
    with pytest.raises(ValueError, match="timed=False: of this layer, only times can be measured"):
        cost(traced(GRU), rng, lengths=(8, 16), timed=False)


def test_a_probe_that_needs_keys_is_refused_by_name_and_one_that_does_not_is_run(rng):
    def of_keys(trace, rng):
        return [{"metric": "one", "value": 1}]

    def of_any(trace: AnyTrace, rng):
        return [{"metric": "one", "value": 1}]

    trace = traced(GRU)
    for probe in (gates, of_keys, partial(of_keys)):
        name = probing.name(probe)
        message = f"^probe {name}, layer 3: needs queries, keys and values, which Module does not have$"
        with pytest.raises(probing.ProbeError, match=message):
            probing.run_on_trace(probe, trace, rng)
    assert probing.run_on_trace(of_any, trace, rng) == [{"probe": "of_any", "metric": "one", "value": 1}]


@pytest.mark.usefixtures("empty_folder")
def test_a_run_from_the_command_line(capsys):
    words = ["mixer=module", "mixer.layer._target_=torch.nn.GRU", "+mixer.layer.batch_first=true",
             "+mixer.layer.input_size=${model.d_model}", "+mixer.layer.hidden_size=${model.d_model}"]  # fmt: skip
    assert recall(*TINY, *words, "probe=[retrieval,effective_attention]", "test.probe_sequences=2", "name=own") == 0
    table = results.collect(Path("outputs/own"))
    assert set(table["series"]) == {"module(GRU)"}
    assert {"accuracy", "influence_entropy"} <= set(table["metric"])
    assert "state_elements" not in set(table["metric"])
    assert recall(*TINY, "mixer=module", "+mixer.layer.cell=LSTM", "probe=[gates]", "name=refused") == 1
    (run,) = run_folders("refused")
    assert set(results.collect(run.parent)["metric"]) >= {"accuracy", "state_elements"}
    assert "probe gates, layer 0: needs queries, keys and values, which Module does not have" in capsys.readouterr().err
    assert recall("oracle=random", "mixer=module", "probe=[cost]", "name=oracle") == 2
    assert "the oracle needs queries, keys and values, which Module does not have" in capsys.readouterr().err
    assert recall(*TINY, "mixer=module", "mixer.layer._target_=os.system", "name=no") == 2
    assert "mixer.layer._target_=os.system: must be a Module" in capsys.readouterr().err


def test_the_contract_of_mechanisms_does_not_apply():
    with pytest.raises(ValueError, match=r"^Module has no queries, keys and values; it is checked when"):
        check.check(["mixer=module"])


@pytest.mark.slow
def test_a_gru_and_attention_learn_recall():
    """Short sequences with few pairs are learned above chance by both."""
    for layer in (Recurrent, partial(Attention, heads=2)):
        torch.manual_seed(0)
        model = Model(TASK.vocab, partial(Module, layer=layer), d_model=32, layers=2, mlp=2)
        task = TASK.at(length=8, pairs=1)
        curve = train.train(model, task, small_training(steps=600, cells=[{"length": 8, "pairs": 1}]), 0, CPU)
        assert curve[-1]["accuracy"] > 3 * task.chance


FLA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@FLA
@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("fla.layers.GatedDeltaNet", {"head_dim": 32, "num_heads": 2}),
        ("fla.layers.DeltaNet", {"num_heads": 2}),
        ("fla.layers.GatedLinearAttention", {"num_heads": 2}),
        ("mamba_ssm.Mamba2", {"headdim": 32}),
    ],
)
def test_layers_of_other_libraries_on_a_gpu(target, options):
    """Trained, checked for causality, and probed by influence; fla and mamba_ssm are installed by the user."""
    pytest.importorskip(target.partition(".")[0])
    words = [f"+mixer.layer.{key}={value}" for key, value in options.items()]
    cuda = torch.device("cuda")
    make = instantiate(config("mixer=module", f"mixer.layer._target_={target}", *words).mixer, _convert_="all")
    torch.manual_seed(0)
    model = Model(TASK.vocab, make, d_model=64, layers=1).to(cuda)
    curve = train.train(model, TASK, small_training(steps=40, validate_every=20), 0, cuda)
    assert curve[-1]["loss"] < curve[0]["loss"] + 0.1
    assert model.blocks[0].mixer.checked
    batch = TASK.sample(1, np.random.default_rng(0))
    (trace,) = probing.trace_model(model, batch)
    found = influence_of_inputs(trace)
    assert found.triu(1).abs().max() < 1e-3 * found.max()
