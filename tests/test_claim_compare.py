"""Rows with their sampling error, and what is missing for a comparison."""

import pandas as pd
import pytest
from claims import rows, spread
from scipy import stats

from recall_lab.claim.compare import cells, difference, missing_points, rows_of


def accuracies(mixer, values, error=0.02, **cell):
    parts = {"accuracy": values, "standard_error": [error] * len(values)}
    return pd.concat([rows("e", metric, mixer, part, "test", **cell) for metric, part in parts.items()])


def test_the_error_of_an_accuracy_is_that_of_its_cell():
    table = pd.concat([accuracies("a", [0.5, 0.6], error, task__length=n) for error, n in ((0.02, 8), (0.04, 16))])
    found = rows_of(table, "e", "accuracy", "test")
    assert dict(found.groupby("task.length")["error"].first()) == {8: 0.02, 16: 0.04}
    assert cells(found) == ["task.length"]


def test_the_error_of_a_row_with_an_interval():
    table = rows("e", "gate_write", "a", [0.5], low=0.4, high=0.6)
    assert rows_of(table, "e", "gate_write")["error"].tolist() == pytest.approx([0.1 / stats.norm.ppf(0.975)])
    assert "error" not in rows_of(table.assign(split="oracle"), "e", "gate_write")


def test_rows_of_another_experiment_and_quantiles_are_left_out():
    table = pd.concat(
        [
            rows("e", "share", "a", [0.5], statistic="mean", low=0.4, high=0.6),
            rows("e", "share", "a", [0.1], statistic="q05"),
            rows("f", "share", "a", [0.9], statistic="mean", low=0.8, high=1.0),
        ]
    )
    assert rows_of(table, "e", "share")["value"].tolist() == [0.5]
    assert rows_of(table, "g", "share").empty


def test_a_difference_is_paired_over_seeds_and_cells():
    table = pd.concat(
        accuracies(mixer, spread(level + n / 100), task__length=n)
        for mixer, level in (("a", 0.7), ("b", 0.4))
        for n in (8, 16)
    )
    found, gap = difference(rows_of(table, "e", "accuracy", "test"), "a", "b", ["task.length"])
    assert gap == ""
    assert found.value == pytest.approx(0.3)
    assert found.replicates == 5
    assert found.high > 0.3  # the sampling of test sequences, since all seeds agree


@pytest.mark.parametrize(
    ("lost", "gap"),
    [
        (lambda t: t["mixer"] == "b", "b"),
        (lambda t: (t["mixer"] == "b") & (t["task.length"] == 16) & (t["seed"] == 1), "b at length=16, seed 1"),
        (lambda t: (t["mixer"] == "a") & (t["task.length"] == 8), "a at length=8, seed 0"),
        (lambda t: (t["mixer"] == "a") == (t["seed"] < 1), "a seed that a and b share"),
    ],
)
def test_what_is_missing_for_a_difference(lost, gap):
    table = pd.concat(
        accuracies(mixer, [0.5, 0.6], task__length=n, task__vocab=64) for mixer in ("a", "b") for n in (8, 16)
    )
    measured = rows_of(table[~lost(table)], "e", "accuracy", "test")
    assert difference(measured, "a", "b", cells(measured)) == (None, gap)


def test_several_series_of_a_mixer_are_not_averaged():
    table = pd.concat(rows("e", "error", "a", [0.5], series=f"a heads={heads}") for heads in (1, 2))
    assert missing_points({"a": table}, []) == "one series of a: there are a heads=1, a heads=2"
    assert missing_points({"a": table[:1]}, []) == ""
