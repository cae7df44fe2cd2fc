"""Mechanisms that learn which tokens a query attends to: their definition, and that no future token has an effect."""

import math
import re

import pytest
import torch
from conftest import config, golden, ratio
from hydra.utils import instantiate
from torch import Tensor

from recall_lab.mixer.blocks import chosen_blocks, mean_of_blocks
from recall_lab.mixer.cache import causal, softmax_or_zero
from recall_lab.mixer.nsa import NSA
from recall_lab.mixer.softmax import Softmax

SMALL = {"nsa": {"budget": 6, "block_size": 2, "window": 3}, "dsa": {"budget": 4}}
"""Budgets at which a sequence of thirty tokens is not attended to completely."""


def make(name: str, **options):
    torch.manual_seed(0)
    return instantiate(config(f"mixer={name}").mixer)(**{"d_model": 16, "heads": 2, "short_conv": 0} | options).double()


def softmax(numbers: list[Tensor]) -> list[Tensor]:
    return list(torch.softmax(torch.stack(numbers), dim=0)) if numbers else []


def nsa(q: Tensor, k: Tensor, v: Tensor, g: Tensor, size: int, count: int, window: int) -> Tensor:
    """The outputs of one head, position by position, block by block; g is 3 t."""
    rows = []
    for t in range(len(q)):
        blocks = [range(start, min(start + size, t + 1)) for start in range(0, t + 1, size)]
        past = [c for c, block in enumerate(blocks) if len(block) == size]
        means = [(k[list(blocks[c])].mean(0), v[list(blocks[c])].mean(0)) for c in past]
        p = softmax([q[t] @ key / math.sqrt(q.shape[1]) for key, _ in means])
        compressed = sum((w * value for w, (_, value) in zip(p, means, strict=True)), torch.zeros_like(v[0]))
        own = len(blocks) - 1
        forced = sorted({0, own, max(own - 1, 0)})
        others = sorted((c for c in past if c not in forced), key=lambda c, p=p: (-p[c].item(), c))
        chosen = [s for c in (forced + others)[:count] for s in blocks[c]]
        parts = [compressed]
        for tokens in (chosen, range(max(t - window + 1, 0), t + 1)):
            weights = softmax([q[t] @ k[s] / math.sqrt(q.shape[1]) for s in tokens])
            parts.append(sum(w * v[s] for w, s in zip(weights, tokens, strict=True)))
        rows.append(sum(g[i, t] * part for i, part in enumerate(parts)))
    return torch.stack(rows)


