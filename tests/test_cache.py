"""Every cache policy against its definition, written a second time as loops over places, slots and channels."""

from collections.abc import Callable
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from conftest import config
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from hypothesis import given, settings

from recall_lab.mixer.forgetting import Forgetting
from recall_lab.mixer.heavy_hitter import HeavyHitter
from recall_lab.mixer.merging import Merging
from recall_lab.mixer.paged import Paged
from recall_lab.mixer.sink_window import SinkWindow
from recall_lab.mixer.softmax import Softmax
from recall_lab.mixer.top_k import TopK
from recall_lab.mixer.window import Window
from recall_lab.model import Model

Groups = list[list[int]]
"""What one query looks at: slots, each of one token or (merging) of several."""


def weights(q: torch.Tensor, k: torch.Tensor, slots: Groups) -> torch.Tensor:
    """Softmax over the slots, each counting as many times as it holds tokens."""
    keys = torch.stack([k[slot].mean(0) for slot in slots])
    sizes = torch.tensor([float(len(slot)) for slot in slots], dtype=q.dtype)
    return torch.softmax(keys @ q / q.numel() ** 0.5 + sizes.log(), dim=0)


# Each of these says, for every place of one sequence and head, what it looks at.


def softmax(q, k) -> list[Groups]:
    return [[[s] for s in range(t + 1)] for t in range(len(q))]


def window(q, k, *, budget) -> list[Groups]:
    return [[[s] for s in range(t + 1) if t - s < budget] for t in range(len(q))]


def sink_window(q, k, *, budget, sinks) -> list[Groups]:
    return [[[s] for s in range(t + 1) if s < sinks or t - s < budget - sinks] for t in range(len(q))]


def top_k(q, k, *, budget) -> list[Groups]:
    logits = q @ k.T
    ranked = [sorted(range(t + 1), key=lambda s, t=t: (-float(logits[t, s]), s)) for t in range(len(q))]
    return [[[s] for s in sorted(order[:budget])] for order in ranked]


