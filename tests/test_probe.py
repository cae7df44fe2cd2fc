"""Probes against closed forms, brute force and mechanisms whose answer is known."""

from dataclasses import replace
from functools import partial

import hydra
import numpy as np
import pytest
import torch
from conftest import CONF, config, names

from recall_lab.mixer.base import Trace
from recall_lab.mixer.delta_rule import DeltaRule
from recall_lab.mixer.gated_linear import GatedLinear
from recall_lab.mixer.linear import Linear
from recall_lab.mixer.lstm import LSTM
from recall_lab.mixer.rnn import RNN
from recall_lab.mixer.softmax import Softmax
from recall_lab.mixer.window import Window
from recall_lab.model import Model
from recall_lab.oracle import Oracle
from recall_lab.probe import base
from recall_lab.probe.cost import cost
from recall_lab.probe.dynamic_access import dynamic_access, independence, is_face, jacobian, least_leak
from recall_lab.probe.effective_attention import effective_attention, influence, spread, static_share
from recall_lab.probe.retrieval import retrieval
from recall_lab.probe.state_retention import state_retention
from recall_lab.task.base import IGNORE
from recall_lab.task.mqar import MQAR
from recall_lab.task.paired_recall import PairedRecall
from recall_lab.theory import access, delta_rule, linear_attention, softmax

MIXERS = [name for name in names("mixer") if name != "hybrid"]


def traced(make=Linear, seed=0, **fields) -> Trace:
    oracle = Oracle(**{"reads": 1024} | fields)
    torch.manual_seed(seed)
    return oracle.trace(oracle.mixer(make), np.random.default_rng(seed))


def mixer(name, **fields):
    torch.manual_seed(0)
    return hydra.utils.instantiate(config(f"mixer={name}").mixer)(**fields)


def value(rows, metric, **where):
    found = [r["value"] for r in rows if r["metric"] == metric and all(r.get(k) == x for k, x in where.items())]
    assert len(found) == 1, (metric, where, len(found))
    return found[0]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


# One place, many queries.


@pytest.mark.parametrize("name", [name for name in MIXERS if name not in ("rnn", "lstm")])
def test_weights_of_many_queries_are_those_of_each_alone(name):
    """At one place and history, against the whole sequence run again with that query at its end."""
    m = mixer(name, d_model=16, d_key=8, d_value=8, heads=2).double()
    x = torch.randn(2, 9, 16, dtype=torch.double)
    q, k, v, gates, _ = m.project(x)
    trace = Trace(m, q, k, v, gates, v, torch.full((2, 9), IGNORE))
    queries = torch.randn(2, 2, 5, 8, dtype=torch.double)
    with torch.no_grad():
        seen = base.weights(trace, queries, 8)
        for i in range(5):
            alone = torch.cat([q[:, :, :8], queries[:, :, i : i + 1]], dim=2)
            assert torch.allclose(m.effective_attention(alone, k, gates)[:, :, 8], seen[:, :, i], atol=1e-9)


def test_chunks_change_nothing(monkeypatch):
    trace = traced(DeltaRule, pairs=20, d_key=8, reads=40)
    memory = base.memory_before(trace, 19)
    whole = base.answers(trace, trace.k, 19, memory)
    monkeypatch.setattr(base, "CHUNK", 1)
    assert torch.allclose(base.answers(trace, trace.k, 19, memory), whole, atol=1e-6)


def test_wilson():
    low, high = base.wilson(8, 10)
    assert (low, high) == (
        pytest.approx(0.4902, abs=1e-3),
        pytest.approx(0.9433, abs=1e-3),
    )  # Wilson 1927, Newcombe 1998
    assert base.wilson(0, 20)[0] == 0
    assert base.wilson(20, 20)[1] == 1
    assert base.wilson(0, 0) == (0, 1)


def test_bins_hold_everything_once(rng):
    ages = rng.integers(0, 300, 500)
    found = base.bins(ages, 12)
    assert sorted(np.concatenate(found)) == list(range(500))
    assert 8 <= len(found) <= 12


# State retention.


