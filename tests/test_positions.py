"""Positions: rotation and bias versus golden arrays and closed forms, what they depend on, and what states hold.

That every cache policy with positions equals its definition is tested in test_cache.py, and that segments and steps
continue exactly in test_mixer.py.
"""

import re

import pytest
import torch
from cache_definitions import POLICIES, draw, rotated
from conftest import config, golden, ratio
from hydra.utils import instantiate
from mixers import POSITIONED, build, close, same_state

from recall_lab.mixer.base import Trace
from recall_lab.mixer.forgetting import Forgetting
from recall_lab.mixer.positions import rotate, slopes, turn
from recall_lab.mixer.softmax import Softmax
from recall_lab.mixer.window import Window
from recall_lab.probe.queries import weights

KINDS = ("rotary", "alibi")


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_a_rotation_equals_the_golden_array(dtype, limit):
    parts = {name: x.to(dtype) for name, x in golden("parts").items() if name.startswith("rot")}
    x = turn(parts["rot_x"].transpose(1, 2), parts["rot_cos"][None, None], parts["rot_sin"][None, None])
    assert ratio(x.transpose(1, 2), golden("parts")["rotary"]) < limit


@pytest.mark.parametrize(("share", "base"), [(0.5, 10000), (1, 500.0), (0.25, 1)])
def test_angles_are_positions_times_powers_of_the_base(share, base):
    """They equal products of complex numbers e^(i t base^(−2i/r)), outputs and gradients."""
    x = torch.randn(2, 3, 40, 8, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    position = torch.arange(40)[None, None].double()
    turned, expected = rotate(x, position, round(share * 8), base), rotated(x, share, base)
    assert torch.allclose(turned, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (turned, expected)]
    assert torch.allclose(*grads, rtol=0, atol=1e-12)


def test_logits_of_rotated_vectors_depend_on_the_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0)).double()
    place = torch.tensor([0, 7, 1000, 1007, 5000, 5007]).double()[None, None]
    q, k = (rotate(x.expand(1, 1, 6, 16), place, 16, 10000) for x in (q, k))
    logits = (q @ k.mT)[0, 0]
    assert torch.allclose(logits[[1, 3, 5], [0, 2, 4]], logits[1, 0], rtol=0, atol=1e-10)
    assert (logits[1, 0] - logits[3, 0]).abs() > 0.1


def test_the_published_slopes():
    x = torch.zeros(1)
    assert slopes(8, x).tolist() == [2**-i for i in range(1, 9)]
    assert slopes(16, x.double()).tolist() == pytest.approx([2 ** (-i / 2) for i in range(1, 17)], rel=1e-12)
    assert slopes(1, x).tolist() == [2**-8]


def test_alibi_is_a_constant_forget_gate():
    """Forgetting with log_forget = −m_h subtracts m_h for each position of distance: an implementation of its own."""
    q, k, v = draw(150)
    gate = {"log_forget": -slopes(2, q)[None, :, None].expand(2, 2, 150)}
    expected, _ = Forgetting(d_model=8, heads=2).parallel(q, k, v, gate)
    mixer = Softmax(d_model=8, heads=2, positions="alibi")
    assert close(mixer.parallel(q, k, v, {})[0], expected, 1e-12)
    twice = {"log_forget": 2 * gate["log_forget"]}
    expected, _ = Forgetting(d_model=8, heads=2).parallel(q, k, v, twice)
    assert close(Forgetting(d_model=8, heads=2, positions="alibi").parallel(q, k, v, gate)[0], expected, 1e-12)


def test_softmax_without_positions_ignores_the_order_of_the_past():
    q, k, v = draw(30)
    order = torch.cat([torch.arange(29).flip(0), torch.tensor([29])])
    for positions in ("none", *KINDS):
        mixer = Softmax(d_model=8, heads=2, positions=positions)
        same, other = (mixer.parallel(q, x, y, {})[0][:, :, -1] for x, y in ((k, v), (k[:, :, order], v[:, :, order])))
        assert close(same, other, 1e-12) == (positions == "none")


@pytest.mark.parametrize("positions", KINDS)
def test_a_window_is_the_same_wherever_it_is(positions):
    """Far beyond any trained length: what left the window, and how much of it, has no effect."""
    q, k, v = (x.float() for x in draw(3000))
    mixer = Window(d_model=8, heads=2, budget=6, positions=positions)
    late = mixer.parallel(q, k, v, {})[0][:, :, -20:]
    start = mixer.parallel(*(x[:, :, -25:] for x in (q, k, v)), {})[0][:, :, -20:]
    assert (late - start).abs().max() < 2e-3
    exact = mixer.parallel(*(x.double() for x in (q, k, v)), {})[0][:, :, -20:]
    assert torch.allclose(exact, mixer.parallel(*(x[:, :, -25:].double() for x in (q, k, v)), {})[0][:, :, -20:])


