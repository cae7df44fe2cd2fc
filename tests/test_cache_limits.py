"""Cache policies and vector states in limiting cases: empty segments, single positions, gates of −inf, bad options."""

from functools import cache

import jaxtyping
import pytest
import torch
from cache_definitions import draw
from conftest import config
from hydra.utils import instantiate

from recall_lab.mixer.base import Mixer
from recall_lab.mixer.forgetting import Forgetting
from recall_lab.mixer.heavy_hitter import HeavyHitter
from recall_lab.mixer.merging import Merging

composed = cache(lambda name: config(f"mixer={name}").mixer)


def build(name: str, **options) -> Mixer:
    """A mixer of conf/mixer, "NAME+OPTION" with this option, in float64 and without a short convolution."""
    name, _, option = name.partition("+")
    options |= {option: True} if option else {}
    options |= {"budget": 4} if "budget" in composed(name) else {}
    options |= {"paged": {"page": 2}, "sink_window": {"sinks": 1}, "nsa": {"block_size": 1}}.get(name, {})
    return instantiate(composed(name))(d_model=8, short_conv=0, **options).double()


NAMES = [
    "softmax", "softmax+learned_sink", "forgetting", "window", "sink_window", "heavy_hitter", "merging", "top_k",
    "paged", "random_k", "stickbreaking_attn+remainder", "nsa", "dsa", "path_attn", "deltaformer",
    "rnn", "lstm",
]  # fmt: skip


