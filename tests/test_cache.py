"""Every cache policy equals its definition and reduces to its special cases."""

import hypothesis.strategies as st
import pytest
import torch
from cache_definitions import CASES, DYNAMIC, IDS, POLICIES, by_definition, draw
from conftest import config
from hydra.utils import instantiate
from hypothesis import given, settings

from recall_lab.mixer.forgetting import Forgetting
from recall_lab.mixer.heavy_hitter import HeavyHitter
from recall_lab.mixer.merging import Merging
from recall_lab.mixer.paged import Paged
from recall_lab.mixer.random_k import RandomK, drawn
from recall_lab.mixer.sink_window import SinkWindow
from recall_lab.mixer.softmax import Softmax
from recall_lab.mixer.top_k import TopK
from recall_lab.mixer.window import Window

BUDGETED = [name for name in POLICIES if name != "softmax"]


lengths = st.integers(1, 90)


@pytest.mark.parametrize("positions", ["none", "rotary", "alibi"])
@pytest.mark.parametrize(("policy", "options"), CASES, ids=IDS)
def test_policy_equals_its_definition(policy, options, positions):
    """Outputs, gradients, weights and state equal the definition: in one block, in several, and step by step."""
    tensors = [x.requires_grad_() for x in draw(19)]
    direction = draw(19, seed=1)[2]
    o, A, state = by_definition(policy, options, *tensors, positions)
    gradient = torch.autograd.grad((o * direction).sum(), tensors)
    mixer = POLICIES[policy][0](d_model=8, heads=2, positions=positions, **options)
    for how, block in (("parallel", 64), ("parallel", 5), ("run_recurrence", 64)):
        mixer.block = block
        output, final = getattr(mixer, how)(*tensors, {})
        assert torch.allclose(output, o, rtol=0, atol=1e-12)
        grads = torch.autograd.grad((output * direction).sum(), tensors)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-11) for a, b in zip(grads, gradient, strict=True))
        for name, part in final.items():
            assert torch.allclose(part, state[name], rtol=0, atol=1e-12), name
        weight = mixer.effective_attention(*tensors[:2], {})
        assert torch.allclose(weight, A, rtol=0, atol=1e-12)
        assert (weight == 0).equal(A == 0)


@pytest.mark.parametrize(("policy", "options"), CASES, ids=IDS)
def test_float32(policy, options):
    """Equal up to float32 precision, on data where no choice of tokens depends on the last bits."""
    o, _, _ = by_definition(policy, options, *draw(19))
    output, _ = POLICIES[policy][0](d_model=8, heads=2, **options).parallel(*(x.float() for x in draw(19)), {})
    assert torch.allclose(output.double(), o, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("policy", "options"), [c for c in CASES if c[0] in DYNAMIC and c[1]])
@pytest.mark.parametrize("block", [64, 4])
def test_ties_are_won_by_the_earliest_token(policy, options, block):
    """Small integers as inputs make many logits and bounds exactly equal."""
    q, k, _ = (
        torch.randint(-1, 2, (2, 2, 23, 4), generator=torch.Generator().manual_seed(i)).double() for i in range(3)
    )
    mixer = POLICIES[policy][0](d_model=8, heads=2, **options)
    mixer.block = block
    _, A, _ = by_definition(policy, options, q, k, q)
    assert torch.allclose(mixer.effective_attention(q, k, {}), A, rtol=0, atol=1e-12)


@pytest.mark.parametrize("w", [1, 2, 7, 64, 65])
@pytest.mark.parametrize("sinks", [None, 3])
def test_window_includes_exactly_w_tokens(w, sinks):
    """The token at distance w − 1 is attended to, the one at distance w is not: the current token counts as one."""
    n = 150
    mixer = (
        Window(d_model=8, heads=2, budget=w) if sinks is None else SinkWindow(d_model=8, budget=w + sinks, sinks=sinks)
    )
    A = mixer.effective_attention(*draw(n)[:2], {})
    distance = torch.arange(n)[:, None] - torch.arange(n)
    seen = (distance >= 0) & (distance < w)
    if sinks:
        seen |= (distance >= 0) & (torch.arange(n) < sinks)
    assert (A > 0).equal(seen.expand_as(A))


@pytest.mark.parametrize("policy", BUDGETED)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(length=lengths, more=st.integers(0, 3), seed=st.integers(0, 99))
def test_a_budget_for_all_tokens_equals_softmax(policy, length, more, seed):
    budget = max(length + more, 5)
    options = {"budget": budget, "page": 4} if policy == "paged" else {"budget": budget}
    if policy == "paged":
        options["budget"] += -budget % 4
    q, k, v = draw(length, seed)
    o, _ = Softmax(d_model=8, heads=2).parallel(q, k, v, {})
    mixer = POLICIES[policy][0](d_model=8, heads=2, **options)
    assert torch.allclose(mixer.parallel(q, k, v, {})[0], o, rtol=0, atol=1e-12)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(length=lengths, budget=st.integers(1, 40), seed=st.integers(0, 99))