@pytest.mark.parametrize("n", [32, 64, 128])
def test_keyed_reading_of_sums_and_deltas_follows_theory(rng, n):
    fields = {"pairs": n, "d_key": 32, "candidates": 1024, "reads": 4096}
    rows = state_retention(traced(**fields), rng, age_bins=0)
    assert value(rows, "error") == pytest.approx(linear_attention.error(n, 32), rel=0.06)
    assert value(rows, "cosine") == pytest.approx(linear_attention.cosine(n, 32), rel=0.03)
    assert value(rows, "top1") == pytest.approx(linear_attention.top1(n, 32, 32, 1024), abs=0.05)
    rows = state_retention(traced(DeltaRule, **fields), rng)
    assert value(rows, "error") == pytest.approx(delta_rule.error(np.arange(n), n, 32).mean(), rel=0.04)
    by_age = {row["age"]: row["value"] for row in rows if row["metric"] == "error_by_age"}
    assert max(by_age) > 0.8 * n
    for age, error in by_age.items():
        assert error == pytest.approx(delta_rule.error(round(age), n, 32), abs=0.25)


def test_places_are_prefixes(rng):
    trace = traced(pairs=64, d_key=16, reads=512)
    rows = state_retention(trace, rng, at=(0.25, 1.0), age_bins=0, spectrum=False)
    cut = {name: getattr(trace, name)[:, :, :16] for name in ("q", "k", "v", "o")}
    short = replace(trace, **cut, source=trace.source[:, :16])
    for metric in ("top1", "error", "norm", "bits_per_entry"):
        assert value(rows, metric, place=16) == pytest.approx(value(state_retention(short, rng), metric, place=16))


def test_an_overwritten_value_is_not_asked_for(rng):
    """Linear superposes old and new; delta recovers, and neither is blamed for the old value."""
    fields = {"pairs": 16, "d_key": 64, "overwrites": 16, "reads": 512, "keys": "orthogonal"}
    delta = state_retention(traced(DeltaRule, **fields), rng, age_bins=0)
    assert value(delta, "top1") == 1
    assert value(delta, "error") < 1e-6
    both = state_retention(traced(Linear, **fields), rng, age_bins=0)
    assert value(both, "error") == pytest.approx(1, abs=0.05)
    assert [row["pairs"] for row in both if row["metric"] == "top1"] == [16]


def test_passes_near_least_squares(rng):
    errors = [
        value(state_retention(traced(DeltaRule, pairs=32, d_key=32, passes=p), rng, age_bins=0), "error")
        for p in (1, 4, 16)
    ]
    assert errors[0] == pytest.approx(delta_rule.error(np.arange(32), 32, 32).mean(), rel=0.06)
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.2


def test_asked_reading_looks_at_asked_places_only(rng):
    trace = traced(pairs=16, d_key=16, reads=64)
    source = torch.full_like(trace.source, IGNORE)
    source[:, 10], source[:, 12] = 3, 3
    rows = state_retention(replace(trace, source=source), rng, read="asked", age_bins=4)
    (top1,) = (row for row in rows if row["metric"] == "top1")
    assert (top1["count"], top1["pairs"]) == (len(trace.q), 16)  # one read a sequence, of a memory that holds 16
    assert [row["age"] for row in rows if row["metric"] == "top1_by_age"] == [12]
    with pytest.raises(ValueError, match="read='some': all or asked"):
        state_retention(trace, rng, read="some")


def test_spectrum_of_a_known_state(rng):
    """Orthonormal keys and values, n of them: n equal singular values."""
    trace = traced(pairs=8, d_key=16, keys="orthogonal", reads=8)
    values = torch.linalg.qr(torch.randn(16, 8))[0].T[None, None]
    rows = state_retention(replace(trace, v=values, candidates=None), rng, age_bins=0)
    for metric in ("effective_rank", "stable_rank", "participation"):
        assert value(rows, metric) == pytest.approx(8, rel=1e-4)
    assert value(rows, "norm") == pytest.approx(8**0.5, rel=1e-5)
    assert value(rows, "singular_value", index=8) == pytest.approx(1 / 8, rel=1e-4)
    assert value(rows, "singular_value", index=9) < 1e-6
    assert value(rows, "top1") == 1
    assert value(rows, "bits") == pytest.approx(8 * 3)


