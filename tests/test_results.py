"""From rows to numbers: intervals, names of series, choice of the learning rate, summaries."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sweep_folder import write

from recall_lab import files, results


def table(*runs: dict) -> pd.DataFrame:
    """A table of runs, each {mixer, lr, seed, validation, test}."""
    rows = []
    for number, run in enumerate(runs):
        for split in ("validation", "test"):
            rows.append(
                {"run": f"r{number}", "task": "mqar", "mixer": run["mixer"], "train.lr": run.get("lr", 0.01),
                 "mixer.heads": run.get("heads", 1), "seed": run.get("seed", 0), "split": split,
                 "metric": "accuracy", "value": run[split], "task.length": 64}
            )  # fmt: skip
    made = pd.DataFrame(rows)
    made["series"] = results.series(made)
    return made


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
@example([0.0, 0.0, 2.2e-162])
def test_an_interval_holds_the_mean_and_is_the_same_each_time(values):
    low, high = results.interval(values)
    assert low - 1e-12 <= np.mean(values) <= high + 1e-12
    assert (low, high) == results.interval(values) == results.interval(values[::-1])


def test_the_interval_of_few_values_is_students():
    """Three values by hand: mean 2, standard error 1/√3, t(0.975, 2) = 4.302653."""
    low, high = results.interval([1, 2, 3])
    assert (low, high) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), rel=1e-6)


@pytest.mark.parametrize("count", [3, 5, 7, 8, 20])
def test_intervals_cover_the_truth(count):
    """About 95 % of the 95 % intervals of normal values contain the mean; about 91 % for the bootstrap of 8 values."""
    rng = np.random.default_rng(1)
    hits = [low <= 0 <= high for low, high in (results.interval(rng.normal(size=count)) for _ in range(400))]
    assert 0.87 < np.mean(hits) < 0.98


def test_an_interval_of_two_values_is_a_range():
    assert results.interval([0.2, 0.6]) == (0.2, 0.6)
    assert [results.interval_name([1, count]) for count in (1, 2, 3, 8)] == ["range", "range", "95 %", "95 %"]


def test_a_series_is_named_by_the_settings_that_differ():
    made = table(
        {"mixer": "linear", "heads": 1, "validation": 1, "test": 1},
        {"mixer": "linear", "heads": 2, "validation": 1, "test": 1},
        {"mixer": "softmax", "validation": 1, "test": 1},
        {"mixer": "softmax", "seed": 1, "validation": 1, "test": 1},
    )
    assert set(made["series"]) == {"linear heads=1", "linear heads=2", "softmax"}


def test_the_learning_rate_is_chosen_on_validation_alone():
    """The setting that would win on test loses here: choosing on test would keep it."""
    made = table(
        {"mixer": "linear", "lr": 0.01, "validation": 0.9, "test": 0.2},
        {"mixer": "linear", "lr": 0.1, "validation": 0.8, "test": 1.0},
        {"mixer": "softmax", "lr": 0.01, "validation": 0.5, "test": 0.5},
        {"mixer": "softmax", "lr": 0.1, "validation": 0.6, "test": 0.6},
    )
    chosen = results.select(made)
    assert dict(chosen.groupby("mixer")["train.lr"].first()) == {"linear": 0.01, "softmax": 0.1}
    assert set(chosen["series"]) == {"linear", "softmax"}
    assert results.select(chosen).equals(chosen)


def test_policies_with_the_weights_of_another_run_are_separate_series():
    """Rows of a later probe belong to the run whose weights it used, and are selected by its learning rate."""
    made = table(
        {"mixer": "softmax", "lr": 0.01, "validation": 0.5, "test": 0.5},
        {"mixer": "softmax", "lr": 0.1, "validation": 0.6, "test": 0.6},
        {"mixer": "window", "lr": 0.1, "validation": 0.4, "test": 0.4},
    )
    test = made[(made["mixer"] == "softmax") & (made["split"] == "test")]
    later = [test.assign(mixer="window", trained_as="softmax", value=b / 64, **{"mixer.budget": b}) for b in (16, 32)]
    made = pd.concat([made.assign(**{"mixer.budget": 64.0}), *later], ignore_index=True)
    made["series"] = results.series(made)
    test = results.select(made).query("split == 'test'")
    assert test[["run", "series", "value"]].to_numpy().tolist() == [
        ["r1", "softmax", 0.6],
        ["r2", "window budget=64", 0.4],
        ["r1", "window trained_as=softmax budget=16", 0.25],
        ["r1", "window trained_as=softmax budget=32", 0.5],
    ]


def test_a_summary_is_the_mean_over_runs():
    made = table(
        {"mixer": "linear", "seed": 0, "validation": 0, "test": 0.25},
        {"mixer": "linear", "seed": 1, "validation": 0, "test": 0.75},
    )
    (line,) = results.summarise(made, ["series"]).to_dict("records")
    assert line == {"series": "linear", "mean": 0.5, "low": 0.25, "high": 0.75, "runs": 2}


def test_a_learning_rate_with_a_failed_seed_is_not_chosen():
    made = table(
        {"mixer": "linear", "lr": 0.01, "seed": 0, "validation": 0.6, "test": 0.6},
        {"mixer": "linear", "lr": 0.01, "seed": 1, "validation": 0.6, "test": 0.6},
        {"mixer": "linear", "lr": 0.1, "seed": 1, "validation": 0.9, "test": 0.9},
    )
    assert set(results.select(made)["train.lr"]) == {0.01}


def scores(values: dict[str, list[float]], metric: str = "accuracy") -> pd.DataFrame:
    """One test row per value, of runs that differ in their seed alone, grouped by the column `group`."""
    return pd.DataFrame(
        [{"run": f"{group}{seed}", "mixer": "linear", "task": "mqar", "seed": seed, "split": "test", "metric": metric,
          "value": value, "group": group} for group, found in values.items() for seed, value in enumerate(found)]
    )  # fmt: skip


def test_groups_are_in_order_and_shares_stay_shares():
    """Student's interval of .7, .9 and 1 ends at 1.25, that of 0, .1 and .3 begins at −.25."""
    made = results.average(scores({"b": [0.7, 0.9, 1.0], "a": [0.0, 0.1, 0.3]}), ["group"])
    assert made["group"].tolist() == ["a", "b"]
    assert made["low"].tolist() == [0, pytest.approx(0.4872, abs=1e-4)]
    assert made["high"].tolist() == [pytest.approx(0.5128, abs=1e-4), 1]
    bits = results.average(scores({"b": [0.7, 0.9, 1.0]}, "loss_bits"), ["group"])
    assert bits["high"].tolist() == [pytest.approx(1.2461, abs=1e-4)]


