"""Estimates, decisions and verdict tables of claims, on made-up tables."""

from dataclasses import astuple

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from recall_lab.claim.base import (
    Estimate,
    at_least,
    at_most,
    contrast,
    effect,
    exact,
    mean,
    reported,
    scores,
    unlearned,
    unless,
    verdict_table,
    within,
)


def rows(values, error=None, data_seed=0, **columns):
    """One row per seed."""
    table = pd.DataFrame({"seed": range(len(values)), "data_seed": data_seed, "value": values, **columns})
    return table if error is None else table.assign(error=error)


def test_the_interval_is_students():
    values = [0.31, 0.36, 0.44]
    found = mean(rows(values))
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert (found.value, found.low, found.high) == pytest.approx((np.mean(values), low, high))
    assert found.replicates == 3


def test_equal_seeds_have_at_least_the_sampling_error():
    """All seeds are tested on the same sequences: three of them sample no better than one."""
    found = mean(rows([0.5, 0.5, 0.5], error=0.01))
    assert found.high - 0.5 == pytest.approx(0.01 * stats.t.ppf(0.975, 2))
    other = mean(rows([0.5, 0.5, 0.5], error=0.01, data_seed=[0, 1, 2]))
    assert other.high - 0.5 == pytest.approx(0.01 / 3**0.5 * stats.t.ppf(0.975, 2))


def test_cells_of_a_run_are_averaged_and_are_no_replicates():
    cells = pd.concat([rows([0.2, 0.4, 0.3]), rows([0.4, 0.6, 0.5])])
    assert astuple(mean(cells)) == pytest.approx(astuple(mean(rows([0.3, 0.5, 0.4]))))


def test_a_contrast_is_paired_over_seeds():
    """Seeds that are good for both arms do not widen the interval of their difference."""
    first, second = rows([0.9, 0.5, 0.7]), rows([0.6, 0.2, 0.4])
    found = contrast(first, second.iloc[::-1])
    assert (found.value, found.low, found.high) == pytest.approx((0.3, 0.3, 0.3))
    assert contrast(first, second[second["seed"] < 2]).replicates == 2
    assert contrast(first, second[:0]) is None


def test_a_contrast_is_paired_over_cells_too():
    first = pd.concat([rows([0.9] * 3, cell=1), rows([0.5] * 3, cell=2)])
    second = pd.concat([rows([0.8] * 3, cell=1), rows([0.1] * 3, cell=3)])
    assert contrast(first, second, on=["cell"]).value == pytest.approx(0.1)


def test_errors_of_both_arms_add_up():
    found = contrast(rows([0.5] * 3, error=0.03), rows([0.4] * 3, error=0.04))
    assert found.high - found.value == pytest.approx(0.05 * stats.t.ppf(0.975, 2))


@pytest.mark.parametrize(
    ("low", "high", "decision"), [(0.31, 0.4, "supported"), (0.1, 0.29, "refuted"), (0.2, 0.4, "undecided")]
)
def test_decisions(low, high, decision):
    estimate = Estimate((low + high) / 2, low, high, 5)
    assert at_least("gain", estimate, 0.3).decision == decision
    mirrored = Estimate(-estimate.value, -high, -low, 5)
    assert at_most("loss", mirrored, -0.3).decision == decision


@pytest.mark.parametrize(
    ("low", "high", "decision"),
    [(1.95, 2.05, "supported"), (2.2, 2.4, "refuted"), (1.0, 1.5, "refuted"), (2.0, 2.2, "undecided")],
)
def test_a_tolerance(low, high, decision):
    assert within("exponent", Estimate((low + high) / 2, low, high, 5), 2, 0.1).decision == decision


def test_too_few_seeds():
    assert at_least("gain", Estimate(0.9, 0.8, 1.0, 2), 0.3).decision == "undecided"
    assert at_least("gain", Estimate(0.9, 0.8, 1.0, 3), 0.3).decision == "supported"
    line = at_most("loss", Estimate(0.0, 0.0, 0.01, 4), 0.02)
    assert line.decision == "undecided"
    assert line.reason == "4 seeds, at least 5 are needed"


def test_exact_numbers_need_no_seeds():
    assert at_most("error", exact(1e-14), 1e-10).decision == "supported"
    assert at_most("error", exact(1e-3), 1e-10).decision == "refuted"