def test_decoder_finds_what_is_there_and_its_control_nothing(rng):
    trace = traced(pairs=6, d_key=8, keys="orthogonal", shared_keys=True, candidates=32, reads=6 * 400)
    rows = state_retention(trace, rng, lags=(0, 5), age_bins=0)
    for lag in (0, 5):
        assert value(rows, "decode_top1", lag=lag) > 0.99
        assert value(rows, "decode_r2", lag=lag) > 0.98
        assert value(rows, "decode_control", lag=lag) < 0.1
        assert value(rows, "selectivity", lag=lag) > 0.9
    # With keys of its own in each sequence there is nothing a linear decoder could know them by.
    apart = state_retention(traced(pairs=6, d_key=8, candidates=32, reads=6 * 400), rng, lags=(3,), age_bins=0)
    assert value(apart, "decode_top1", lag=3) < 0.12
    assert not [row for row in state_retention(trace, rng, lags=(6,)) if "lag" in row]
    with pytest.raises(ValueError, match="at least 0 each"):
        state_retention(trace, rng, lags=(-1,))


def test_effective_state_size(rng):
    fields = {"pairs": 48, "d_key": 4, "reads": 48}

    def largest(make, **more):
        rows = state_retention(traced(make, **fields, **more), rng, state_rank=True)
        return max(row["value"] for row in rows if row["metric"] == "state_rank")

    assert largest(Linear) == 4
    assert largest(DeltaRule, gates={"beta": 0.5}) == 4
    assert largest(Softmax) > 16
    assert largest(partial(Window, budget=1)) == 0
    assert state_retention(traced(partial(RNN), pairs=4, d_key=4), rng, state_rank=True)


# Effective attention.


@pytest.mark.parametrize("name", [name for name in MIXERS if name not in ("rnn", "lstm")])
@pytest.mark.parametrize("layers", [1, 3])
def test_weights_times_values_are_the_output(rng, name, layers):
    """‖A v − o‖/‖o‖ < 1e-5 in float32, in the same forward pass, with short convolution and learned gates."""
    torch.manual_seed(0)
    make = hydra.utils.instantiate(config(f"mixer={name}", "mixer.heads=2").mixer)
    model = Model(vocab=64, mixer=make, d_model=32, layers=layers, mlp=0.0)
    batch = MQAR(vocab=64, length=48, pairs=8).sample(3, rng)
    with torch.no_grad():
        traces = model.trace(torch.from_numpy(batch.tokens), torch.from_numpy(batch.factors["source"]).long())
    assert len(traces) == layers
    for trace in traces:
        rows = effective_attention(trace, rng)
        residuals = [row["value"] for row in rows if row["metric"] == "residual"]
        assert len(residuals) == 2
        assert max(residuals) < 1e-5


def test_spread_of_known_weights():
    attention = torch.tensor([[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0, -1, 1, 0], [0.25, 0.25, 0.25, 0.25]]])
    source = torch.tensor([[IGNORE, IGNORE, 1, 3]])
    rows = spread(attention, source != IGNORE, source, top=1, sink=2, token_bins=0)

    def mean(metric):
        return value(rows, metric, statistic="mean")

    assert mean("target_weight") == pytest.approx((-1 + 0.25) / 2)
    assert mean("target_share") == pytest.approx((0.5 + 0.25) / 2)
    assert mean("effective_tokens") == pytest.approx((2 + 4) / 2)
    assert mean("entropy") == pytest.approx((np.log(2) + np.log(4)) / 2)
    assert mean("top_mass") == pytest.approx((0.5 + 0.25) / 2)
    assert mean("distance") == pytest.approx((0.5 + 1.5) / 2)
    assert mean("sink_mass") == pytest.approx((0.5 + 0.5) / 2)
    assert value(rows, "target_share", statistic="q50") == pytest.approx(0.375)


