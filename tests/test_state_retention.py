"""Probe state_retention: answers to keys, decoders, spectra and ranks versus closed forms and known states."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from probes import traced, value

from recall_lab.mixer.delta_rule import DeltaRule
from recall_lab.mixer.linear import Linear
from recall_lab.mixer.rnn import RNN
from recall_lab.mixer.softmax import Softmax
from recall_lab.mixer.window import Window
from recall_lab.probe.state_retention import state_retention
from recall_lab.task.base import IGNORE
from recall_lab.theory import delta_rule, linear_attention

retention = partial(state_retention, after=(1,), read="all", age_reads=0, lags=())


@pytest.mark.parametrize("n", [32, 64, 128])
def test_keyed_reading_of_sums_and_deltas_follows_theory(rng, n):
    fields = {"pairs": n, "d_key": 32, "candidates": 1024, "reads": 4096}
    rows = retention(traced(**fields), rng, age_bins=0)
    assert value(rows, "error") == pytest.approx(linear_attention.error(n, 32), rel=0.06)
    assert value(rows, "cosine") == pytest.approx(linear_attention.cosine(n, 32), rel=0.03)
    assert value(rows, "top1") == pytest.approx(linear_attention.top1(n, 32, 32, 1024), abs=0.05)
    rows = retention(traced(DeltaRule, **fields), rng)
    assert value(rows, "error") == pytest.approx(delta_rule.error(np.arange(n), n, 32).mean(), rel=0.04)
    by_age = {row["age"]: row["value"] for row in rows if row["metric"] == "error_by_age"}
    assert max(by_age) > 0.8 * n
    for age, error in by_age.items():
        assert error == pytest.approx(delta_rule.error(round(age), n, 32), abs=0.25)


def test_a_position_is_the_end_of_a_prefix(rng):
    trace = traced(pairs=64, d_key=16, reads=512)
    rows = retention(trace, rng, after=(0.25, 1.0), age_bins=0, spectrum=False)
    cut = {name: getattr(trace, name)[:, :, :16] for name in ("q", "k", "v", "o")}
    short = replace(trace, **cut, source=trace.source[:, :16])
    for metric in ("top1", "error", "norm", "bits_per_entry"):
        assert value(rows, metric, position=16) == pytest.approx(value(retention(short, rng), metric, position=16))


def test_an_overwritten_value_is_not_expected(rng):
    """Linear attention adds old and new value, the delta rule replaces; only the new value counts as correct."""
    fields = {"pairs": 16, "d_key": 64, "overwrites": 16, "reads": 512, "keys": "orthogonal"}
    delta = retention(traced(DeltaRule, **fields), rng, age_bins=0)
    assert value(delta, "top1") == 1
    assert value(delta, "error") < 1e-6
    both = retention(traced(Linear, **fields), rng, age_bins=0)
    assert value(both, "error") == pytest.approx(1, abs=0.05)
    assert [row["pairs"] for row in both if row["metric"] == "top1"] == [16]


def test_more_passes_approach_least_squares(rng):
    errors = [
        value(retention(traced(DeltaRule, pairs=32, d_key=32, passes=p), rng, age_bins=0), "error") for p in (1, 4, 16)
    ]
    assert errors[0] == pytest.approx(delta_rule.error(np.arange(32), 32, 32).mean(), rel=0.06)
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.2


def test_read_asked_queries_only_the_keys_that_the_batch_queries(rng):
    trace = traced(pairs=16, d_key=16, reads=64)
    source = torch.full_like(trace.source, IGNORE)
    source[:, 10], source[:, 12] = 3, 3
    rows = retention(replace(trace, source=source), rng, read="asked", age_bins=4)
    (top1,) = (row for row in rows if row["metric"] == "top1")
    assert (top1["count"], top1["pairs"]) == (len(trace.q), 16)  # one answer per sequence, from a state with 16 pairs
    assert [row["age"] for row in rows if row["metric"] == "top1_by_age"] == [12]
    with pytest.raises(ValueError, match="read='some': must be one of all, asked"):
        retention(trace, rng, read="some")


def test_spectrum_of_a_known_state(rng):
    """Orthonormal keys and values, n of them: n equal singular values."""
    trace = traced(pairs=8, d_key=16, keys="orthogonal", reads=8)
    values = torch.linalg.qr(torch.randn(16, 8))[0].T[None, None]
    rows = retention(replace(trace, v=values, candidates=None), rng, age_bins=0)
    for metric in ("effective_rank", "stable_rank", "participation"):
        assert value(rows, metric) == pytest.approx(8, rel=1e-4)
    assert value(rows, "norm") == pytest.approx(8**0.5, rel=1e-5)
    assert value(rows, "singular_value", index=8) == pytest.approx(1 / 8, rel=1e-4)
    assert value(rows, "singular_value", index=9) < 1e-6
    assert value(rows, "top1") == 1
    assert value(rows, "bits") == pytest.approx(8 * 3)


def test_decoder_predicts_values_and_its_control_does_not(rng):
    trace = traced(pairs=6, d_key=8, keys="orthogonal", shared_keys=True, candidates=32, reads=6 * 400)
    rows = retention(trace, rng, lags=(0, 5), age_bins=0)
    for lag in (0, 5):
        assert value(rows, "decode_top1", lag=lag) > 0.99
        assert value(rows, "decode_r2", lag=lag) > 0.98
        assert value(rows, "decode_control", lag=lag) < 0.1
        assert value(rows, "selectivity", lag=lag) > 0.9
    # If keys differ between sequences, a linear decoder that does not get them cannot predict values.
    apart = retention(traced(pairs=6, d_key=8, candidates=32, reads=6 * 400), rng, lags=(3,), age_bins=0)
    assert value(apart, "decode_top1", lag=3) < 0.12
    assert not [row for row in retention(trace, rng, lags=(6,)) if "lag" in row]
    with pytest.raises(ValueError, match="lags=-1: must be a whole number of at least 0"):
        retention(trace, rng, lags=(-1,))


def test_effective_state_size(rng):
    fields = {"pairs": 48, "d_key": 4, "reads": 48}

    def largest(make, **more):
        rows = retention(traced(make, **fields, **more), rng, state_rank=True)
        return max(row["value"] for row in rows if row["metric"] == "state_rank")

    assert largest(Linear) == 4
    assert largest(DeltaRule, gates={"beta": 0.5}) == 4
    assert largest(Softmax) > 16
    assert largest(partial(Window, budget=1)) == 0
    assert retention(traced(partial(RNN), pairs=4, d_key=4), rng, state_rank=True)


def test_every_bin_of_ages_has_enough_answers(rng):
    """Eight sequences of 512 pairs: at least 50 answers per bin, although each age alone has only 8."""
    rows = state_retention(traced(pairs=512, d_key=16, reads=4096), rng, after=(1,), read="all", lags=())
    ages = [row for row in rows if row["metric"].endswith("_by_age")]
    assert {row["metric"] for row in ages} == {"top1_by_age", "error_by_age", "cosine_by_age"}
    assert min(row["count"] for row in ages) >= 50
    counts = [row["count"] for row in ages if row["metric"] == "top1_by_age"]
    assert sum(counts) == 8 * 512
    assert len(counts) >= 8


def test_an_empty_state(rng):
    """The delta rule at β = 0: the answers are zero, and every number is finite."""
    rows = retention(traced(DeltaRule, pairs=8, d_key=8, reads=64, gates={"beta": 0}), rng, lags=(1,))
    assert value(rows, "error") == pytest.approx(1)
    assert value(rows, "norm") == value(rows, "effective_rank") == value(rows, "cosine") == 0
    assert all(np.isfinite(row["value"]) for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"after": (0.5, 2)}, r"after=\[0.5, 2\]: must be shares above 0"),
        ({"age_bins": -1}, "age_bins=-1: must be a whole number of at least 0"),
        ({"age_reads": -1}, "age_reads=-1: must be a whole number of at least 0"),
        ({"lags": (True,)}, "lags=True: must be a whole number"),
        ({"ridge": -1}, "ridge=-1: must be a number of at least 0"),
        (
            {"lags": (1,)},
            r"probe.state_retention.lags needs at least 4 sequences, but there are 2: raise test.probe_sequences",
        ),
    ],
)
def test_options_out_of_range_are_refused(rng, options, message):
    with pytest.raises(ValueError, match=message):
        retention(traced(pairs=8, d_key=8, reads=16), rng, **options)


def test_a_decoder_needs_four_sequences(rng):
    """At 32 pairs of 8 dimensions; the columns say for which lag."""
    fields = {"pairs": 32, "d_key": 8}
    rows = retention(traced(**fields, reads=4 * 32), rng, lags=(1, 40))
    assert {row["lag"] for row in rows if row["metric"].startswith("decode_")} == {1}
    with pytest.raises(ValueError, match="needs at least 4 sequences, but there are 3"):
        retention(traced(**fields, reads=3 * 32), rng, lags=(1,))


def test_ages_are_counted_from_the_position(rng):
    """After nine tokens the pairs are 0 to 8 tokens old: 4 on average."""
    rows = retention(traced(pairs=12, d_key=8, reads=120), rng, after=(0.75,), spectrum=False)
    by_age = [(row["age"], row["count"]) for row in rows if row["metric"] == "error_by_age"]
    ages, counts = np.array(by_age).T
    assert (ages.min(), ages.max()) == (0, 8)
    assert ages @ counts / counts.sum() == pytest.approx(4)
    assert {(row["position"], row["d_key"], row["layer"]) for row in rows} == {(9, 8, 0)}


def test_the_state_size_is_measured_at_the_ninths_of_the_sequence(rng):
    rows = retention(traced(pairs=18, d_key=4, reads=36), rng, state_rank=True)
    ranks = {row["position"]: row["value"] for row in rows if row["metric"] == "state_rank"}
    assert ranks == {2: 2, 4: 4, 6: 4, 8: 4, 10: 4, 12: 4, 14: 4, 16: 2}
