"""Running probes, their rows and intervals, and the answers to other queries at one position."""

import inspect
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import config, names
from hydra.utils import instantiate
from mixers import LINEAR_IN_V
from probes import mixer, traced, value
from tables import undocumented

from recall_lab.mixer.base import Trace
from recall_lab.mixer.delta_rule import DeltaRule
from recall_lab.mixer.softmax import Softmax
from recall_lab.model import Model
from recall_lab.probe import base, queries
from recall_lab.probe.base import ProbeError, bins
from recall_lab.probe.cost import cost
from recall_lab.probe.dynamic_access import best_residual, dynamic_access, jacobian
from recall_lab.probe.effective_attention import effective_attention, influence
from recall_lab.probe.retrieval import retrieval
from recall_lab.probe.rows import mean_row, share_row, wilson
from recall_lab.probe.state_retention import state_retention
from recall_lab.task.base import IGNORE
from recall_lab.task.mqar import MQAR
from recall_lab.task.paired_recall import PairedRecall


@pytest.mark.parametrize("name", LINEAR_IN_V)
def test_weights_of_many_queries_are_those_of_each_alone(name):
    """At one position, versus the full sequence with that query at its end."""
    m = mixer(name, d_model=16, d_key=8, d_value=8, heads=2).double()
    x = torch.randn(2, 9, 16, dtype=torch.double)
    q, k, v, gates, _ = m.project(x)
    trace = Trace(m, q, k, v, gates, v, torch.full((2, 9), IGNORE))
    other = torch.randn(2, 2, 5, 8, dtype=torch.double)
    with torch.no_grad():
        seen = queries.weights(trace, other, 8)
        for i in range(5):
            alone = torch.cat([q[:, :, :8], other[:, :, i : i + 1]], dim=2)
            assert torch.allclose(m.effective_attention(alone, k, gates)[:, :, 8], seen[:, :, i], atol=1e-9)


def test_answers_do_not_depend_on_chunks(monkeypatch):
    trace = traced(DeltaRule, pairs=20, d_key=8, reads=40)
    state = queries.state_before(trace, 19)
    together = queries.answers(trace, trace.k, 19, state)
    monkeypatch.setattr(queries, "CHUNK", 1)
    assert torch.allclose(queries.answers(trace, trace.k, 19, state), together, atol=1e-6)


def test_wilson():
    low, high = wilson(8, 10)
    assert (low, high) == (
        pytest.approx(0.4902, abs=1e-3),
        pytest.approx(0.9433, abs=1e-3),
    )  # Wilson 1927, Newcombe 1998
    assert wilson(0, 20)[0] == 0
    assert wilson(20, 20)[1] == 1
    assert wilson(0, 0) == (0, 1)


def test_the_interval_of_a_mean_is_students():
    """Five values with mean 3 and standard error √½; the interval extends 2.7764 standard errors to each side."""
    row = mean_row("x", np.array([1.0, 2, 3, 4, 5]), age=2.0)
    assert (row["low"], row["high"]) == (pytest.approx(3 - 2.7764 * 0.5**0.5, 1e-4), pytest.approx(4.9632, 1e-4))
    assert (row["value"], row["count"], row["age"]) == (3, 5, 2.0)
    assert mean_row("x", torch.tensor([2.0], dtype=torch.bfloat16))["low"] == 2
    with pytest.raises(ValueError, match="x: nothing to measure"):
        mean_row("x", np.array([]))


def test_answers_in_one_sequence_are_not_independent(rng):
    """Eight sequences with 50 equal answers each have the same interval as eight answers."""
    values = rng.standard_normal(8)
    alone, repeated = mean_row("x", values), np.repeat(values, 50)
    clustered = mean_row("x", repeated, np.repeat(np.arange(8), 50))
    assert clustered["value"] == pytest.approx(alone["value"])
    assert clustered["high"] - clustered["low"] == pytest.approx(alone["high"] - alone["low"])
    assert clustered["count"] == 400
    assert mean_row("x", repeated)["high"] - alone["value"] < 0.2 * (alone["high"] - alone["value"])
    # Answers are treated as independent if there is one per sequence, or only one sequence.
    assert mean_row("x", values, np.arange(8)) == alone
    assert mean_row("x", values, np.zeros(8)) == alone


def test_the_interval_of_a_share_is_wilsons_or_wider(rng):
    hits = np.repeat(rng.random(20) < 0.5, 30)
    assert (share_row("x", hits)["low"], share_row("x", hits)["high"]) == wilson(int(hits.sum()), 600)
    clustered = share_row("x", hits, np.repeat(np.arange(20), 30))
    assert clustered["low"] < share_row("x", hits)["low"] < share_row("x", hits)["high"] < clustered["high"]
    same = share_row("x", np.ones(600, dtype=bool), np.repeat(np.arange(20), 30))
    assert (same["low"], same["high"]) == wilson(600, 600)
    few = share_row("x", np.array([True, True, False]), np.array([0, 1, 2]))
    assert 0 <= few["low"] <= few["high"] <= 1