def test_reductions(length, budget, seed):
    q, k, v = draw(length, seed)
    outputs = {
        "no sinks": (SinkWindow(d_model=8, budget=budget, sinks=0), Window(d_model=8, budget=budget), {}),
        "a cache of as many": (TopK(d_model=8, budget=budget, kept=budget), Window(d_model=8, budget=budget), {}),
        "a cache of all": (TopK(d_model=8, budget=budget, kept=length + budget), TopK(d_model=8, budget=budget), {}),
        "pages of one": (Paged(d_model=8, budget=budget, page=1), TopK(d_model=8, budget=budget), {}),
        "no forgetting": (
            Forgetting(d_model=8),
            Softmax(d_model=8),
            {"log_forget": torch.zeros(2, 2, length).double()},
        ),
    }
    for name, (mixer, other, gates) in outputs.items():
        same, _ = other.parallel(q, k, v, {})
        assert torch.allclose(mixer.parallel(q, k, v, gates)[0], same, rtol=0, atol=1e-12), name


@settings(max_examples=20, deadline=None, derandomize=True)
@given(length=lengths, budget=st.integers(2, 20), seed=st.integers(0, 99))
def test_merging_loses_no_token(length, budget, seed):
    q, k, v = draw(length, seed)
    _, final = Merging(d_model=8, budget=budget).parallel(q, k, v, {})
    assert (final["count"].sum(-1) == length).all()
    assert final["count"].shape[-1] == min(length, budget - 1)
    total = (final["count"][..., None] * final["v"]).sum(2)
    assert torch.allclose(total, v.sum(2), rtol=0, atol=1e-10)


def test_merging_equal_keys_changes_nothing():
    """With at least as many slots as different keys, only tokens with equal keys share a slot: merging is exact."""
    q, k, v = draw(80)
    k = k[:, :, torch.arange(80) % 8]
    o, _ = Softmax(d_model=8).parallel(q, k, v, {})
    assert torch.allclose(Merging(d_model=8, budget=16).parallel(q, k, v, {})[0], o, rtol=0, atol=1e-12)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(length=lengths, budget=st.integers(1, 40), seed=st.integers(0, 99))
def test_top_k_keeps_more_weight_than_any_other_choice(length, budget, seed):
    q, k, _ = draw(length, seed)
    full = Softmax(d_model=8).effective_attention(q, k, {})
    share = {}
    for policy in (TopK, Window, HeavyHitter, Paged, RandomK):
        if budget < policy.least_budget:
            continue
        options = {"page": 1} if policy is Paged else {}
        A = policy(d_model=8, budget=budget, **options).effective_attention(q, k, {})
        assert ((A > 0).sum(-1) <= budget).all()
        share[policy] = (full * (A > 0)).sum(-1)
    assert all((share[TopK] >= other - 1e-12).all() for other in share.values())


def test_random_tokens_are_drawn_evenly_and_independently():
    """Of many draws: every past token equally often, at every distance, and two successive draws overlap by chance."""
    n, count = 257, 17
    chosen = torch.stack([drawn(n, n, count, seed, torch.device("cpu")) for seed in range(200)]).double()
    assert (chosen.sum(-1) == torch.arange(1, n + 1).clamp(max=count)).all()
    assert (chosen.diagonal(dim1=1, dim2=2) == 1).all()
    share = (count - 1) / 256
    last, before = chosen[:, 256, :255], chosen[:, 255, :255]
    error = (share * (1 - share) / len(chosen)) ** 0.5
    assert (last.mean(0) - share).abs().max() < 4.5 * error  # of 255 tokens
    assert (last.mean() - share).abs() < 0.01 * share
    assert (last * before).mean() == pytest.approx(share * 16 / 255, rel=0.1)


def test_random_tokens_do_not_depend_on_content():
    """Nor on heads, sequences and segments; another seed draws others."""
    q, k, _ = draw(90)
    A = RandomK(d_model=8, heads=2, budget=6).effective_attention(q, k, {}) > 0
    assert A.equal(drawn(90, 90, 6, 0, q.device).expand_as(A))
    assert drawn(7, 90, 6, 0, q.device).equal(drawn(90, 90, 6, 0, q.device)[-7:])
    assert not drawn(90, 90, 6, 1, q.device).equal(drawn(90, 90, 6, 0, q.device))


@pytest.mark.parametrize("policy", BUDGETED)
def test_every_parameter_gets_a_gradient(policy):
    mixer = instantiate(config(f"mixer={policy}", "mixer.budget=16").mixer)(d_model=16)
    mixer(torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0)))[0].square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in mixer.parameters())


def test_the_state_of_top_k_is_bounded_by_the_tokens_kept():
    """Not by the budget; without the option it grows."""
    mixers = [
        instantiate(config("mixer=top_k", f"mixer.kept={kept}", "mixer.budget=4", "mixer.short_conv=0").mixer)
        for kept in (16, "null")
    ]
    sizes = [[mixer(d_model=16).state_size(n)[0] for n in (1, 15, 16, 100)] for mixer in mixers]
    assert sizes == [[32, 480, 480, 480], [32, 480, 512, 3200]]


@pytest.mark.parametrize("policy", ["window", "sink_window", "heavy_hitter", "merging"])
def test_the_state_of_a_static_policy_is_bounded(policy):
    mixer = instantiate(config(f"mixer={policy}", "mixer.budget=16", "mixer.short_conv=0").mixer)(d_model=16)
    extra = {"heavy_hitter": 1, "merging": 1}.get(policy, 0)
    assert [mixer.state_size(n)[0] for n in (1, 10, 15, 16, 100)] == [(32 + extra) * n for n in (1, 10, 15, 15, 15)]
