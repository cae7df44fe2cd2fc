"""Probe effective_attention: weights and influence versus known weights, closed forms and the Jacobian."""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import hydra
import numpy as np
import pytest
import torch
from conftest import config
from mixers import LINEAR_IN_V
from probes import traced, value

from recall_lab.mixer.base import Trace
from recall_lab.mixer.delta_rule import DeltaRule
from recall_lab.mixer.gated_linear import GatedLinear
from recall_lab.mixer.linear import Linear
from recall_lab.mixer.lstm import LSTM
from recall_lab.mixer.rnn import RNN
from recall_lab.mixer.softmax import Softmax
from recall_lab.model import Model
from recall_lab.probe import queries
from recall_lab.probe.effective_attention import effective_attention, influence, matrix_rows, spread, static_share
from recall_lab.task.base import IGNORE
from recall_lab.task.mqar import MQAR
from recall_lab.theory import linear_attention, softmax


@pytest.mark.parametrize("name", LINEAR_IN_V)
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


def test_the_positions_that_hold_an_answer(rng):
    """Its own and those after it that a convolution reaches; of the last token, there are none after it."""
    attention = torch.tensor([[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.5, -0.25, 0.25, 0], [0.1, 0.2, 0.3, 0.4]]])
    source = torch.tensor([[IGNORE, IGNORE, 0, 3]])
    rows = spread(attention, source != IGNORE, source, top=1, sink=2, token_bins=0, width=2)
    assert value(rows, "target_share", statistic="mean") == pytest.approx((0.75 + 0.4) / 2)
    assert value(rows, "target_weight", statistic="mean") == pytest.approx((0.25 + 0.4) / 2)
    batch = MQAR(vocab=64, length=48, pairs=8).sample(3, rng)
    shares = []
    for width in (0, 1, 4):
        torch.manual_seed(0)
        model = Model(vocab=64, mixer=partial(Softmax, short_conv=width), d_model=32, layers=1, mlp=0.0)
        with torch.no_grad():
            (trace,) = model.trace(torch.from_numpy(batch.tokens), torch.from_numpy(batch.factors["source"]).long())
        weights = trace.mixer.effective_attention(trace.q, trace.k, trace.gates)[:, 0]
        own = [
            float(weights[b, t, s : s + max(1, width)].sum())
            for b, sources in enumerate(batch.factors["source"])
            for t, s in enumerate(sources)
            if s != IGNORE
        ]
        rows = effective_attention(trace, rng, matrix=False)
        shares.append(value(rows, "target_share", statistic="mean", head=0))
        assert shares[-1] == pytest.approx(np.mean(own), rel=1e-5)
    assert shares[2] > shares[1]


def test_static_share():
    queries = torch.ones(1, 8, dtype=torch.bool)
    alike = torch.zeros(1, 8, 8)
    alike[:, 4:, :4] = torch.tensor([1.0, 0, 2, 0])
    assert float(static_share(alike, queries)) == pytest.approx(1)
    own = torch.zeros(1, 8, 8)
    own[0, 4:, :4] = torch.eye(4)
    assert float(static_share(own, queries)) == pytest.approx(0, abs=1e-12)
    chance = torch.rand(400, 16, 16, generator=torch.Generator().manual_seed(0))
    few = torch.zeros(400, 16, dtype=torch.bool)
    few[:, 12:] = True
    assert float(static_share(chance, few).mean()) < 0.1  # a plain ratio of variances would give 1/4
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
    """One-dimensional keys, one of 100 and the others 1, and a query of 1."""
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
    for chunk in (1, 30, 100):  # blocks of 1, of some, and of all positions
        assert torch.allclose(influence(trace, chunk), found, atol=1e-7)
    assert torch.allclose(found[0, 0], exact.square().sum((1, 3)).div(3).sqrt(), atol=1e-6)
    rows = effective_attention(trace, rng)
    assert all(row["metric"].startswith("influence_") for row in rows)
    with pytest.raises(TypeError, match="not linear in v"):
        queries.weights(trace, trace.q, 4)


@pytest.mark.parametrize("make", [RNN, LSTM, partial(GatedLinear, write=1), Softmax])
def test_influence_equals_the_jacobian_of_all_pairs(make):
    """With fewer and with more directions than inputs, with growing states, and in several blocks."""
    torch.manual_seed(0)
    m = make(d_model=6, heads=2, d_key=2, d_value=3, short_conv=0).requires_grad_(False)
    q, k, v, gates, _ = m.project(torch.randn(2, 9, 6))
    trace = Trace(m, q, k, v, gates, v, torch.full((2, 9), IGNORE))
    exact = torch.autograd.functional.jacobian(lambda v: m.parallel(q, k, v, gates)[0], v)  # b h t d, b h s e
    power = exact.square().sum((3, 7)).diagonal(dim1=0, dim2=3).diagonal(dim1=0, dim2=2)  # t s b h
    with torch.no_grad():
        for chunk in (1, 200, 1 << 20):
            assert torch.allclose(influence(trace, chunk), (power / 3).sqrt().permute(2, 3, 0, 1), atol=1e-6)