@pytest.mark.parametrize(("size", "count", "window"), [(1, 3, 1), (4, 3, 6), (5, 4, 7), (3, 9, 40)])
def test_nsa_equals_its_definition(size, count, window):
    """Outputs and gradients, with blocks that are smaller, larger and incomplete."""
    mixer = make("nsa", budget=size * count, block_size=size, window=window)
    x = torch.randn(1, 23, 16, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    q, k, v, gates, _ = mixer.project(x)
    expected = torch.stack([
        torch.stack([
            nsa(q[b, h], k[b, h], v[b, h], torch.stack([gate[b, h] for gate in gates.values()]), size, count, window)
            for h in range(2)
        ])
        for b in range(1)
    ])  # fmt: skip
    o, _ = mixer.parallel(q, k, v, gates)
    assert torch.allclose(o, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(y.sin().sum(), x, retain_graph=True)[0] for y in (o, expected)]
    assert torch.allclose(*grads, rtol=0, atol=1e-12)


def dsa(q: Tensor, k: Tensor, v: Tensor, u: Tensor, e: Tensor, w: Tensor, budget: int) -> Tensor:
    """The outputs of all heads of one sequence; the rank enters the logits with the value zero, for its gradient."""
    rows = []
    for t in range(q.shape[1]):
        rank = [
            sum(w[j, t] * torch.relu(u[j, t] @ e[s]) / math.sqrt(e.shape[1]) for j in range(len(u)))
            for s in range(t + 1)
        ]
        order = sorted(range(t + 1), key=lambda s, rank=rank: (-rank[s].item(), s))[:budget]
        for h in range(len(q)):
            logits = [q[h, t] @ k[h, s] / math.sqrt(q.shape[2]) + rank[s] - rank[s].detach() for s in order]
            rows.append(sum(weight * v[h, s] for weight, s in zip(softmax(logits), order, strict=True)))
    return torch.stack(rows).unflatten(0, (q.shape[1], len(q))).transpose(0, 1)


@pytest.mark.parametrize("budget", [1, 4, 30])
def test_dsa_equals_its_definition(budget):
    """Outputs, and gradients of everything that the indexer computes."""
    mixer = make("dsa", budget=budget, index_heads=3, index_width=5)
    x = torch.randn(1, 19, 16, generator=torch.Generator().manual_seed(1)).double()
    q, k, v, gates, _ = mixer.project(x)
    u, e, w = (gates[name][0] for name in ("index_query", "index_key", "index_weight"))
    expected = dsa(q[0], k[0], v[0], u, e[0], w, budget)[None]
    o, _ = mixer.parallel(q, k, v, gates)
    assert torch.allclose(o, expected, rtol=0, atol=1e-12)
    weights = [weight for name, weight in mixer.named_parameters() if name != "o_proj.weight"]
    grads = [torch.autograd.grad(y.sin().sum(), weights, retain_graph=True) for y in (o, expected)]
    assert all(torch.allclose(one, other, rtol=0, atol=1e-12) for one, other in zip(*grads, strict=True))
    assert bool(grads[0][-1].any()) == (budget > 1)  # of the indexer; a single token has all the weight


@pytest.mark.parametrize("form", ["parallel", "run_recurrence"])
def test_dsa_chooses_the_golden_tokens(form):
    """As sets: the tokens with weight, for all heads the same."""
    x = {name: value.transpose(1, 2) for name, value in golden("dsa").items() if name not in ("k_idx", "indices")}
    gates = {"index_query": x["q_idx"], "index_key": golden("dsa")["k_idx"][:, None], "index_weight": x["w_idx"]}
    mixer = instantiate(config("mixer=dsa", "mixer.budget=6").mixer)(d_model=32, heads=2, index_width=5)
    A = getattr(mixer, form)(x["q"], x["k"], torch.eye(24).expand(2, 2, 24, 24), gates)[0]
    expected = torch.zeros(2, 24, 25, dtype=torch.bool)  # the last place is that of the padding, −1
    expected = expected.scatter(2, golden("dsa")["indices"] % 25, torch.ones(2, 24, 6, dtype=torch.bool))[..., :24]
    assert torch.equal(A != 0, expected[:, None].expand(-1, 2, -1, -1))


@pytest.mark.parametrize("positions", ["none", "rotary", "alibi"])
@pytest.mark.parametrize("name", SMALL)
def test_no_future_token_has_an_effect(name, positions):
    """Every token in turn is replaced by a very different one: all outputs before it stay the same, bit for bit."""
    mixer = make(name, **SMALL[name], positions=positions)
    x = torch.randn(1, 30, 16, generator=torch.Generator().manual_seed(2)).double()
    changed = x.repeat(30, 1, 1)
    changed[range(30), range(30)] = 20 * torch.randn(30, 16, generator=torch.Generator().manual_seed(3)).double()
    with torch.no_grad():
        before, after = mixer(x.expand(30, -1, -1))[0], mixer(changed)[0]
    same = (before == after).all(-1)
    assert (same | torch.ones(30, 30).triu().bool()).all()
    assert not same.diagonal().any()


@pytest.mark.parametrize("name", SMALL)
def test_the_gradient_reaches_no_future_token(name):
    mixer = make(name, **SMALL[name])
    x = torch.randn(1, 30, 16, generator=torch.Generator().manual_seed(4)).double().requires_grad_()
    y = mixer(x)[0]
    for t in (0, 1, 2, 11, 28):
        (grad,) = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)
        assert grad[0, t].any()
        assert not grad[0, t + 1 :].any()