def paged(q, k, *, budget, page) -> list[Groups]:
    looked_at = []
    for t in range(len(q)):
        pages = [range(start, min(start + page, t + 1)) for start in range(0, t + 1, page)]
        bounds = [sum(max(float(q[t, c] * k[s, c]) for s in places) for c in range(q.shape[1])) for places in pages]
        order = sorted(range(len(pages)), key=lambda p, bounds=bounds: (-bounds[p], p))
        looked_at.append([[s] for p in sorted(order[: budget // page]) for s in pages[p]])
    return looked_at


def heavy_hitter(q, k, *, budget) -> list[Groups]:
    there, mass, looked_at = [], {}, []
    for t in range(len(q)):
        if len(there) == budget:
            old = [s for s in there if s <= t - (budget + 1) // 2]
            there.remove(min(old, key=lambda s: (mass[s], s)))
        there.append(t)
        mass[t] = 0.0
        for s, weight in zip(there, weights(q[t], k, [[s] for s in there]), strict=True):
            mass[s] += float(weight)
        looked_at.append([[s] for s in there])
    return looked_at


def merging(q, k, *, budget) -> list[Groups]:
    slots, recent, looked_at = [], [], []
    for t in range(len(q)):
        recent.append(t)
        if len(recent) > (budget + 1) // 2:
            leaves = recent.pop(0)
            if len(slots) < budget // 2:
                slots.append([leaves])
            else:
                likeness = [torch.cosine_similarity(k[slot].mean(0), k[leaves], dim=0) for slot in slots]
                slots[likeness.index(max(likeness))].append(leaves)
        looked_at.append([list(slot) for slot in slots] + [[s] for s in recent])
    return looked_at


POLICIES: dict[str, tuple[type, Callable[..., list[Groups]], list[dict[str, int]]]] = {
    "softmax": (Softmax, softmax, [{}]),
    "window": (Window, window, [{"budget": b} for b in (1, 2, 5, 16, 40)]),
    "sink_window": (SinkWindow, sink_window, [{"budget": b, "sinks": s} for b, s in [(1, 0), (4, 3), (9, 2), (40, 4)]]),
    "top_k": (TopK, top_k, [{"budget": b} for b in (1, 2, 7, 40)]),
    "paged": (Paged, paged, [{"budget": b, "page": p} for b, p in [(1, 1), (4, 4), (9, 3), (10, 5), (40, 8)]]),
    "heavy_hitter": (HeavyHitter, heavy_hitter, [{"budget": b} for b in (1, 2, 5, 8, 40)]),
    "merging": (Merging, merging, [{"budget": b} for b in (2, 3, 6, 9, 40)]),
}
DYNAMIC = {"softmax", "top_k", "paged"}
CASES = [(name, options) for name, (_, _, cases) in POLICIES.items() for options in cases]
IDS = [f"{name} {' '.join(map(str, options.values()))}" for name, options in CASES]


def draw(length: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v of two sequences and two heads, keys four wide and values three."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 2, length, width, generator=generator, dtype=dtype).mul(1.5) for width in (4, 4, 3)]


def by_definition(policy: str, options: dict, q, k, v) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Outputs, weights on tokens, and the state: for a static policy what one more place would look at of the past."""
    look = partial(POLICIES[policy][1], **options)
    n = q.shape[2]
    A = [[None] * q.shape[1] for _ in q]
    state = {name: [[None] * q.shape[1] for _ in q] for name in ("k", "v", "count", "mass")}
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            looked_at = look(q[b, h].detach(), k[b, h].detach())
            rows = []
            for t, slots in enumerate(looked_at):
                share = weights(q[b, h, t], k[b, h], slots)
                row = torch.zeros(n, dtype=q.dtype)
                for weight, slot in zip(share, slots, strict=True):
                    row[slot] = weight / len(slot)
                rows.append(row)
            A[b][h] = torch.stack(rows)
            kept = [[s] for s in range(n)]
            if policy not in DYNAMIC:
                longer = [torch.cat([x[b, h].detach(), torch.ones_like(x[b, h, :1])]) for x in (q, k)]
                kept = look(*longer)[-1][:-1]
            for name, x in (("k", k), ("v", v)):
                means = [x[b, h, slot].mean(0) for slot in kept]
                state[name][b][h] = torch.stack(means) if means else x[b, h, :0]
            state["count"][b][h] = torch.tensor([float(len(slot)) for slot in kept], dtype=q.dtype)
            state["mass"][b][h] = A[b][h].sum(0)[[s for slot in kept for s in slot]]
    A = torch.stack([torch.stack(row) for row in A])
    return A @ v, A, {name: torch.stack([torch.stack(row) for row in rows]) for name, rows in state.items()}


@pytest.mark.parametrize(("policy", "options"), CASES, ids=IDS)
def test_definition(policy, options):
    """Outputs, gradients, weights and state, in one block, in several, and by steps."""
    tensors = [x.requires_grad_() for x in draw(19)]
    direction = draw(19, seed=1)[2]
    o, A, state = by_definition(policy, options, *tensors)
    gradient = torch.autograd.grad((o * direction).sum(), tensors)
    mixer = POLICIES[policy][0](d_model=8, heads=2, **options)
    for how, block in (("parallel", 64), ("parallel", 5), ("run_recurrence", 64)):
        mixer.block = block
        output, memory = getattr(mixer, how)(*tensors, {})
        assert torch.allclose(output, o, rtol=0, atol=1e-12)
        grads = torch.autograd.grad((output * direction).sum(), tensors)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-11) for a, b in zip(grads, gradient, strict=True))
        for name, part in memory.items():
            assert torch.allclose(part, state[name], rtol=0, atol=1e-12), name
        weight = mixer.effective_attention(*tensors[:2], {})
        assert torch.allclose(weight, A, rtol=0, atol=1e-12)
        assert (weight == 0).equal(A == 0)


@pytest.mark.parametrize(("policy", "options"), CASES, ids=IDS)
def test_float32(policy, options):
    """The same to single precision, as long as no choice hangs on its last bits."""
    o, _, _ = by_definition(policy, options, *draw(19))
    output, _ = POLICIES[policy][0](d_model=8, heads=2, **options).parallel(*(x.float() for x in draw(19)), {})
    assert torch.allclose(output.double(), o, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("policy", "options"), [c for c in CASES if c[0] in DYNAMIC and c[1]])
@pytest.mark.parametrize("block", [64, 4])
def test_of_equal_scores_the_earliest_win(policy, options, block):
    """Small whole numbers make many logits and bounds exactly equal."""
    q, k, _ = (
        torch.randint(-1, 2, (2, 2, 23, 4), generator=torch.Generator().manual_seed(i)).double() for i in range(3)
    )
    mixer = POLICIES[policy][0](d_model=8, heads=2, **options)
    mixer.block = block
    _, A, _ = by_definition(policy, options, q, k, q)
    assert torch.allclose(mixer.effective_attention(q, k, {}), A, rtol=0, atol=1e-12)


@pytest.mark.parametrize("w", [1, 2, 7, 64, 65])
@pytest.mark.parametrize("sinks", [None, 3])
def test_a_window_ends_where_it_says(w, sinks):
    """The token w − 1 places back is seen, the one w places back is not: the current token counts."""
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


BUDGETED = [name for name in POLICIES if name != "softmax"]
lengths = st.integers(1, 90)


@pytest.mark.parametrize("policy", BUDGETED)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(length=lengths, more=st.integers(0, 3), seed=st.integers(0, 99))
def test_a_budget_for_all_is_softmax(policy, length, more, seed):
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
    _, memory = Merging(d_model=8, budget=budget).parallel(q, k, v, {})
    assert (memory["count"].sum(-1) == length).all()
    assert memory["count"].shape[-1] == min(length, budget - 1)
    total = (memory["count"][..., None] * memory["v"]).sum(2)
    assert torch.allclose(total, v.sum(2), rtol=0, atol=1e-10)


def test_merging_equal_keys_changes_nothing():
    """As many slots as different keys, met one after another: a slot then answers for all its tokens exactly."""
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
    for policy in (TopK, Window, HeavyHitter, Paged):
        options = {"page": 1} if policy is Paged else {}
        A = policy(d_model=8, budget=budget, **options).effective_attention(q, k, {})
        assert ((A > 0).sum(-1) <= budget).all()
        share[policy] = (full * (A > 0)).sum(-1)
    assert all((share[TopK] >= other - 1e-12).all() for other in share.values())


@pytest.mark.parametrize("policy", BUDGETED)
def test_a_policy_can_be_put_on_trained_softmax(policy):
    trained = instantiate(config("mixer=softmax").mixer)(d_model=16, heads=2)
    x = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0))
    for budget in (48, 16):
        mixer = instantiate(config(f"mixer={policy}", f"mixer.budget={budget}").mixer)(d_model=16, heads=2)
        mixer.load_state_dict(trained.state_dict(), strict=True)
        y, _ = mixer(x)
        assert torch.allclose(y, trained(x)[0], atol=1e-6) == (budget >= 40)


@pytest.mark.parametrize("policy", BUDGETED)
def test_all_weights_learn(policy):
    mixer = instantiate(config(f"mixer={policy}", "mixer.budget=16").mixer)(d_model=16)
    mixer(torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0)))[0].square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in mixer.parameters())


@pytest.mark.parametrize("policy", ["window", "sink_window", "heavy_hitter", "merging"])
def test_a_static_cache_is_bounded(policy):
    mixer = instantiate(config(f"mixer={policy}", "mixer.budget=16", "mixer.short_conv=0").mixer)(d_model=16)
    extra = {"heavy_hitter": 1, "merging": 1}.get(policy, 0)
    assert [mixer.state_size(n)[0] for n in (1, 10, 15, 16, 100)] == [(32 + extra) * n for n in (1, 10, 15, 15, 15)]


def test_forgetting_is_exact_behind_strong_decay():
    """What lies far back must not cost the near past its digits, as a difference of two long sums would."""
    n = 700
    q, k, v = draw(n)
    gate = torch.full((2, 2, n), -30.0).double()
    gate[:, :, -40:] = -0.01
    mixer = Forgetting(d_model=8, heads=2)
    exact, _ = mixer.parallel(q, k, v, {"log_forget": gate})
    o, memory = mixer.parallel(q.float(), k.float(), v.float(), {"log_forget": gate.float()})
    assert (o - exact)[:, :, -40:].abs().max() < 2e-6
    assert torch.allclose(
        memory["decay"][:, :, -40:].double(), gate[:, :, -40:].flip(2).cumsum(2).flip(2) + 0.01, atol=1e-6
    )


def test_forgetting_survives_any_gate():
    q, k, v = (x.float().requires_grad_() for x in draw(130))
    gate = torch.linspace(-1e4, 0, 130).expand(2, 2, 130).clone().requires_grad_()
    o, _ = Forgetting(d_model=8, heads=2).parallel(q, k, v, {"log_forget": gate})
    grads = torch.autograd.grad(o.square().sum(), (q, k, v, gate))
    assert all(x.isfinite().all() for x in (o, *grads))


@pytest.mark.parametrize(
    "overrides",
    [
        "mixer=window mixer.budget=0",
        "mixer=merging mixer.budget=1",
        "mixer=sink_window mixer.sinks=64",
        "mixer=sink_window mixer.sinks=-1",
        "mixer=paged mixer.page=0",
        "mixer=paged mixer.page=7",
    ],
)
def test_impossible_options(overrides):
    with pytest.raises(ValueError, match="a whole number"):
        instantiate(config(*overrides.split()).mixer)(d_model=16)


def test_a_trained_model_changes_its_policy():
    """The weights of a whole softmax model, read by models with other caches."""
    settings = config("model.layers=2", "model.d_model=16")
    tokens = torch.randint(0, 8, (2, 40), generator=torch.Generator().manual_seed(0))

    def model(*overrides: str) -> Model:
        mixer = instantiate(config(*overrides).mixer)
        return instantiate(settings.model, vocab=8, mlp=0.0, mixer=mixer, _convert_="all")

    trained = model("mixer=softmax")
    logits = trained(tokens)
    for overrides in (
        ["mixer=merging"],
        ["mixer=hybrid", "mixer@mixer.first=paged", "mixer@mixer.second=heavy_hitter"],
    ):
        other = model(*overrides)
        other.load_state_dict(trained.state_dict(), strict=True)
        assert torch.allclose(other(tokens), logits, atol=1e-5)


def layers(*overrides: str) -> list[str]:
    return [type(make(d_model=16)).__name__ for make in instantiate(config("mixer=hybrid", *overrides).mixer)]


def test_hybrid():
    assert layers() == ["DeltaRule", "Softmax"]
    assert layers("mixer@mixer.first=window", "mixer.pattern=[first,first,second]") == ["Window", "Window", "Softmax"]
    assert layers("+mixer@mixer.third=linear", "mixer.pattern=[third,first]") == ["Linear", "DeltaRule"]
    make = instantiate(config("mixer=hybrid", "mixer@mixer.first=window", "mixer.first.budget=16").mixer)[0]
    assert make(d_model=16).budget == 16
    for pattern in ("[first,sceond]", "[]", "[third]"):
        with pytest.raises(InstantiationException, match="a list of first, second"):
            layers(f"mixer.pattern={pattern}")
