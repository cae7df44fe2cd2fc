"""Claim 7 and its figure, on made-up tables of two tasks, two families and four cells."""

import pandas as pd
import pytest
from conftest import CONF
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from tables import drawn, panels

from recall_lab.claim.good_enough import GoodEnough
from recall_lab.figure import good_enough

LENGTHS = (8, 16, 32, 64)
SCORES = {
    "softmax": 0.97, "softmax/rotary": 0.99, "linear": 0.7, "gated_delta": 0.985,
}  # fmt: skip


def rows(task, scores=SCORES, seeds=5, end="end", spread=0.0, lengths=LENGTHS, chance=0.1):
    """Rows of runs with these scores (numbers, or functions of length), with an alternating spread over seeds."""
    made = []
    for mixer, score in scores.items():
        for seed in range(seeds):
            for length in lengths:
                value = (score(length) if callable(score) else score) + spread * (-1) ** seed
                own = {"run": f"{task}{mixer}{seed}", "mixer": mixer, "series": mixer, "task": task, "seed": seed,
                       "data_seed": 0, "task.length": length, "experiment": "tasks", "trained_to_end": end}  # fmt: skip
                for split in ("validation", "test"):
                    metrics = {"accuracy": value, "standard_error": 0.001, "chance": chance}
                    made += [{**own, "split": split, "metric": name, "value": x} for name, x in metrics.items()]
    return pd.DataFrame(made)


def judge(*parts, tasks=("mqar", "needle")):
    """Name of a line, up to its first colon → the line."""
    table = pd.concat([*parts, pd.DataFrame({"experiment": ["another"]})], ignore_index=True)
    return {line.name.split(":")[0]: line for line in GoodEnough(tasks=tasks).judge(table)}


COUNT = "share of 2 tasks that are undemanding"
HARD = SCORES | {"linear": 0.5, "gated_delta": 0.6}


def test_support():
    """The best of each family are compared: rotary softmax and gated_delta."""
    lines = judge(rows("mqar"), rows("needle", HARD))
    assert lines[COUNT].decision == "supported"
    assert lines[COUNT].estimate.value == 0.5
    assert lines[COUNT].reason == "undemanding: mqar; demanding: needle"
    assert lines["mqar"].decision == "supported"
    assert lines["mqar"].name.startswith("mqar: softmax/rotary minus gated_delta, length=")
    assert lines["mqar"].estimate.value == pytest.approx(0.005)
    assert lines["needle"].decision == "refuted"


def test_refutation_needs_every_task():
    assert judge(rows("mqar", HARD), rows("needle", HARD))[COUNT].decision == "refuted"
    one_of_three = judge(rows("mqar", HARD), rows("needle", HARD), rows("copying"), tasks=("mqar", "needle", "copying"))
    assert one_of_three["share of 3 tasks that are undemanding"].decision == "undecided"


def test_one_demanding_cell_makes_a_task_demanding():
    lines = judge(rows("mqar", SCORES | {"gated_delta": lambda length: 0.9 if length == 32 else 0.985}), rows("needle"))
    assert lines["mqar"].decision == "refuted"
    assert lines["mqar"].name.endswith("length=32")
    assert lines["mqar"].estimate.value == pytest.approx(0.09)


def test_an_interval_across_the_margin_is_undecided():
    wide = pd.concat([rows("mqar", {"softmax": 0.99}), rows("mqar", {"gated_delta": 0.98}, spread=0.03)])
    lines = judge(wide, rows("needle"))
    assert lines["mqar"].decision == "undecided"
    assert lines["mqar"].reason == "the interval contains the threshold"
    assert lines[COUNT].reason == "undemanding: needle; undecided: mqar"


def test_the_sampling_of_test_sequences_widens_the_interval():
    table = rows("mqar", {"softmax": 0.99, "gated_delta": 0.98})
    table.loc[table["metric"] == "standard_error", "value"] = 0.01
    assert judge(table, rows("needle"))["mqar"].decision == "undecided"


def test_too_few_seeds():
    assert judge(rows("mqar", seeds=4), rows("needle"))["mqar"].reason == "4 seeds, at least 5 are needed"


@pytest.mark.parametrize(
    ("end", "words"), [("gains", "more steps help"), ("unknown", "twice the steps were not tried")]
)
def test_runs_that_are_not_trained_to_the_end(end, words):
    line = judge(rows("mqar", end=end), rows("needle"))["mqar"]
    assert line.decision == "undecided"
    assert line.reason == f"not trained to the end: softmax/rotary ({words}), gated_delta ({words})"


def test_a_task_that_neither_family_learned():
    line = judge(rows("mqar", dict.fromkeys(SCORES, 0.11)), rows("needle"))["mqar"]
    assert (line.decision, line.missing) == ("undecided", False)
    assert "no model has learned the task" in line.reason


def test_what_is_missing_is_named():
    lines = judge(rows("mqar", {"softmax": 0.9}))
    assert lines["mqar"].reason == "not measured: accuracy of a mechanism with fixed state on mqar"
    assert lines["needle"].reason == "not measured: accuracy of a mechanism with growing or fixed state on needle"
    table = rows("mqar")
    gone = (table["task.length"] == 64) & (table["split"] == "test") & (table["mixer"] == "gated_delta")
    lines = judge(table[~gone], rows("needle"))
    assert lines["mqar"].missing
    assert "test accuracy of softmax/rotary and gated_delta with equal seeds, length=64" in lines["mqar"].reason


def test_the_choice_is_made_on_validation():
    """linear is better on test only, and gated_delta on validation only: the latter is compared."""
    table = rows("mqar")
    linear = (table["mixer"] == "linear") & (table["split"] == "test") & (table["metric"] == "accuracy")
    table.loc[linear, "value"] = 1.0
    assert judge(table, rows("needle"))["mqar"].estimate.value == pytest.approx(0.005)


def test_where_a_fixed_state_is_better():
    better = rows("needle", SCORES | {"gated_delta": lambda length: 1.0 if length == 64 else 0.985})
    lines = judge(rows("mqar"), better)
    assert lines["tasks on which a fixed state is better"].reason == "needle (gated_delta; length=64: 0.010)"
    assert judge(rows("mqar"), rows("needle"))["tasks on which a fixed state is better"].reason == "none"


def test_the_tasks_of_the_claim_are_those_of_the_experiment():
    swept = OmegaConf.load(CONF / "experiment" / "tasks.yaml").hydra.sweeper.params["task"]
    (override,) = OverridesParser.create().parse_overrides([f"task={swept}"])
    claim = OmegaConf.load(CONF / "claim" / "good_enough.yaml")
    assert list(claim.tasks) == list(override.sweep_string_iterator())


def test_the_figure_shows_tasks_by_difference():
    table = pd.concat([rows("mqar"), rows("needle", HARD, spread=0.01)], ignore_index=True)
    (figure,) = drawn(good_enough, table).values()
    (ax,) = panels(figure)
    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert labels == ["mqar\nsoftmax/rotary − gated_delta", "needle\nsoftmax/rotary − gated_delta"]
    points = [line.get_xydata()[0] for line in ax.lines if line.get_marker() == "o"]
    assert [x for x, _ in points] == pytest.approx([0.005] * 4 + [0.39] * 4)
    assert "mean of 5 seeds; bars: 95 %" in ax.get_title()
    assert drawn(good_enough, rows("mqar")) == {}
    assert drawn(good_enough, pd.concat([rows("mqar"), rows("needle", {"softmax": 0.9})])) == {}