def golden_nsa(dtype: torch.dtype) -> dict[str, Tensor]:
    """The arrays as b h t d, each key and value repeated for the two query heads that share it."""
    arrays = {name: x.transpose(1, 2) for name, x in golden("nsa").items()}
    return {name: x.to(dtype).requires_grad_(name in "qkv") for name, x in arrays.items()}


GATES = {"compressed": "cmp", "chosen": "slc", "recent": "swa"}


@pytest.mark.parametrize("form", ["parallel", "run_recurrence"])
@pytest.mark.parametrize(
    ("dtype", "limit", "gradient_limit"), [(torch.float64, 1e-10, 1e-10), (torch.float32, 1e-5, 5e-5)]
)
def test_nsa_equals_the_golden_arrays(dtype, limit, gradient_limit, form):
    """Outputs of all branches together and of each, and gradients; pairs of heads choose their blocks together."""
    exact, x = golden("nsa"), golden_nsa(dtype)
    mixer = NSA(d_model=32, heads=4, budget=16, block_size=4, window=6)
    mixer.group = 2
    q, (k, v) = x["q"], (x[name].repeat_interleave(2, dim=1) for name in "kv")
    gates = {name: x[f"g_{short}"] for name, short in GATES.items()}
    for name, short in GATES.items():
        alone = {other: torch.full_like(gate, float(other == name)) for other, gate in gates.items()}
        o, _ = getattr(mixer, form)(q, k, v, alone)
        assert ratio(o.detach().transpose(1, 2), exact[f"o_{short}"]) < limit, name
    o, _ = getattr(mixer, form)(q, k, v, gates)
    assert ratio(o.detach().transpose(1, 2), exact["o"]) < limit
    grads = torch.autograd.grad((o * x["do"]).sum(), [x[name] for name in "qkv"])
    for name, grad in zip("qkv", grads, strict=True):
        assert ratio(grad.transpose(1, 2), exact[f"grad_{name}"]) < gradient_limit, name


def test_nsa_chooses_the_golden_blocks():
    x = golden_nsa(torch.float64)
    p = softmax_or_zero(mean_of_blocks(causal(x["q"], x["k"].repeat_interleave(2, dim=1)), 4))
    chosen = chosen_blocks(p, 4, 22, 4, 2)[:, ::2].transpose(1, 2)  # b t h blocks
    reached = torch.arange(6) <= torch.arange(22)[:, None, None] // 4
    assert torch.equal(chosen & reached, golden("nsa")["selected_blocks"])


def test_with_a_large_budget_the_chosen_tokens_are_all():
    q, k, v = (torch.randn(2, 2, 40, 8, generator=torch.Generator().manual_seed(i)).double() for i in range(3))
    expected, _ = Softmax(d_model=16, heads=2).parallel(q, k, v, {})
    mixer = NSA(d_model=16, heads=2, budget=40)
    gates = {name: torch.full((2, 2, 40), value).double() for name, value in mixer.neutral_gates.items()}
    assert torch.allclose(mixer.parallel(q, k, v, gates)[0], expected, rtol=0, atol=1e-12)


def test_a_row_without_any_logit_has_no_weight_and_no_gradient():
    logits = torch.tensor([[-torch.inf, -torch.inf], [0.0, -torch.inf]], requires_grad=True)
    weights = softmax_or_zero(logits)
    assert weights.tolist() == [[0, 0], [1, 0]]
    assert torch.autograd.grad((weights * torch.tensor([1.0, 2.0])).sum(), logits)[0].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("nsa mixer.budget=20", "block_size=8: must divide budget=20 into 3 blocks or more"),
        ("nsa mixer.budget=16", "block_size=8: must divide budget=16 into 3 blocks or more"),
        ("nsa mixer.window=0", "window=0: must be a whole number of at least 1"),
    ],
)
def test_impossible_choices_are_refused(overrides, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        instantiate(config(*f"mixer={overrides}".split()).mixer)(d_model=16)