def test_static_share():
    queries = torch.ones(1, 8, dtype=torch.bool)
    alike = torch.zeros(1, 8, 8)
    alike[:, 4:, :4] = torch.tensor([1.0, 0, 2, 0])
    assert float(static_share(alike, queries)) == pytest.approx(1)
    own = torch.zeros(1, 8, 8)
    own[0, 4:, :4] = torch.eye(4)
    assert float(static_share(own, queries)) == pytest.approx(0, abs=1e-12)
    chance = torch.rand(400, 16, 16, generator=torch.Generator().manual_seed(0))
    asked = torch.zeros(400, 16, dtype=torch.bool)
    asked[:, 12:] = True
    assert float(static_share(chance, asked).mean()) < 0.1  # a plain ratio of variances would give 1/4
    assert float(static_share(torch.ones(1, 8, 8), queries)) == 0


def test_oracle_shares_follow_theory(rng):
    rows = effective_attention(traced(pairs=512, d_key=32, reads=512 * 16), rng, token_bins=12)
    by_tokens = {
        r["tokens"]: r["value"] for r in rows if r["metric"] == "target_share_by_tokens" and r["statistic"] == "q50"
    }
    for tokens, share in by_tokens.items():
        if tokens > 32:
            assert share == pytest.approx(linear_attention.share(tokens, 32), rel=0.1)
    rows = effective_attention(traced(Softmax, pairs=512, d_key=32, reads=512 * 16), rng, token_bins=12)
    means = {
        r["tokens"]: r["value"] for r in rows if r["metric"] == "target_share_by_tokens" and r["statistic"] == "mean"
    }
    for tokens, share in means.items():
        if tokens > 32:
            assert share == pytest.approx(softmax.mass(tokens, 32, 32**0.5), rel=0.06)


def test_raw_scores_through_the_mechanisms():
    """One-dimensional keys 100 and 1, asked with 1: the argument's own example."""
    k = torch.ones(1, 1, 9, 1)
    k[:, :, 3] = 100
    q = torch.ones(1, 1, 9, 1)
    for make, law in ((Linear, linear_attention.raw_share), (Softmax, softmax.raw_share)):
        a = make(d_model=1, short_conv=0).effective_attention(q, k, {})[0, 0, -1]
        assert float(a[3] / a.sum()) == pytest.approx(float(law(9, 100.0, 1.0)), rel=1e-5)


@pytest.mark.parametrize("make", [Softmax, partial(GatedLinear, write=1)])
def test_influence_of_a_linear_mechanism_is_its_weight(make):
    trace = traced(make, pairs=7, d_key=4, reads=14)
    attention = trace.mixer.effective_attention(trace.q, trace.k, trace.gates)
    assert torch.allclose(influence(trace), attention.abs(), atol=1e-5)


@pytest.mark.parametrize("make", [RNN, LSTM])
def test_influence_of_a_recurrent_network_is_its_jacobian(rng, make):
    trace = traced(make, pairs=5, d_key=3, reads=10)
    found = influence(trace)

    def run(v):
        return trace.mixer.parallel(trace.q[:1], trace.k[:1], v, {})[0]

    exact = torch.autograd.functional.jacobian(run, trace.v[:1])[0, 0, :, :, 0, 0]  # t d s e
    assert torch.allclose(found[0, 0], exact.square().sum((1, 3)).div(3).sqrt(), atol=1e-6)
    rows = effective_attention(trace, rng)
    assert all(row["metric"].startswith("influence_") for row in rows)
    with pytest.raises(TypeError, match="not linear in v"):
        base.weights(trace, trace.q, 4)


# Dynamic access.


@pytest.mark.parametrize("name", [name for name in MIXERS if name not in ("rnn", "lstm")])
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
    ):
        assert rank == access.rank(n, d)
        assert residual == pytest.approx(access.one_hot_residual(n, d), abs=1e-8)
        assert value(rows, "independence") < 0.5
    elif name in ("softmax", "forgetting", "top_k"):
        assert rank == n
        assert residual < 0.01
        assert value(rows, "independence") > 0.8
    assert value(rows, "held_range") == pytest.approx(0, abs=1e-6)


def test_with_few_tokens_each_weight_can_be_changed_alone(rng):
    trace = traced(pairs=4, d_key=8, reads=8)
    rows = dynamic_access(trace, rng)
    assert value(rows, "independence") == pytest.approx(1)
    # Distance of each key from the span of the others, times the read-out's own scale.
    k = trace.k[:, 0].double()
    distance = torch.linalg.inv(k @ k.mT).diagonal(dim1=1, dim2=2).rsqrt() / 8**0.5
    assert value(rows, "held_range") == pytest.approx(float(distance.mean()), rel=1e-6)