def test_what_was_not_measured():
    line = at_least("gain", None, 0.3, missing="delta_rule at 8 updates")
    assert (line.decision, line.missing, line.reason) == ("undecided", True, "not measured: delta_rule at 8 updates")


def test_an_obstacle_makes_a_line_undecided():
    line = at_least("gain", Estimate(0.9, 0.8, 1.0, 3), 0.3)
    assert unless(line, "").decision == "supported"
    assert unless(line, "not trained to the end: linear").decision == "undecided"
    assert unless(reported("beside", exact(1.0)), "whatever").decision == "reported"


def test_an_estimate_in_a_few_characters():
    assert effect(None) == "—"
    assert effect(exact(1024.0)) == "1,024"
    assert effect(Estimate(0.31234, 0.25, 0.37, 3)) == "0.312 [0.25, 0.37], 3 seeds"


def test_the_table_of_a_verdict():
    line = at_least("gain", Estimate(0.9, 0.8, 1.0, 3), 0.3)
    table = verdict_table([("gates", line), ("cost", within("exponent", exact(2.0), 2, 0.1))])
    assert list(table["claim"]) == ["gates", "cost"]
    assert list(table["seeds"]) == [3, "exact"]
    assert list(table["verdict"]) == ["supported", "supported"]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=3, max_size=8), st.floats(-1, 1), st.floats(0, 0.2), st.permutations(range(8))
)
def test_a_shift_and_the_order_of_seeds_change_nothing_else(values, shift, error, order):
    first = mean(rows(values, error=error))
    shuffled = rows(values, error=error).iloc[[i for i in order if i < len(values)]]
    other = mean(shuffled.assign(value=shuffled["value"] + shift))
    assert other.value - first.value == pytest.approx(shift, abs=1e-9)
    assert other.high - other.low == pytest.approx(first.high - first.low, abs=1e-9)
    assert other.high - other.low >= 2 * error * stats.t.ppf(0.975, len(values) - 1) - 1e-9


def test_scores_have_the_error_of_their_own_cell():
    """Of two runs in two cells, one without a recorded error; other splits and metrics are left out."""
    cells = [("r0", 0, 16.0, "linear", 0.5, 0.01), ("r0", 0, 32.0, "linear", 0.4, 0.02),
             ("r1", 1, 16.0, None, 0.7, 0.03), ("r1", 1, 32.0, None, 0.6, None)]  # fmt: skip
    rows = [
        {"run": run, "seed": seed, "task.length": length, "trained_as": other, "split": split, "metric": metric,
         "value": value}
        for run, seed, length, other, accuracy, error in cells
        for split in ("test", "validation")
        for metric, value in (("accuracy", accuracy), ("standard_error", error), ("chance", 0.1)) if value is not None
    ]  # fmt: skip
    found = scores(pd.DataFrame(rows))
    assert found["value"].tolist() == [0.5, 0.4, 0.7, 0.6]
    assert found["error"].tolist()[:3] == [0.01, 0.02, 0.03]
    assert np.isnan(found["error"].iloc[3])
    assert len(scores(pd.DataFrame(rows), "validation")) == 4
    assert scores(pd.DataFrame(rows)[:0]).empty


@pytest.mark.parametrize(
    ("score", "chance", "obstacle"),
    [(0.56, 0.1, ""), (0.54, 0.1, "no model has learned the task: validation score at most 0.54"), (0.54, None, "")],
)
def test_half_way_from_chance_to_1_in_one_cell_is_learned(score, chance, obstacle):
    """The easier of two cells counts, as the mean over seeds, and test scores do not."""
    cells = [(8.0, score + 0.2 * (seed - 0.5), seed) for seed in (0, 1)] + [(64.0, 0.0, seed) for seed in (0, 1)]
    records = [("validation", "accuracy", *cell) for cell in cells] + [("test", "accuracy", 8.0, 1.0, 0)]
    records += [("validation", "chance", 8.0, chance, 0)] if chance else []
    columns = ["split", "metric", "task.length", "value", "seed"]
    table = pd.DataFrame(records, columns=columns).assign(mixer="linear", run="r", data_seed=0)
    assert unlearned(table) == obstacle
    assert unlearned(table[table["split"] == "test"]) == "there are no validation scores"
