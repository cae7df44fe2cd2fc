"""The options, weights and docstrings of every mechanism."""

import copy

import pytest
import torch
from mixers import build, every_case, every_mechanism, settings

from recall_lab.contract.mixer import draw, total
from recall_lab.mixer.base import Mixer
from recall_lab.model import Model


@every_case
def test_every_parameter_learns(name, options):
    mixer = build(name, **options, output_norm=True, output_gate=True)
    total(mixer(draw(mixer, 40))[0]).backward()
    still = [key for key, weight in mixer.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not still


@every_mechanism
def test_copies_are_equal(name):
    mixer = build(name)
    other = build(name, short_conv=4)
    other.load_state_dict(mixer.state_dict())
    x = draw(mixer, 30)
    assert torch.equal(mixer(x)[0], other(x)[0])
    assert torch.equal(mixer(x)[0], copy.deepcopy(mixer)(x)[0])


@every_mechanism
def test_every_key_has_an_effect(name):
    """Another value of any key changes the outputs or is refused, naming the key; unknown words are refused."""
    keys = {key: value for key, value in settings(name).items() if not key.startswith("_")}
    base = build(name)
    for key, value in keys.items():
        if key in ("d_key", "d_value"):
            others = [4]
        elif isinstance(value, bool):
            others = [not value]
        elif isinstance(value, int):
            others = [1, 2, value + 1, 4]
        elif isinstance(value, float):
            others = [value / 2, 0.5]
        elif value is None:
            others = [1]
        else:
            with pytest.raises(ValueError, match=key):
                build(name, **{key: "nonsense"})
            continue
        assert any(differ(name, base, key, other) for other in others if other != value), key


def differ(name: str, base: Mixer, key: str, value) -> bool:
    """Whether that value of the key changes the outputs or is refused by a message that names the key."""
    try:
        other = build(name, **{key: value})
    except ValueError as refusal:
        return key in str(refusal)
    x = draw(base, 100)
    return not torch.equal(base(x)[0], other(x)[0])


@every_mechanism
@pytest.mark.parametrize("bad", [{"d_model": 15}, {"heads": 0}, {"d_key": 0}, {"d_value": -1}, {"short_conv": -1}])
def test_impossible_sizes_are_refused(name, bad):
    widths = {"d_key": None, "d_value": None}
    (key,) = bad
    with pytest.raises(ValueError, match=key):
        build(name, **widths | bad)


@every_mechanism
def test_initial_values_survive_the_model(name):
    """A model does not overwrite initial values that a mechanism sets, such as gate biases."""
    made = []

    def maker(**sizes) -> Mixer:
        mixer = build(name, **sizes)
        made.append({key: weight.clone() for key, weight in mixer.state_dict().items()})
        return mixer

    model = Model(10, maker, d_model=16, layers=2)
    for block, weights in zip(model.blocks, made, strict=True):
        for key, weight in block.mixer.state_dict().items():
            assert torch.equal(weight, weights[key]), key


@every_mechanism
def test_misspelt_keys_are_refused(name):
    with pytest.raises(TypeError, match="d_keys"):
        build(name, d_keys=8)


@every_mechanism
def test_docstring_is_complete(name):
    """It has a first sentence without formulas, the recurrence, A (or why there is none), the state and the source."""
    text = type(build(name)).__doc__
    first, *rest = text.strip().splitlines()
    assert first.endswith(".")
    assert not set(first) & set("=_∈Σ")
    for part in ("A", "state:", "Source:"):
        assert part in "\n".join(rest), part


@every_mechanism
@pytest.mark.parametrize(
    "bad", [{"heads": True}, {"heads": 1.0}, {"d_model": 16.0}, {"d_key": True}, {"short_conv": False}, {"qk_norm": 1},
            {"conv_activation": "false"}, {"output_norm": None}, {"output_gate": 0}]
)  # fmt: skip
def test_values_of_another_type_are_refused(name, bad, monkeypatch):
    """True is not a number of heads and 1 is not a flag. The check itself refuses them, even without type checks."""
    (key,) = bad
    mixer = build(name)
    for option, value in bad.items():
        monkeypatch.setattr(mixer, option, value)
    with pytest.raises(ValueError, match=f"^{key}="):
        Mixer.__post_init__(mixer)


@every_case
def test_weight_decay_touches_weights_of_projections_and_convolutions_only(name, options):
    """Biases, norms, decays, lengths and ridges have fewer than two axes or are named by their module."""
    mixer = build(name, **options, output_norm=True, output_gate=True, qk_norm=True)
    decayed = set()
    for prefix, module in mixer.named_modules():
        for own, weight in module.named_parameters(recurse=False):
            if weight.ndim >= 2 and own not in getattr(module, "no_weight_decay", ()):
                decayed.add(f"{prefix}.{own}" if prefix else own)
    weights = {"input_weight", "hidden_weight"}  # of the vector states
    assert all(key.endswith("weight") for key in decayed - weights)
    exempt = dict(mixer.named_parameters()).keys() - decayed
    assert not any(key.endswith("proj.weight") or key == "conv.weight" for key in exempt)


def test_the_ridge_of_mesa_and_the_biases_of_vector_states_are_exempt():
    assert [build(name).no_weight_decay for name in ("mesa", "rnn", "lstm")] == [("ridge",), ("bias",), ("bias",)]
