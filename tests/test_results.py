"""From rows to numbers: intervals, series' names, choosing a learning rate, files written whole."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_an_interval_stays_within_its_values_and_is_the_same_each_time(values):
    low, high = results.interval(values)
    assert min(values) - 1e-12 <= low <= high <= max(values) + 1e-12
    assert (low, high) == results.interval(values) == results.interval(values[::-1])


def test_intervals_cover_the_truth():
    """Of 95 % bootstrap intervals over 20 normal values about 93 % hold the mean: the bootstrap is a little narrow."""
    rng = np.random.default_rng(1)
    hits = [low <= 0 <= high for low, high in (results.interval(rng.normal(size=20), draws=500) for _ in range(400))]
    assert 0.89 < np.mean(hits) < 0.97


def test_an_interval_of_few_values_is_their_range_and_called_so():
    rng = np.random.default_rng(2)
    for count in (2, 3, 4, 8):
        values = rng.normal(size=count)
        is_range = results.interval(values) == pytest.approx((values.min(), values.max()))
        assert is_range == (results.interval_name([1, count]) == "range")


def test_a_series_is_named_by_what_tells_it_apart():
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


def test_policies_on_the_same_weights_are_series_of_their_own():
    """Rows asked later bear the name of the run whose weights they used, and go where its learning rate goes."""
    made = table(
        {"mixer": "softmax", "lr": 0.01, "validation": 0.5, "test": 0.5},
        {"mixer": "softmax", "lr": 0.1, "validation": 0.6, "test": 0.6},
        {"mixer": "window", "lr": 0.1, "validation": 0.4, "test": 0.4},
    )
    asked = made[(made["mixer"] == "softmax") & (made["split"] == "test")]
    later = [asked.assign(mixer="window", trained_as="softmax", value=b / 64, **{"mixer.budget": b}) for b in (16, 32)]
    made = pd.concat([made.assign(**{"mixer.budget": 64.0}), *later], ignore_index=True)
    made["series"] = results.series(made)
    test = results.select(made).query("split == 'test'")
    assert test[["run", "series", "value"]].to_numpy().tolist() == [
        ["r1", "softmax", 0.6],
        ["r2", "window budget=64", 0.4],
        ["r1", "window budget=16 trained_as=softmax", 0.25],
        ["r1", "window budget=32 trained_as=softmax", 0.5],
    ]


def test_a_summary_is_the_mean_over_runs():
    made = table(
        {"mixer": "linear", "seed": 0, "validation": 0, "test": 0.25},
        {"mixer": "linear", "seed": 1, "validation": 0, "test": 0.75},
    )
    (line,) = results.summarise(made, ["series"]).to_dict("records")
    assert line == {"series": "linear", "mean": 0.5, "low": 0.25, "high": 0.75, "runs": 2}


def test_no_bare_nan_in_json(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "a.json", {"value": math.nan})
    assert list(tmp_path.iterdir()) == []
    files.write_json(tmp_path / "a.json", {"value": 1.5})
    assert json.loads((tmp_path / "a.json").read_text()) == {"value": 1.5}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, [1])
    with pytest.raises(UnicodeEncodeError), files.replacing(path) as temporary:
        temporary.write_text("[2\ud800")
    assert json.loads(path.read_text()) == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_setting_that_is_a_number_here_and_a_word_there(tmp_path):
    mixed = pd.DataFrame({"mixer.decay": ["learned", 0.9], "value": [1.0, 2.0]})
    results.save(mixed, tmp_path / "t.parquet")
    assert pd.read_parquet(tmp_path / "t.parquet")["mixer.decay"].tolist() == ["learned", "0.9"]


def test_flatten():
    config = {"name": "x", "seed": 1, "mixer": {"_target_": "a.b", "heads": 2}, "train": {"cells": [{"n": 1}]}}
    assert results.flatten(config) == {"seed": 1, "mixer.heads": 2, "train.cells": '[{"n": 1}]'}


def test_claim(tmp_path):
    results.claim(tmp_path / "new" / "deep")
    results.claim(tmp_path / "new" / "deep")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").touch()
    with pytest.raises(results.ForeignFolder, match="holds other files"):
        results.claim(tmp_path / "foreign")
    with pytest.raises(results.ForeignFolder, match="cannot write"):
        results.claim(tmp_path / "foreign" / "file")


def test_runs_on_other_mixtures_are_not_each_others_seeds():
    """Another vocabulary or another longest length makes another series; its smaller cells do not."""
    rows = []
    for run, vocab, lengths in (("a", 32, (8, 16)), ("b", 32, (8, 16)), ("c", 64, (8, 16)), ("d", 32, (8,))):
        for length in lengths:
            for split in ("validation", "test"):
                rows.append({"run": run, "mixer": "linear", "task": "mqar", "split": split, "metric": "accuracy",
                             "value": 0.5, "task.length": length, "task.vocab": vocab})  # fmt: skip
    made = results.mixtures(pd.DataFrame(rows))
    names = results.series(made).groupby(made["run"]).first()
    assert names["a"] == names["b"] == "linear length=16 vocab=32"
    assert names["c"] == "linear length=16 vocab=64"
    assert names["d"] == "linear length=8 vocab=32"


def test_a_learning_rate_that_failed_with_a_seed_does_not_win_by_the_other():
    made = table(
        {"mixer": "linear", "lr": 0.01, "seed": 0, "validation": 0.6, "test": 0.6},
        {"mixer": "linear", "lr": 0.01, "seed": 1, "validation": 0.6, "test": 0.6},
        {"mixer": "linear", "lr": 0.1, "seed": 1, "validation": 0.9, "test": 0.9},
    )
    assert set(results.select(made)["train.lr"]) == {0.01}
