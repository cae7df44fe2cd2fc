"""Probe dynamic_access: ranks, residuals, derivatives and subsets versus closed forms and brute force."""

from functools import partial

import numpy as np
import pytest
import torch
from mixers import LINEAR_IN_V
from probes import mixer, traced, value

from recall_lab.mixer.linear import Linear
from recall_lab.mixer.paged import Paged
from recall_lab.mixer.random_k import RandomK
from recall_lab.mixer.softmax import Softmax
from recall_lab.mixer.top_k import TopK
from recall_lab.mixer.window import Window
from recall_lab.probe.dynamic_access import dynamic_access, independence, is_face, jacobian, least_leak
from recall_lab.probe.queries import double, weights
from recall_lab.theory import access


@pytest.mark.parametrize("name", LINEAR_IN_V)
def test_rank_and_residual(rng, name):
    n, d = 40, 8
    rows = dynamic_access(traced(partial(mixer, name), pairs=n, d_key=d, reads=2 * n), rng)
    rank, residual = value(rows, "rank"), value(rows, "one_hot_residual")
    if name in (
        "linear",
        "gated_linear",
        "gla",
        "mamba2",
        "delta_rule",
        "gated_delta",
        "kda",
        "rwkv7",
        "mesa",
        "log_linear",
        "hgrn2",
        "comba",
    ):
        assert rank == access.rank(n, d)
        assert residual == pytest.approx(access.one_hot_residual(n, d), abs=1e-8)
        assert value(rows, "independence") < 0.5
    elif name in ("softmax", "forgetting", "top_k"):
        assert rank == n
        assert residual < 0.01
        assert value(rows, "independence") > 0.8
    assert value(rows, "held_range") == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "make", [partial(TopK, budget=8), partial(Paged, budget=8, page=2), partial(RandomK, budget=8)]
)
@pytest.mark.parametrize("pairs", [4, 40])
def test_policies_that_choose_tokens_have_a_derivative(rng, make, pairs):
    """Their weights change as those of softmax on the chosen tokens do; the others keep a weight of zero."""
    trace = double(traced(make, pairs=pairs, d_key=16, reads=pairs))
    q = 3 * trace.k
    found = jacobian(trace, q, pairs - 1)
    here = weights(trace, q, pairs - 1)
    k = trace.k[:, :, None] / trace.k.shape[-1] ** 0.5
    expected = here[..., None] * (k - (here[..., None] * k).sum(-2, keepdim=True))
    assert torch.allclose(found, expected, atol=1e-12)
    assert int((here > 0).sum(-1).max()) == min(8, pairs)
    assert np.isfinite(value(dynamic_access(trace, rng), "rank"))


def test_with_few_tokens_each_weight_can_be_changed_alone(rng):
    trace = traced(pairs=4, d_key=8, reads=8)
    rows = dynamic_access(trace, rng)
    assert value(rows, "independence") == pytest.approx(1)
    # Distance of each key from the span of the others, times the read-out's own scale.
    k = trace.k[:, 0].double()
    distance = torch.linalg.inv(k @ k.mT).diagonal(dim1=1, dim2=2).rsqrt() / 8**0.5
    assert value(rows, "held_range") == pytest.approx(float(distance.mean()), rel=1e-6)


def test_jacobian_equals_finite_differences():
    trace = double(traced(Softmax, pairs=6, d_key=4, reads=6))
    q = trace.k * 2
    found = jacobian(trace, q, 5)
    step = 1e-6
    for c in range(4):
        move = torch.zeros_like(q)
        move[..., c] = step
        change = (weights(trace, q + move, 5) - weights(trace, q - move, 5)) / (2 * step)
        assert torch.allclose(found[..., c], change, atol=1e-8)


