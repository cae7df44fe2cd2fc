"""The contract of every mechanism, over the files of conf/mixer: a new one is held to it by being there."""

import copy
from functools import cache

import pytest
import torch
from conftest import CONF, config, names
from hydra.utils import instantiate
from torch import Tensor

from recall_lab.mixer.base import Mixer
from recall_lab.model import Model

OPTIONS: dict[str, list[dict]] = {
    "linear": [
        {"feature_map": "elu+1", "normalizer": True},
        {"feature_map": "hedgehog", "normalizer": True},
        {"feature_map": "dpfp"},
        {"feature_map": "taylor"},
    ],
    "gated_linear": [{"decay": "retention", "write": 0.5}, {"decay": 0.9, "write": 1}, {"decay": 1}],
    "delta_rule": [{"allow_neg_eigval": True}],
    "gated_delta": [{"allow_neg_eigval": True}],
    "based": [{"window": 5}],
    "log_linear": [{"levels": 3}],
}
"""Options of a mechanism that are worth a run of their own, beside its defaults."""

MECHANISMS = [name for name in names("mixer") if "mixer_base" in (CONF / "mixer" / f"{name}.yaml").read_text()]
CASES = [(name, options) for name in MECHANISMS for options in [{}, *OPTIONS.get(name, [])]]
every_case = pytest.mark.parametrize(
    ("name", "options"), CASES, ids=["-".join([name, *map(str, options.values())]) for name, options in CASES]
)
every_mechanism = pytest.mark.parametrize("name", MECHANISMS)


@cache
def settings(name: str):
    return config(f"mixer={name}").mixer


def build(name: str, **options) -> Mixer:
    torch.manual_seed(0)
    return instantiate(settings(name))(**{"d_model": 16, "heads": 2} | options)


def draw(mixer: Mixer, length: int, batch: int = 2) -> Tensor:
    weight = mixer.o_proj.weight
    generator = torch.Generator().manual_seed(length)
    return torch.randn(batch, length, mixer.d_model, generator=generator, dtype=torch.float64).to(weight)


def close(x: Tensor, y: Tensor, tolerance: float = 1e-10) -> bool:
    return x.shape == y.shape and bool((x - y).detach().norm() <= tolerance * (1e-3 + y.detach().norm()))


def same_state(x: dict[str, Tensor], y: dict[str, Tensor], tolerance: float = 1e-10) -> bool:
    return x.keys() == y.keys() and all(close(x[name], y[name], tolerance) for name in x)


def total(*tensors: Tensor) -> Tensor:
    """A loss whose gradient tells places and channels apart."""
    return sum((x.sin() * torch.linspace(0.5, 1.5, x.numel()).to(x).view_as(x)).sum() for x in tensors)


@every_case
def test_parallel_is_the_recurrence(name, options):
    """Outputs, states and gradients, at lengths around a chunk and odd ones."""
    mixer = build(name, **options).double()
    x = draw(mixer, 100).requires_grad_()
    q, k, v, gates, _ = mixer.project(x)
    states, outputs, memory = {}, [], mixer.empty_state(q, v)
    for t in range(100):
        here = slice(t, t + 1)
        gate = {key: value[:, :, here] for key, value in gates.items()}
        o, memory = mixer.recurrence(q[:, :, here], k[:, :, here], v[:, :, here], gate, memory)
        outputs.append(o)
        states[t + 1] = memory
    stepped = torch.cat(outputs, dim=2)
    for length in (1, 31, 63, 64, 65, 100):
        gate = {key: value[:, :, :length] for key, value in gates.items()}
        o, memory = mixer.parallel(q[:, :, :length], k[:, :, :length], v[:, :, :length], gate)
        assert close(o, stepped[:, :, :length])
        assert same_state(memory, states[length])
    weights = [x, *mixer.parameters()]
    gradients = [
        torch.autograd.grad(total(out, *state.values()), weights, allow_unused=True, retain_graph=True)
        for out, state in ((o, memory), (stepped, states[100]))
    ]
    for parallel, recurrent in zip(*gradients, strict=True):
        assert (parallel is None) == (recurrent is None)
        assert parallel is None or close(parallel, recurrent, 1e-9)


@every_case
@pytest.mark.parametrize("cut", [1, 37, 64, 99])
def test_segments_join(name, options, cut):
    """A state handed over is as good as the segment that made it, for gradients too."""
    mixer = build(name, **options).double()
    x = draw(mixer, 100).requires_grad_()
    whole, end = mixer(x)
    first, state = mixer(x[:, :cut])
    second, state = mixer(x[:, cut:], state)
    parts = torch.cat([first, second], dim=1)
    assert close(parts, whole)
    assert same_state(state, end)
    gradients = [torch.autograd.grad(total(y, *s.values()), x)[0] for y, s in ((parts, state), (whole, end))]
    assert close(*gradients, 1e-9)


@every_case
def test_forward_is_a_loop_of_steps(name, options):
    """Through the whole module, short convolution, norms and gates included."""
    mixer = build(name, **options, output_norm=True, output_gate=True, conv_activation=True).double()
    x = draw(mixer, 20)
    state, outputs = mixer.initial_state(2), []
    for token in x.split(1, dim=1):
        y, state = mixer.step(token, state)
        outputs.append(y)
    whole, end = mixer(x)
    assert close(torch.cat(outputs, dim=1), whole)
    assert same_state(state, end)
    continued, _ = mixer(x[:, :5], end)
    assert close(continued[:, :1], mixer.step(x[:, :1], state)[0])