def test_bins_with_few_answers_are_merged():
    ages, reads = np.arange(64), np.full(64, 8)
    found = bins(ages, 16, reads, 50)
    assert np.array_equal(np.concatenate(found), ages)
    assert all(reads[chosen].sum() >= 50 for chosen in found)
    assert len(found[0]) == 7
    # With too few answers in all there is one bin; the last bin is merged with the previous one.
    assert [len(chosen) for chosen in bins(ages, 16, reads, 1000)] == [64]
    assert list(bins(np.arange(4), 4, np.array([9, 9, 9, 1]), 5)[-1]) == [2, 3]
    assert list(bins(np.arange(4), 4, np.array([9, 9, 1, 1]), 5)[-1]) == [1, 2, 3]


def test_every_value_is_in_exactly_one_bin(rng):
    ages = rng.integers(0, 300, 500)
    found = bins(ages, 12)
    assert sorted(np.concatenate(found)) == list(range(500))
    assert 8 <= len(found) <= 12


def test_every_configured_probe_runs_on_a_model(rng):
    torch.manual_seed(0)
    makers = [instantiate(config(f"mixer={name}", "mixer.heads=2").mixer) for name in ("delta_rule", "softmax")]
    model = Model(vocab=32, mixer=makers, d_model=16, layers=2, mlp=0.0)
    batch = MQAR(vocab=32, length=64, pairs=4).sample(8, rng)
    configured = config(f"probe=[{','.join(names('probe'))}]", "probe.cost.lengths=[16,32]", "probe.cost.timed=false",
                        "probe.dynamic_access.subsets=[2]", "probe.dynamic_access.draws=1")  # fmt: skip
    probes = [instantiate(configured.probe[name], _convert_="all") for name in names("probe")]
    rows = base.run(probes, model, batch, rng)
    assert {row["probe"] for row in rows} == set(names("probe"))
    for row in rows:
        assert {"probe", "metric", "value"} <= set(row)
        assert all(isinstance(x, str | int | float) for x in row.values())
        assert np.isfinite(row["value"])
    assert not undocumented({name for row in rows for name in row})
    assert {row["layer"] for row in rows if row["probe"] == "dynamic_access"} == {0, 1}
    assert value(rows, "accuracy") == pytest.approx(1 / 16, abs=0.2)


def test_probes_on_a_paired_task_and_a_softmax_model(rng):
    torch.manual_seed(0)
    model = Model(vocab=32, mixer=instantiate(config("mixer=softmax").mixer), d_model=16, layers=1, mlp=0.0)
    batch = PairedRecall(vocab=32, length=24, pairs=8).sample(6, rng)
    rows = base.run([partial(state_retention, read="asked"), effective_attention, dynamic_access], model, batch, rng)
    assert {"top1", "target_share", "rank", "moved"} <= {row["metric"] for row in rows}


def test_same_seed_same_rows():
    trace = traced(Softmax, pairs=24, d_key=8, reads=48)
    one, two = (dynamic_access(trace, np.random.default_rng(3), subsets=(2,)) for _ in range(2))
    assert one == two


def test_a_probe_of_models_is_refused_by_the_oracle(rng):
    with pytest.raises(ValueError, match="probe retrieval: needs a trained model"):
        base.run_on_trace(partial(retrieval, by=()), traced(pairs=4, d_key=4, reads=4), rng)


# What fails is named.


def fails(trace, rng, *, lags=()):
    raise RuntimeError("no such thing")


def undefined(trace, rng):
    return [{"metric": "good", "value": 1.0}, {"metric": "bad", "value": float("nan"), "age": 3.0}]


def test_a_probe_that_fails_is_named_with_its_layer(rng):
    trace = replace(traced(pairs=4, d_key=4, reads=4), layer=3)
    with pytest.raises(
        ProbeError, match=r"^probe fails, layer 3: RuntimeError: no such thing \(.*/test_probe.py, line \d+\)$"
    ):
        base.run_on_trace(partial(fails, lags=(1,)), trace, rng)
    with pytest.raises(
        ProbeError, match=r"^probe state_retention, layer 3: probe.state_retention.lags needs at least 4"
    ):
        base.run_on_trace(partial(state_retention, lags=(1,)), trace, rng)


def test_rows_hold_plain_numbers(rng):
    """Numbers of numpy and torch become Python's, which can be written; a row without a number is an error."""
    trace = traced(DeltaRule, pairs=4, d_key=8, reads=8)

    def plain(trace, rng):
        return [{"metric": "a", "value": torch.tensor(0.5), "lag": np.int64(3)}]

    (row,) = base.run_on_trace(plain, trace, rng)
    assert row == {"probe": "plain", "metric": "a", "value": 0.5, "lag": 3}
    assert type(row["value"]) is float
    assert type(row["lag"]) is int
    for wrong in ({"metric": "a"}, {"value": 1.0}, {"metric": "a", "value": "much"}, {"metric": "a", "value": None}):

        def odd(trace, rng, wrong=wrong):
            return [wrong]

        with pytest.raises(ProbeError, match=r"probe odd, layer 0: .*must have a metric and a number as value"):
            base.run_on_trace(odd, trace, rng)