def test_independence_is_the_best_share_of_change(rng):
    trace = double(traced(pairs=12, d_key=5, reads=12))
    tokens = torch.arange(12)
    leverage, _ = independence(trace, trace.k, tokens, 11)
    change = jacobian(trace, trace.k[:, :, :1], 11)[0, 0, 0]
    moves = torch.from_numpy(rng.standard_normal((20_000, 5)))
    shares = (moves @ change.T).square()
    shares = (shares / shares.sum(1, keepdim=True)).amax(0)
    assert torch.all(shares <= leverage[0, 0] + 1e-9)
    assert torch.allclose(shares, leverage[0, 0], atol=0.05)
    assert float(leverage.mean()) == pytest.approx(5 / 12)


def test_moved_with_orthogonal_keys(rng):
    """With orthogonal keys an answer has all the weight under its own query and none under other queries."""
    rows = dynamic_access(traced(pairs=8, d_key=8, keys="orthogonal", reads=16), rng)
    assert value(rows, "moved") == pytest.approx(1, abs=1e-5)
    assert value(rows, "moved_share") == pytest.approx(1, abs=1e-5)
    sharp = dynamic_access(traced(Softmax, pairs=8, d_key=8, keys="orthogonal", sharpness=50.0, reads=16), rng)
    assert value(sharp, "moved") == pytest.approx(1, abs=1e-5)
    flat = dynamic_access(traced(Softmax, pairs=8, d_key=8, sharpness=1e-3, reads=16), rng)
    assert abs(value(flat, "moved")) < 1e-3


def test_faces_of_a_polygon():
    angle = np.arange(6) * np.pi / 3
    keys = np.c_[np.cos(angle), np.sin(angle)]
    assert is_face(keys, np.isin(np.arange(6), [2]))
    assert is_face(keys, np.isin(np.arange(6), [2, 3]))
    assert not is_face(keys, np.isin(np.arange(6), [2, 4]))
    assert not is_face(keys, np.isin(np.arange(6), [1, 2, 3]))
    assert is_face(keys, np.ones(6, dtype=bool))


def test_least_leak_equals_a_grid_search():
    reader = np.array([[1.0, 0], [0.5, 1], [0.3, -1]])
    # k̃_0·q = 1 fixes the first coordinate; the second is free: |.5 + y| + |.3 − y| is at least .8.
    assert least_leak(reader, np.array([True, False, False])) == pytest.approx(0.8)
    assert least_leak(np.array([[1.0], [2.0]]), np.array([True, True])) == np.inf
    assert least_leak(np.eye(3), np.array([True, True, False])) == pytest.approx(0)


def test_selectable_subsets(rng):
    """Softmax selects subsets that are faces; a read-out linear in the query selects none if n is well above d."""
    fields = {"pairs": 64, "d_key": 16, "reads": 128}
    softmax = dynamic_access(traced(Softmax, **fields), rng, subsets=(2, 16))
    assert value(softmax, "selectable", subset=2) == 1
    assert value(softmax, "selectable", subset=16) < 0.5
    linear = dynamic_access(traced(Linear, **fields), rng, subsets=(2,))
    assert value(linear, "selectable", subset=2) == 0
    few = dynamic_access(traced(Linear, pairs=12, d_key=16, reads=24), rng, subsets=(3,))
    assert value(few, "selectable", subset=3) == 1
    assert not [
        r for r in dynamic_access(traced(partial(mixer, "based"), **fields), rng, subsets=(2,)) if "subset" in r
    ]
    merged = dynamic_access(traced(partial(mixer, "merging", budget=8), **fields), rng, subsets=(2,))
    assert value(merged, "selectable", subset=2) < 0.4
    kept = dynamic_access(traced(partial(Window, budget=16), **fields), rng, subsets=(2,))
    assert value(kept, "selectable", subset=2) < 0.4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"purity": 0}, "purity=0: must be above 0"),
        ({"purity": 1.5}, "purity=1.5: must be a number from 0 to 1"),
        ({"sharpen": ()}, "must hold at least one factor"),
        ({"subsets": (0,)}, "subsets=0: must be a whole number of at least 1"),
        ({"draws": 0}, "draws=0: must be a whole number of at least 1"),
    ],
)
def test_impossible_options(options, message, rng):
    with pytest.raises(ValueError, match=message):
        dynamic_access(traced(pairs=4, d_key=4, reads=4), rng, **options)