def test_jacobian_against_differences():
    trace = base.double(traced(Softmax, pairs=6, d_key=4, reads=6))
    q = trace.k * 2
    found = jacobian(trace, q, 5)
    step = 1e-6
    for c in range(4):
        move = torch.zeros_like(q)
        move[..., c] = step
        change = (base.weights(trace, q + move, 5) - base.weights(trace, q - move, 5)) / (2 * step)
        assert torch.allclose(found[..., c], change, atol=1e-8)


def test_independence_is_the_best_share_of_change(rng):
    trace = base.double(traced(pairs=12, d_key=5, reads=12))
    tokens = torch.arange(12)
    leverage, _ = independence(trace, trace.k, tokens, 11)
    change = jacobian(trace, trace.k[:, :, :1], 11)[0, 0, 0]
    moves = torch.from_numpy(rng.standard_normal((20_000, 5)))
    shares = (moves @ change.T).square()
    shares = (shares / shares.sum(1, keepdim=True)).amax(0)
    assert torch.all(shares <= leverage[0, 0] + 1e-9)
    assert torch.allclose(shares, leverage[0, 0], atol=0.05)
    assert float(leverage.mean()) == pytest.approx(5 / 12)


def test_moved(rng):
    """With orthogonal keys the weight that goes to an answer is all there is, or nothing."""
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


def test_least_leak_against_a_grid():
    reader = np.array([[1.0, 0], [0.5, 1], [0.3, -1]])
    # k̃_0·q = 1 fixes the first coordinate; the second is free: |.5 + y| + |.3 − y| is at least .8.
    assert least_leak(reader, np.array([True, False, False])) == pytest.approx(0.8)
    assert least_leak(np.array([[1.0], [2.0]]), np.array([True, True])) == np.inf
    assert least_leak(np.eye(3), np.array([True, True, False])) == pytest.approx(0)


def test_selectable_subsets(rng):
    """Softmax picks subsets that are faces; a read-out linear in the query none once n is well above d."""
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


# Retrieval and cost.


class Answers(torch.nn.Module):
    """Stands for a model: right at the marked places, and sure of a wrong class at the others."""

    def __init__(self, targets, right, vocab):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        said = np.where(right, targets, (targets + 1) % vocab)
        self.logits = torch.nn.functional.one_hot(torch.from_numpy(said.astype(np.int64)).clamp(min=0), vocab) * 20.0

    def forward(self, tokens, scored):
        return self.logits[scored]


def test_retrieval_counts(rng):
    batch = MQAR(vocab=32, length=32, pairs=4, gap_exponent=1.0).sample(50, rng)
    right = np.broadcast_to(np.arange(32) < 20, batch.targets.shape)
    rows = retrieval(Answers(batch.targets, right, 32), batch, rng, by=("age", "source"), values=4)
    hit = right[batch.scored]
    assert value(rows, "accuracy") == pytest.approx(hit.mean())
    whole = (right | ~batch.scored).all(1).mean()
    assert value(rows, "sequence_accuracy") == pytest.approx(whole)
    age = (np.arange(32) - batch.factors["source"])[batch.scored]
    by_age = [row for row in rows if row["metric"] == "accuracy_by_age"]
    assert sum(row["count"] for row in by_age) == len(hit)
    assert sum(row["count"] * row["value"] for row in by_age) == pytest.approx(hit.sum())
    assert sum(row["count"] * row["age"] for row in by_age) == pytest.approx(age.sum())
    by_source = {row["source"]: row["value"] for row in rows if row["metric"] == "accuracy_by_source"}
    assert sorted(by_source) == [1, 3, 5, 7]
    assert by_source[3] == pytest.approx(hit[batch.factors["source"][batch.scored] == 3].mean())
    assert all(row["low"] <= row["value"] <= row["high"] for row in by_age)
    with pytest.raises(ValueError, match="by='depth': this task's factors are source, age"):
        retrieval(Answers(batch.targets, right, 32), batch, rng, by=("depth",))


