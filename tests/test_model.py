"""The model: decoding equals the forward pass, traces come from that pass, sizes are checked."""

import hydra
import pytest
import torch
from conftest import config, names

from recall_lab.mixer.base import Mixer
from recall_lab.model import Model


def build(mixer: str, layers: int = 2, **more) -> Model:
    torch.manual_seed(0)
    chosen = config(f"mixer={mixer}", *more.pop("overrides", ()))
    return Model(24, hydra.utils.instantiate(chosen.mixer), d_model=8, layers=layers, **more)


@pytest.mark.parametrize("mixer", names("mixer"))
def test_decoding_equals_the_forward_pass(mixer):
    model = build(mixer, mlp=1.5).double()
    tokens = torch.randint(24, (2, 11))
    expected = model(tokens)
    logits, states = model.prefill(tokens[:, :5], model.initial_state(2))
    assert torch.allclose(logits, expected[:, :5], atol=1e-6)
    for t in range(5, 11):
        logits, states = model.step(tokens[:, t : t + 1], states)
        assert torch.allclose(logits[:, 0], expected[:, t], atol=1e-6)


@pytest.mark.parametrize("mixer", [name for name in names("mixer") if name != "module"])
def test_a_trace_comes_from_the_forward_pass(mixer):
    """The traced outputs give the output of each layer's mixer, and equal A v where the mechanism is linear in v."""
    model = build(mixer)
    tokens = torch.randint(24, (2, 20))
    traces = model.trace(tokens, torch.zeros(2, 20, dtype=torch.long))
    assert [trace.layer for trace in traces] == [0, 1]
    outputs = []
    hooks = [b.mixer.o_proj.register_forward_hook(lambda m, i, o: outputs.append(o)) for b in model.blocks]
    model(tokens)
    for hook in hooks:
        hook.remove()
    for trace, output in zip(traces, outputs, strict=True):
        x = trace.o if trace.mixer.norm is None else trace.mixer.norm(trace.o)
        if trace.mixer.g_proj is None:
            assert torch.allclose(trace.mixer.o_proj(x.transpose(1, 2).flatten(2)), output, atol=1e-5)
        if trace.mixer.linear_in_v:
            A = trace.mixer.effective_attention(trace.q, trace.k, trace.gates)
            assert (A @ trace.v - trace.o).norm() < 1e-5 * trace.o.norm()


def test_logits_of_scored_positions_only():
    model = build("softmax")
    tokens = torch.randint(24, (3, 9))
    scored = torch.rand(3, 9) < 0.4
    assert torch.allclose(model(tokens, scored.flatten().nonzero()[:, 0]), model(tokens)[scored])


@pytest.mark.parametrize("width", [0, 5])
def test_the_scale_of_the_initial_embedding(width):
    for given, std in ((0.02, 0.02), (1.5, 1.5), (None, 40**-0.5)):
        torch.manual_seed(0)
        mixer = hydra.utils.instantiate(config("mixer=linear").mixer)
        weight = Model(500, mixer, d_model=40, width=width and 500, embedding_std=given).embed.weight
        assert weight.std().item() == pytest.approx(std, rel=0.03)
        assert weight.mean().item() == pytest.approx(0, abs=std / 30)


def test_tokens_of_one_position_are_added():
    model = build("softmax")
    tokens = torch.randint(24, (2, 5, 2))
    assert torch.equal(model.embed_tokens(tokens), model.embed(tokens[..., 0]) + model.embed(tokens[..., 1]))


def test_the_layers_use_a_list_of_mixers_in_turn():
    model = build("hybrid", layers=3, overrides=["mixer.pattern=[first,second]"])
    kinds = [type(block.mixer).__name__ for block in model.blocks]
    assert kinds == ["DeltaRule", "Softmax", "DeltaRule"]


def test_state_size_adds_up_over_layers():
    one, two = build("linear", layers=1).state_size(10), build("linear", layers=2).state_size(10)
    assert two == (2 * one[0], 2 * one[1])


def test_a_model_does_not_change_its_mixers_initial_values():
    made: list[tuple[Mixer, dict]] = []

    def maker(d_model):
        mixer = hydra.utils.instantiate(config("mixer=gated_delta").mixer)(d_model=d_model)
        made.append((mixer, {name: value.clone() for name, value in mixer.state_dict().items()}))
        return mixer

    Model(24, maker, d_model=8, layers=2)
    for mixer, before in made:
        assert all(torch.equal(value, before[name]) for name, value in mixer.state_dict().items())


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"d_model": 0}, "model.d_model=0: must be a whole number of at least 1"),
        ({"layers": 0}, "model.layers=0: must be a whole number of at least 1"),
        ({"mlp": -1.0}, "model.mlp=-1.0: must be a number of at least 0"),
    ],
)
def test_impossible_sizes_are_refused(size, message):
    with pytest.raises(ValueError, match=message):
        Model(8, hydra.utils.instantiate(config().mixer), **size)


def test_every_mixer_of_a_list_needs_a_layer():
    with pytest.raises(ValueError, match=r"model\.layers=1: must be at least the number of mixers, 2"):
        build("hybrid", layers=1)


def test_heads_must_divide():
    with pytest.raises(ValueError, match="d_model=9 is not divisible by heads=2"):
        Model(8, hydra.utils.instantiate(config("mixer.heads=2").mixer), d_model=9)