@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_small_caches_continue_from_a_state(policy, positions):
    """Segments, steps and a mixture of both, with a budget that evicts within every segment."""
    options = {"paged": {"budget": 6, "page": 3}, "sink_window": {"budget": 6, "sinks": 2}, "softmax": {}}
    make = POLICIES[policy][0]
    mixer = make(d_model=8, heads=2, positions=positions, **options.get(policy, {"budget": 5}))
    q, k, v = draw(70)
    o, end = mixer.parallel(q, k, v, {})
    for cuts in ([1, 1, 68], [13, 57], [66, 4]):
        outputs, state = [], None
        for parts in zip(*(x.split(cuts, dim=2) for x in (q, k, v)), strict=True):
            form = mixer.run_recurrence if parts[0].shape[2] < 10 else mixer.parallel
            output, state = form(*parts, {}, state)
            outputs.append(output)
        assert close(torch.cat(outputs, dim=2), o, 1e-12)
        assert same_state(state, end, 1e-12)


@pytest.mark.parametrize("positions", KINDS)
def test_a_sequence_does_not_depend_on_others_in_its_batch(positions):
    """Nor on how many tokens they have seen: states of different lengths may share a batch where they have one size."""
    mixer = Window(d_model=8, heads=2, budget=4, positions=positions)
    q, k, v = draw(40)
    states = [mixer.parallel(*(x[:1, :, :n] for x in (q, k, v)), {})[1] for n in (9, 30)]
    new = [x[1:, :, :5] for x in (q, k, v)]
    alone = [mixer.parallel(*new, {}, state)[0] for state in states]
    both = {name: torch.cat([state[name] for state in states]) for name in states[0]}
    together = mixer.parallel(*(x.expand(2, -1, -1, -1) for x in new), {}, both)[0]
    assert close(together, torch.cat(alone), 1e-12)


@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize("name", POSITIONED)
def test_weights_of_a_changed_query_are_those_of_its_position(name, positions):
    """A probe that steps from a state, with q and k of the trace, finds the row of A that the model used."""
    mixer = build(name, positions=positions).double()
    q, k, v, gates, _ = mixer.project(torch.randn(2, 80, 16, generator=torch.Generator().manual_seed(0)).double())
    o, _ = mixer.parallel(q, k, v, gates)
    trace = Trace(mixer, q, k, v, gates, o, torch.zeros(2, 80, dtype=torch.int64))
    A = mixer.effective_attention(q, k, gates)
    assert close(A @ v, o, 1e-12)
    assert close(weights(trace, q[:, :, 70:71], 70)[:, :, 0], A[:, :, 70, :71], 1e-12)


def test_states_grow_by_what_positions_need():
    """With 16 numbers per token: rotary counts tokens per head; ALiBi needs ages where evictions leave gaps."""
    for name, kept, alibi in (("softmax", 90, 0), ("window", 63, 0), ("sink_window", 63, 63), ("heavy_hitter", 63, 63)):
        sizes = [
            build(name, positions=positions, short_conv=0).state_size(90)[0]
            for positions in ("none", "rotary", "alibi")
        ]
        own = 2 * kept * (17 if name == "heavy_hitter" else 16)
        assert sizes == [own, own + 2, own + 2 * alibi], name


def test_a_rotation_in_half_precision_is_rounded_once():
    """Angles of thousands of radians in bfloat16 would be noise."""
    x = torch.randn(1, 1, 4000, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    position = torch.arange(4000)[None, None]
    with torch.autocast("cpu", torch.bfloat16):
        turned = rotate(x, position.float(), 8, 10000)
    assert turned.dtype == torch.bfloat16
    exact = rotate(x.double(), position.double(), 8, 10000)
    assert ((turned - exact).abs() <= 2**-8 * exact.abs() + 1e-3).all()


def test_the_bias_of_alibi_is_not_rounded_to_half_precision():
    """With q = 0 weights are known: their relative error is that of a bfloat16 output, also at large distances."""
    n, mixer = 2000, Softmax(d_model=4, positions="alibi")
    q, v = torch.zeros(1, 1, n, 4), torch.eye(n)[None, None, :, :40]
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = mixer.parallel(q.bfloat16(), q.bfloat16(), v.bfloat16(), {})
    expected = torch.softmax(-(2**-8) * torch.arange(n - 1, -1, -1.0), dim=0)[:40]
    assert torch.allclose(o[0, 0, -1].float(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("positions=sinusoidal", "positions='sinusoidal': must be one of none, rotary, alibi"),
        ("positions=rotary mixer.rotary_share=1.5", "rotary_share=1.5: must be a number from 0 to 1"),
        ("positions=rotary mixer.rotary_base=0", "rotary_base=0: must be a number of at least 1"),
        ("rotary_share=0.25", "rotary_share=0.25 has an effect only with positions=rotary, not none"),
        (
            "positions=alibi mixer.rotary_base=500",
            "rotary_base=500 has an effect only with positions=rotary, not alibi",
        ),
        *(
            (
                f"positions=rotary mixer.d_key={d_key} mixer.rotary_share={share}",
                f"rotary_share={share}: must rotate an even number of the d_key={d_key} channels of a head, "
                f"at least 2, not {channels}",
            )
            for d_key, share, channels in ((5, 1, 5), (5, 0.5, 2.5), (2, 0.5, 1), (6, 0.5, 3), (8, 0, 0))
        ),
    ],
)
@pytest.mark.parametrize("name", ["softmax", "merging"])
def test_impossible_positions_are_refused(name, overrides, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        instantiate(config(f"mixer={name}", *f"mixer.{overrides}".split()).mixer)(d_model=16)


def test_a_third_of_six_channels_is_a_pair():
    mixer = Softmax(d_model=6, positions="rotary", rotary_share=0.33333)
    assert mixer.rotated == 2