def test_cost_exponents(rng):
    def slope(make, of, **fields):
        trace = traced(make, pairs=32, d_key=16, reads=32, **fields)
        return value(cost(trace, rng, lengths=(128, 256, 512), timed=False), "exponent", of=of)

    assert slope(Softmax, "prefill_flops") == pytest.approx(2, abs=0.01)
    assert slope(Softmax, "decode_flops") == pytest.approx(1, abs=0.02)
    assert slope(Softmax, "state_bytes") == pytest.approx(1, abs=0.02)
    for make in (Linear, DeltaRule):
        assert slope(make, "prefill_flops") == pytest.approx(1, abs=0.01)
        assert slope(make, "decode_flops") == pytest.approx(0, abs=1e-9)
        assert slope(make, "state_bytes") == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match="at least two"):
        cost(traced(pairs=4, d_key=4, reads=4), rng, lengths=(8,))


def test_cost_counts_what_the_formulas_say(rng):
    rows = cost(traced(Softmax, pairs=8, d_key=16, reads=8), rng, lengths=(64, 128), timed=False)
    assert value(rows, "prefill_flops", length=64) == 2 * 2 * 64 * 64 * 16
    assert value(rows, "decode_flops", length=64) == 2 * 2 * 65 * 16
    assert value(rows, "state_bytes", length=64) == 65 * 2 * 16 * 4
    rows = cost(traced(Linear, pairs=8, d_key=16, reads=8), rng, lengths=(64, 128), timed=False)
    assert value(rows, "decode_flops", length=64) == 2 * 2 * 16 * 16
    assert value(rows, "state_bytes", length=64) == 16 * 16 * 4


def test_cost_in_time(rng):
    rows = cost(traced(pairs=8, d_key=8, reads=8), rng, lengths=(32, 64), repeats=1)
    assert value(rows, "prefill_seconds", length=32) > 0
    assert value(rows, "decode_seconds", length=64) > 0


# All together.


def test_every_configured_probe_runs_on_a_model(rng):
    torch.manual_seed(0)
    make = hydra.utils.instantiate(config("mixer=delta_rule", "mixer.heads=2").mixer)
    model = Model(vocab=32, mixer=make, d_model=16, layers=2, mlp=0.0)
    batch = MQAR(vocab=32, length=32, pairs=4).sample(8, rng)
    probes = [hydra.utils.instantiate(_yaml(name), _convert_="all") for name in names("probe")]
    probes = [
        partial(probe, lengths=(16, 32), timed=False) if base.name(probe) == "cost" else probe for probe in probes
    ]
    rows = base.run(probes, model, batch, rng)
    assert {row["probe"] for row in rows} == set(names("probe"))
    for row in rows:
        assert {"probe", "metric", "value"} <= set(row)
        assert all(isinstance(x, str | int | float) for x in row.values())
        assert np.isfinite(row["value"])
    assert {row["layer"] for row in rows if row["probe"] == "dynamic_access"} == {0, 1}
    assert value(rows, "accuracy") == pytest.approx(1 / 16, abs=0.2)


def test_probes_on_a_paired_task_and_a_softmax_model(rng):
    torch.manual_seed(0)
    model = Model(vocab=32, mixer=hydra.utils.instantiate(config("mixer=softmax").mixer), d_model=16, layers=1, mlp=0.0)
    batch = PairedRecall(vocab=32, length=24, pairs=8).sample(6, rng)
    rows = base.run([partial(state_retention, read="asked"), effective_attention, dynamic_access], model, batch, rng)
    assert {"top1", "target_share", "rank", "moved"} <= {row["metric"] for row in rows}


def test_same_seed_same_rows():
    trace = traced(Softmax, pairs=24, d_key=8, reads=48)
    one, two = (dynamic_access(trace, np.random.default_rng(3), subsets=(2,)) for _ in range(2))
    assert one == two


def test_a_probe_of_models_is_refused_by_the_oracle(rng):
    with pytest.raises(ValueError, match="retrieval looks at a trained model"):
        base.run_trace([partial(retrieval, by=())], traced(pairs=4, d_key=4, reads=4), rng)


def _yaml(name):
    from omegaconf import OmegaConf

    return OmegaConf.load(CONF / "probe" / f"{name}.yaml")