UNBALANCED = {"rnn", "lstm", "softmax+learned_sink", "nsa", "deltaformer"}
"""Those without weights, or whose weights need not be positive and sum to one."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("batch", "heads", "d_key", "d_value"), [(1, 1, 8, 8), (3, 1, 2, 5), (1, 2, 5, 3)])
@pytest.mark.parametrize("length", [0, 1, 2, 7])
def test_parallel_equals_recurrence_for_any_shape(name, batch, heads, d_key, d_value, length):
    """The parallel form equals the recurrence in outputs and state, even for zero positions."""
    torch.manual_seed(0)
    mixer = build(name, heads=heads, d_key=d_key, d_value=d_value)
    x = torch.randn(batch, length, 8).double().requires_grad_()
    q, k, v, gates, _ = mixer.project(x)
    o, state = mixer.parallel(q, k, v, gates)
    assert o.shape == (batch, heads, length, d_value)
    if length:
        o_steps, expected = mixer.run_recurrence(q, k, v, gates)
        assert torch.allclose(o, o_steps, rtol=0, atol=1e-12)
        assert torch.autograd.grad(o.square().sum(), x)[0].isfinite().all()
    else:
        expected = mixer.empty_state(q, v)
    assert state.keys() == expected.keys()
    for part in state:
        assert state[part].shape == expected[part].shape
        assert torch.allclose(state[part], expected[part], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("filled", [0, 1, 9])
def test_an_empty_segment_keeps_the_state(name, filled):
    torch.manual_seed(0)
    mixer = build(name, heads=2)
    x = torch.randn(2, filled + 3, 8).double()
    state = mixer.initial_state(2)
    if filled:
        _, state = mixer(x[:, :filled], state)
    y, after = mixer(x[:, :0], state)
    assert y.shape == (2, 0, 8)
    assert all(after[part].equal(state[part]) for part in state | after)
    for following in (mixer(x[:, filled:], after)[0], mixer(x[:, filled:], state)[0]):
        assert torch.allclose(following, mixer(x)[0][:, filled:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNBALANCED])
def test_every_query_attends_to_something(name):
    """The weights of each query are nonnegative and sum to one, so no query is fully masked."""
    torch.manual_seed(0)
    mixer = build(name)
    q, k, _, gates, _ = mixer.project(3 * torch.randn(2, 80, 8).double())
    if name == "forgetting":
        gates = {"log_forget": torch.full_like(gates["log_forget"], -torch.inf)}
    A = mixer.effective_attention(q, k, gates)
    assert (A >= 0).all()
    assert torch.allclose(A.sum(-1), torch.ones(()).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("block", [64, 5, None])
def test_a_forget_gate_of_minus_infinity_forgets_everything(block, dtype):
    """No weight is left on tokens before the last such gate. Gradients are finite, and zero for that gate."""
    q, k, v = (x.to(dtype).requires_grad_() for x in draw(70))
    gate = torch.randn(2, 2, 70, generator=torch.Generator().manual_seed(1)).to(dtype).abs().neg()
    gate[..., [0, 9, 10, 64]] = -torch.inf
    gate.requires_grad_()
    bias = torch.full((2, 2, 70, 70), -torch.inf, dtype=dtype)
    for t in range(70):
        for s in range(t + 1):
            bias[:, :, t, s] = gate.detach()[:, :, s + 1 : t + 1].sum(-1)
    expected = torch.softmax(q @ k.mT / 2 + bias, dim=-1) @ v
    mixer = Forgetting(d_model=8, heads=2)
    if block:
        mixer.block = block
        o, _ = mixer.parallel(q, k, v, {"log_forget": gate})
    else:
        o, _ = mixer.run_recurrence(q, k, v, {"log_forget": gate})
    assert torch.allclose(o, expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)
    grads = torch.autograd.grad(o.square().sum(), (q, k, v, gate))
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[3][..., [0, 9, 10, 64]] == 0).all()


def test_heavy_hitter_can_evict_the_first_token_at_its_smallest_budget():
    """With keys −30, 0, 0, … only its own query gives weight to the first token. A budget of 2 would keep it."""
    k = torch.zeros(1, 1, 12, 1).double()
    k[:, :, 0] = -30
    mixer = HeavyHitter(d_model=1, budget=HeavyHitter.least_budget)
    assert (mixer.parallel(torch.ones_like(k), k, k, {})[1]["k"] == 0).all()
    with pytest.raises(ValueError, match=r"^budget=2: must be a whole number of at least 3$"):
        HeavyHitter(d_model=1, budget=2)


def test_merging_a_key_of_zeros():
    """Its cosine with every slot is 0. In both forms it is merged with the first of the slots that tie."""
    q, k, v = draw(12)
    k[:, :, :3] = 0
    k[:, :, 7] = 0
    for budget in (2, 4, 7):
        mixer = Merging(d_model=8, heads=2, budget=budget)
        o, state = mixer.parallel(q, k, v, {})
        steps, expected = mixer.run_recurrence(q, k, v, {})
        assert o.isfinite().all()
        assert torch.allclose(o, steps, rtol=0, atol=1e-12)
        assert state["count"].equal(expected["count"])


def test_forgetting_is_exact_after_strong_decay():
    """A strong decay in the far past does not reduce the precision of recent weights."""
    n = 700
    q, k, v = draw(n)
    gate = torch.full((2, 2, n), -30.0).double()
    gate[:, :, -40:] = -0.01
    mixer = Forgetting(d_model=8, heads=2)
    exact, _ = mixer.parallel(q, k, v, {"log_forget": gate})
    o, state = mixer.parallel(q.float(), k.float(), v.float(), {"log_forget": gate.float()})
    assert (o - exact)[:, :, -40:].abs().max() < 2e-6
    assert torch.allclose(
        state["decay"][:, :, -40:].double(), gate[:, :, -40:].flip(2).cumsum(2).flip(2) + 0.01, atol=1e-6
    )


def test_forgetting_is_finite_for_any_gate():
    q, k, v = (x.float().requires_grad_() for x in draw(130))
    gate = torch.linspace(-1e4, 0, 130).expand(2, 2, 130).clone().requires_grad_()
    o, _ = Forgetting(d_model=8, heads=2).parallel(q, k, v, {"log_forget": gate})
    grads = torch.autograd.grad(o.square().sum(), (q, k, v, gate))
    assert all(x.isfinite().all() for x in (o, *grads))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("mixer=window mixer.budget=0", "budget=0: must be a whole number of at least 1"),
        ("mixer=window mixer.budget=true", "budget=True: must be a whole number of at least 1"),
        ("mixer=top_k mixer.budget=2.5", "budget=2.5: must be a whole number of at least 1"),
        ("mixer=top_k mixer.kept=63", "kept=63: must be at least budget=64"),
        ("mixer=top_k mixer.kept=70.5", "kept=70.5: must be a whole number of at least 1"),
        ("mixer=random_k mixer.draw_seed=-1", "draw_seed=-1: must be a whole number of at least 0"),
        ("mixer=random_k mixer.draw_seed=4294967296", r"draw_seed=4294967296: must be less than 2\^32"),
        ("mixer=heavy_hitter mixer.budget=x", "budget='x': must be a whole number of at least 3"),
        ("mixer=merging mixer.budget=1", "budget=1: must be a whole number of at least 2"),
        ("mixer=sink_window mixer.sinks=64", "sinks=64: must be less than budget=64"),
        ("mixer=sink_window mixer.sinks=-1", "sinks=-1: must be a whole number of at least 0"),
        ("mixer=sink_window mixer.sinks=1.5", "sinks=1.5: must be a whole number of at least 0"),
        ("mixer=paged mixer.page=0", "page=0: must be a whole number of at least 1"),
        ("mixer=paged mixer.page=true", "page=True: must be a whole number of at least 1"),
        ("mixer=paged mixer.page=7", "page=7: must divide budget=64"),
        ("mixer=softmax mixer.learned_sink=2", "learned_sink=2: must be true or false"),
    ],
)
def test_impossible_options_are_refused(overrides, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the mixer must refuse, not a type check
    with pytest.raises(ValueError, match=f"^{message}$"):
        instantiate(config(*overrides.split()).mixer)(d_model=16)