BOUND = """
import resource, time
import numpy as np, torch
torch.set_num_threads(1)
from recall_lab.mixer.rnn import RNN
from recall_lab.oracle import Oracle
from recall_lab.probe.effective_attention import influence
oracle = Oracle(pairs=512, d_key=64, reads=1024)
trace = oracle.trace(oracle.mixer(RNN), np.random.default_rng(0))
started = time.process_time()
with torch.no_grad():
    assert influence(trace).shape == (2, 1, 512, 512)
print(time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_influence_of_a_long_sequence_is_bounded():
    """n = 512, 2 sequences, d = 64: less than 60 s on one core and less than 2 GB."""
    out = subprocess.run([sys.executable, "-c", BOUND], capture_output=True, text=True, check=True).stdout.split()
    seconds, kibibytes = float(out[0]), int(out[1])
    assert seconds < 60
    assert kibibytes < 2_000_000


@pytest.mark.parametrize("length", [1, 7, 128])
def test_a_short_matrix_is_written_out_in_full(length):
    attention, source = torch.randn(length, length).tril(), torch.arange(length) - 1
    rows = matrix_rows(attention, source)
    assert len(rows) == length * (length + 1) // 2
    for row in rows:
        assert row["value"] == attention[row["query"], row["token"]]
        assert (row["source"], row["block"], row["metric"]) == (row["query"] - 1, 1, "weight")


@pytest.mark.parametrize(("length", "block"), [(129, 2), (300, 3), (1024, 8)])
def test_a_long_matrix_is_thinned(length, block):
    """Every entry is in A: of a query with an answer if the block has one, and with the largest |A| of its block."""
    attention = torch.randn(length, length, generator=torch.Generator().manual_seed(0)).tril()
    source = torch.full((length,), IGNORE)
    source[length - 1] = 5
    attention[length - 1, 5] = -100
    rows = matrix_rows(attention, source)
    cells = -(-length // block)
    assert len(rows) == cells * (cells + 1) // 2
    found = {(row["query"] // block, row["token"] // block) for row in rows}
    assert found == {(t, s) for t in range(cells) for s in range(t + 1)}
    for row in rows:
        query, token, start = row["query"], row["token"], row["token"] // block * block
        assert row["value"] == attention[query, token]
        assert row["block"] == block
        assert token <= query
        assert abs(row["value"]) == attention[query, start : min(start + block, query + 1)].abs().max()
    (needle,) = [row for row in rows if row["value"] == -100]
    assert (needle["query"], needle["token"], needle["source"]) == (length - 1, 5, 5)


def test_the_residual_of_zero_outputs_is_zero(rng):
    """β = 0: nothing is written, A and o are zero."""
    trace = traced(DeltaRule, pairs=8, d_key=8, reads=16, gates={"beta": 0})
    rows = effective_attention(trace, rng)
    assert value(rows, "residual") == 0
    assert value(rows, "effective_tokens", statistic="mean") == 0
    assert all(np.isfinite(row["value"]) for row in rows)
    wrong = effective_attention(replace(trace, o=trace.o + 1), rng)
    assert value(wrong, "residual") == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0}, "top=0: must be a whole number of at least 1"),
        ({"sink": -1}, "sink=-1: must be a whole number of at least 0"),
        ({"token_bins": -2}, "token_bins=-2: must be a whole number of at least 0"),
    ],
)
def test_options_out_of_range_are_refused(rng, options, message):
    with pytest.raises(ValueError, match=message):
        effective_attention(traced(pairs=4, d_key=4, reads=4), rng, **options)


def test_a_single_token_has_finite_rows(rng):
    rows = effective_attention(traced(pairs=1, d_key=4, reads=4), rng)
    assert all(np.isfinite(row["value"]) for row in rows)


def test_the_metrics_of_a_head(rng):
    """Those of the docstring; where the mechanism is not linear in v, with a prefix and without the residual."""
    metrics = {"target_weight", "target_share", "target_share_by_tokens", "entropy", "effective_tokens", "top_mass",
               "distance", "sink_mass", "static_share"}  # fmt: skip
    fields = {"pairs": 8, "d_key": 4, "reads": 8}
    rows = effective_attention(traced(**fields), rng, matrix=False)
    assert {row["metric"] for row in rows} == metrics | {"residual"}
    assert {row["metric"] for row in effective_attention(traced(**fields), rng)} > metrics | {"residual"}
    rows = effective_attention(traced(RNN, **fields), rng, matrix=False)
    assert {row["metric"] for row in rows} == {f"influence_{metric}" for metric in metrics}