@every_case
@pytest.mark.parametrize("length", [32, 64])
def test_one_head_and_whole_chunks(name, options, length):
    """Where nothing is split or padded, tensors keep whatever strides the projections gave them."""
    mixer = build(name, **options, heads=1).double()
    x = draw(mixer, length)
    q, k, v, gates, _ = mixer.project(x)
    outputs = [getattr(mixer, form)(q, k, v, gates)[0] for form in ("parallel", "run_recurrence")]
    gradients = [torch.autograd.grad(total(o), [q, k, v], retain_graph=True) for o in outputs]
    assert close(*outputs)
    assert all(close(x, y, 1e-9) for x, y in zip(*gradients, strict=True))


@every_case
def test_causal(name, options):
    mixer = build(name, **options).double()
    x = draw(mixer, 90)
    later = x.clone()
    later[:, 70] += 1
    before, after = mixer(x)[0], mixer(later)[0]
    assert close(after[:, :70], before[:, :70], 1e-12)
    assert not torch.equal(after[:, 70], before[:, 70])


@every_case
def test_effective_attention_gives_the_outputs(name, options):
    mixer = build(name, **options)
    q, k, v, gates, _ = mixer.project(draw(mixer, 100))
    if not mixer.linear_in_v:
        with pytest.raises(TypeError, match="influence"):
            mixer.effective_attention(q, k, gates)
        return
    o, _ = mixer.parallel(q, k, v, gates)
    A = mixer.effective_attention(q, k, gates)
    assert close(A @ v, o, 1e-5)
    assert not A.triu(1).any()


@every_mechanism
@pytest.mark.parametrize("length", [1, 2, 70])
def test_state_size_is_what_steps_carry(name, length):
    mixer = build(name)
    state = mixer.initial_state()
    with torch.no_grad():
        for token in torch.zeros(1, length, 16).split(1, dim=1):
            _, state = mixer.step(token, state)
    elements = sum(part.numel() for part in state.values())
    assert mixer.state_size(length) == (elements, sum(p.numel() * p.element_size() for p in state.values()))


@every_case
def test_every_tensor_is_on_the_inputs_device(name, options):
    """On the meta device a tensor made anywhere else is an error."""
    mixer = build(name, **options).to("meta")
    x = torch.empty(2, 70, 16, device="meta")
    y, state = mixer(x)
    y, state = mixer(x, state)
    y, state = mixer.step(x[:, :1], state)
    assert {part.device.type for part in (y, *state.values(), *mixer.initial_state().values())} == {"meta"}
    if mixer.linear_in_v:
        q, k, _, gates, _ = mixer.project(x)
        assert mixer.effective_attention(q, k, gates).device.type == "meta"


@every_case
def test_half_precision(name, options):
    """Under bf16 autocast outputs and gradients are finite, near those in full precision, and memories stay float32."""
    mixer = build(name, **options)
    x = draw(mixer, 100)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = mixer(x)
        token, _ = mixer.step(x[:, :1], state)
    y.float().square().sum().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in mixer.parameters())
    assert torch.isfinite(token).all()
    full, _ = mixer(x)
    assert (y.float() - full).norm() < 0.1 * full.norm()


@every_case
def test_every_parameter_learns(name, options):
    mixer = build(name, **options, output_norm=True, output_gate=True)
    total(mixer(draw(mixer, 40))[0]).backward()
    still = [key for key, weight in mixer.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not still


@every_mechanism
def test_deterministic(name):
    def run() -> tuple[Tensor, ...]:
        mixer = build(name)
        y, _ = mixer(draw(mixer, 80))
        return y, *torch.autograd.grad(total(y), list(mixer.parameters()))

    assert all(torch.equal(x, y) for x, y in zip(run(), run(), strict=True))


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
    """Another value of any key of the file gives another mixer; of a word, nonsense is refused by its name."""
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
            others = [value / 2]
        else:
            with pytest.raises(ValueError, match=key):
                build(name, **{key: "nonsense"})
            continue
        assert any(differ(name, base, key, other) for other in others if other != value), key


def differ(name: str, base: Mixer, key: str, value) -> bool:
    """Whether that value of the key is refused by its name, or gives other outputs."""
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
def test_starting_values_survive_the_model(name):
    """Gate biases and the like are the mechanism's own: no model initialises them again."""
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
def test_docstring_says_what_it_is(name):
    """A plain sentence, the recurrence, A or why there is none, the state, the source."""
    text = type(build(name)).__doc__
    first, *rest = text.strip().splitlines()
    assert first.endswith(".")
    assert not set(first) & set("=_∈Σ")
    for part in ("A", "state:", "Source:"):
        assert part in "\n".join(rest), part


@every_mechanism
@pytest.mark.parametrize("strong", [-30.0, -80.0, -1000.0])
def test_strong_decays(name, strong):
    """A tenth of the decays near nought, the others weak, side by side in a chunk: float32 stays finite and right."""
    mixer = build(name, **{"d_key": 8, "qk_norm": True})
    q, k, v, gates, _ = mixer.project(draw(mixer, 100))
    if "log_decay" not in gates:
        return
    generator = torch.Generator().manual_seed(1)
    shape = gates["log_decay"].shape
    g = -0.1 * torch.rand(shape, generator=generator)
    g = torch.where(torch.rand(shape, generator=generator) < 0.1, strong * torch.rand(shape, generator=generator), g)
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