def test_a_row_that_is_not_finite_is_named_and_the_others_are_kept(rng):
    with pytest.raises(ProbeError, match=r"^probe undefined, layer 0: metric bad: value is nan$") as caught:
        base.run_on_trace(undefined, traced(pairs=4, d_key=4, reads=4), rng)
    assert caught.value.rows == [{"probe": "undefined", "metric": "good", "value": 1.0}]


@pytest.mark.parametrize("part", ["q", "k", "v", "o"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_trace_that_is_not_finite_is_refused(rng, part, number):
    trace = traced(DeltaRule, pairs=4, d_key=4, reads=8)
    broken = getattr(trace, part).clone()
    broken[1, 0, 2, 3] = number
    named = (
        f"probe effective_attention, layer 0: the {'outputs' if part == 'o' else 'inputs'} {part} of DeltaRule hold 1"
    )
    with pytest.raises(ProbeError, match=named):
        base.run_on_trace(effective_attention, replace(trace, **{part: broken}), rng)


def test_a_gate_of_minus_infinity_is_not_refused(rng):
    """It forgets everything; the outputs are finite."""
    trace = traced(partial(mixer, "gated_linear"), pairs=4, d_key=4, reads=8, gates={"log_decay": -float("inf")})
    rows = base.run_on_trace(partial(state_retention, lags=()), trace, rng)
    assert value(rows, "top1", position=4) < 1


def test_a_model_whose_outputs_are_not_finite_is_refused(rng):
    model = Model(vocab=32, mixer=partial(mixer, "linear"), d_model=16, layers=1)
    model.train()
    batch = MQAR(vocab=32, length=16, pairs=2).sample(4, rng)
    with torch.no_grad():
        model.read_out.bias[5] = float("nan")
    with pytest.raises(ProbeError, match=r"^probe retrieval: 8 of the model's 256 outputs are not finite$"):
        base.run_on_model(retrieval, model, batch, rng)
    assert model.training


def test_tracing_does_not_change_the_model(rng):
    model = Model(vocab=32, mixer=partial(mixer, "linear"), d_model=16, layers=2)
    batch = MQAR(vocab=32, length=16, pairs=2).sample(4, rng)
    for training in (True, False):
        model.train(training)
        traces = base.trace_model(model, batch)
        assert model.training is training
    assert [trace.layer for trace in traces] == [0, 1]
    assert not traces[0].q.requires_grad
    assert np.array_equal(traces[0].source.numpy(), batch.factors["source"])


@pytest.mark.parametrize("name", ["linear", "delta_rule", "softmax", "rnn"])
def test_tensors_are_made_on_the_device_of_the_trace(name):
    """On the meta device of torch, where tensors on other devices raise an error."""
    with torch.device("meta"):
        m = mixer(name, d_model=16, d_key=8, d_value=8, heads=2)
        q, k, v, gates, _ = m.project(torch.empty(2, 9, 16))
    trace = Trace(m, q, k, v, gates, v, torch.empty(2, 9, dtype=torch.long, device="meta"))
    found = [
        *queries.state_before(trace, 0).values(),
        queries.answers(trace, q, 8, queries.state_before(trace, 8)),
        queries.gather(q, trace.source),
        base.effective_rank(base.state_vector(queries.state_before(trace, 8))),
        influence(trace),
        queries.double(trace).q,
    ]
    if m.linear_in_v:
        found += [queries.weights(trace, q, 8), jacobian(trace, q, 8), best_residual(queries.weights(trace, q, 8))]
    assert {x.device.type for x in found} == {"meta"}


def test_positions_are_the_ends_of_shares(rng):
    trace = traced(pairs=16, d_key=8, reads=16)
    assert base.positions(trace, (0.5, 0.01, 1, 0.25, 0.26)) == [0, 3, 7, 15]
    for share in (0, -0.5, 1.1):
        with pytest.raises(ValueError, match="must be shares above 0 and at most 1"):
            base.positions(trace, (share,))


@pytest.mark.parametrize(
    ("probe", "option"),
    [(cost, "timed"), (effective_attention, "matrix"), (state_retention, "spectrum"), (state_retention, "state_rank")],
)
def test_one_is_no_flag(probe, option, rng):
    """By the check itself: `unwrap` leaves out the check of annotations that the tests add."""
    with pytest.raises(ValueError, match=f"^{option}=1: must be"):
        inspect.unwrap(probe)(traced(pairs=4, d_key=4, reads=4), rng, **{option: 1})


def test_the_scale_of_queries():
    """That of the queries with an answer; √d_key where there is none, or where they point away from their keys."""
    trace = traced(pairs=8, d_key=16, reads=16)
    assert queries.query_scale(replace(trace, q=3 * trace.q)) == pytest.approx(3 * queries.query_scale(trace))
    assert queries.query_scale(replace(trace, source=torch.full_like(trace.source, IGNORE))) == 4
    assert queries.query_scale(replace(trace, q=-trace.q)) == 4
