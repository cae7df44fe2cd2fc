"""The probes gates and sgd_step: means counted by hand, and steps of gradient descent that differ where they should."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from probes import mixer, traced, value

from recall_lab.mixer.base import Trace
from recall_lab.mixer.delta_rule import DeltaRule
from recall_lab.mixer.linear import Linear
from recall_lab.model import Model
from recall_lab.probe.base import trace_model
from recall_lab.probe.gates import gates
from recall_lab.probe.sgd_step import sgd_step
from recall_lab.task.base import IGNORE
from recall_lab.task.mqar import MQAR
from recall_lab.task.selective_copying import SelectiveCopying
from recall_lab.workload import probe_model


def model_trace(name: str, **fields) -> Trace:
    """A trace of random hidden vectors, with two heads."""
    m = mixer(name, d_model=16, d_key=4, d_value=4, heads=2)
    with torch.no_grad():
        q, k, v, gates, _ = m.project(torch.randn(3, 9, 16))
        o, _ = m.parallel(q, k, v, gates)
    return Trace(m, q, k, v, gates, o, torch.full((3, 9), IGNORE), layer=1)


def test_gates_by_role_equal_means_by_hand():
    trace = model_trace("gated_linear")
    roles = np.array([["value", "filler", "key"] * 3] * 3)
    roles[0, 0] = "filler"
    rows = gates(replace(trace, roles=roles), None)
    for role in ("value", "filler", "key", "all"):
        where = torch.from_numpy((roles == role) | (role == "all"))
        for head in range(2):
            here = {"role": role, "head": head, "layer": 1}
            sigma, decay = (trace.gates[name][:, head][where] for name in ("write", "log_decay"))
            assert value(rows, "gate_write", **here) == pytest.approx(float(sigma.mean()), rel=1e-5)
            assert value(rows, "gate_log_decay", **here) == pytest.approx(float(decay.mean()), rel=1e-5)
            for part in ("q", "k", "v"):
                lengths = getattr(trace, part)[:, head][where].square().sum(-1).sqrt()
                assert value(rows, f"{part}_norm", **here) == pytest.approx(float(lengths.mean()), rel=1e-5)


def test_a_gate_per_channel_is_averaged_over_its_channels():
    trace = model_trace("gla")
    (name,) = trace.gates
    assert trace.gates[name].dim() == 4
    assert value(gates(trace, None), f"gate_{name}", head=1, role="all") == pytest.approx(
        float(trace.gates[name][:, 1].mean()), rel=1e-5
    )


def test_without_roles_there_is_one_row_per_measure_and_head():
    rows = gates(traced(Linear, pairs=8, d_key=4), None)
    assert [(row["metric"], row["role"]) for row in rows] == [(f"{part}_norm", "all") for part in "qkv"]
    assert value(rows, "k_norm") == pytest.approx(1)


@pytest.mark.parametrize("task", [SelectiveCopying(length=16, data=2), MQAR(vocab=64, length=16, pairs=2, key_parts=2)])
def test_the_traces_of_a_run_hold_the_roles_of_its_task(task):
    batch = task.sample(2, np.random.default_rng(0))
    model = Model(vocab=task.vocab, d_model=8, layers=1, mixer=Linear)
    (trace,) = trace_model(model, batch, task.roles(batch.tokens))
    first = task.roles(batch.tokens).reshape(2, 16, -1)[..., 0]
    assert (trace.roles == first).all()
    assert {"value", "query", "filler"} <= set(first.flat)
    (without,) = trace_model(model, batch)
    assert without.roles is None
    rows, missing = probe_model({"gates": gates}, model, task, [{}], 0, 2)
    assert missing == []
    assert {row["role"] for row in rows} == {*first.flat, "all"}


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta", "kda"])
def test_the_update_is_a_step_of_gradient_descent(name):
    (row,) = sgd_step(model_trace(name), None)
    assert row["metric"] == "sgd_error"
    assert row["layer"] == 1
    assert row["value"] < 1e-14


def test_another_update_is_not():
    """A write strength that the update does not use, as in an update with a constant rate, is found out."""

    class Constant(DeltaRule):
        def update(self, k, v, gates):
            return super().update(k, v, {"beta": torch.full_like(gates["beta"], 0.5)})

    trace = traced(Constant, pairs=8, d_key=4, gates={"beta": 1.0})
    (row,) = sgd_step(trace, None)
    assert row["value"] > 0.1
    (row,) = sgd_step(replace(trace, gates={"beta": torch.full_like(trace.gates["beta"], 0.5)}), None)
    assert row["value"] < 1e-14


def test_a_mechanism_without_a_write_strength_has_no_step():
    assert sgd_step(traced(Linear, pairs=8, d_key=4), None) == []
    with pytest.raises(ValueError, match="steps=0: must be a whole number of at least 1"):
        sgd_step(traced(Linear, pairs=8, d_key=4), None, steps=0)