def test_one_run_has_the_interval_of_its_row():
    row = scores({"a": [0.5]}).assign(low=0.3, high=0.6)
    assert results.average(row, ["group"])[["low", "high"]].to_numpy().tolist() == [[0.3, 0.6]]
    without = results.average(row.assign(low=np.nan, high=np.nan), ["group"])
    assert without[["low", "high"]].to_numpy().tolist() == [[0.5, 0.5]]
    two = results.average(scores({"a": [0.5, 0.7]}).assign(low=0.3, high=0.6), ["group"])
    assert two[["low", "high"]].to_numpy().tolist() == [[0.5, 0.7]]


def test_weights_that_were_trained_differently_are_not_averaged(tmp_path):
    """Another mixer on the weights of two settings of the trained one makes two series."""
    for heads in (1, 2):
        run = write(tmp_path, mixer="window", heads=heads)
        columns = {"mixer": "top_k", "mixer.budget": 8, "trained_as": "window"}
        row = {"split": "test", "metric": "accuracy", "value": heads / 4, "task.length": 16}
        files.write_json(run / "probe-a.json", {"columns": columns, "rows": [row]})
    table = results.collect(tmp_path)
    swapped = table[table["mixer"] == "top_k"].set_index("series")["value"].to_dict()
    assert swapped == {f"top_k trained_as=window trained_mixer.heads={heads}": heads / 4 for heads in (1, 2)}
    with pytest.raises(ValueError, match="would mix runs of different settings"):
        results.summarise(table[table["mixer"] == "top_k"], ["mixer"])
