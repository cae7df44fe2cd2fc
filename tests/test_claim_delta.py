"""The claim on the delta rule, judged on made-up tables."""

import pandas as pd
import pytest
from claims import claim, line, rows, spread

DELTA, LINEAR = "delta_rule", "linear"
ERRORS = {DELTA: 1.05, LINEAR: 2.01}
TOP1 = {DELTA: 0.46, LINEAR: 0.94}


def table(seeds=5, sgd=1e-16, updates=(0.9, 0.4), ratio=0.3, errors=ERRORS, top1=TOP1, learned=0.8):
    parts = [rows("random_keys", "sgd_error", DELTA, [sgd] * seeds, "oracle", d_key=64)]
    for mixer, accuracy in zip((DELTA, LINEAR), updates, strict=True):
        parts.append(rows("updates", "accuracy", mixer, [learned] * seeds, "validation", task__updates=8))
        for count, score in ((0, 1.0), (8, accuracy), (16, accuracy)):
            where = {"task__updates": count}
            parts.append(rows("updates", "accuracy", mixer, spread(score, seeds), "test", **where))
            parts.append(rows("updates", "standard_error", mixer, [0.01] * seeds, "test", **where))
        for position, load in ((16, 0.9), (64, 1.0)):
            for cosine in (0.1, 0.3):
                where = {"d_key": 32, "oracle.cosine": cosine, "position": position}
                error = {DELTA: load * ratio if cosine > 0.2 else 5.0, LINEAR: 1.0}[mixer]
                parts.append(rows("correlated_keys", "error", mixer, spread(error, seeds), "oracle", **where))
                parts.append(rows("correlated_keys", "top1", mixer, spread(TOP1[mixer], seeds), "oracle", **where))
        for position, where in ((128, {"d_key": 64}), (64, {"d_key": 64}), (128, {"d_key": 32})):
            judged = position == 128 and where["d_key"] == 64
            for metric, values in (("error", errors), ("top1", top1)):
                value = values[mixer] if judged else -1.0
                where = {**where, "position": position}
                parts.append(rows("random_keys", metric, mixer, spread(value, seeds), "oracle", **where))
        parts.append(
            rows(
                "beyond_capacity", "accuracy", mixer, [{DELTA: 0.64, LINEAR: 0.59}[mixer]] * 2, "test", task__length=64
            )
        )
        parts.append(rows("beyond_capacity", "state_elements", mixer, [400] * 2, "test", task__length=64))
    return pd.concat(parts, ignore_index=True)


@pytest.fixture(scope="module")
def delta():
    return claim("delta")


def judged(lines, *words):
    return line([one for one in lines if one.rule], *words)


def test_clear_support(delta):
    lines = delta.judge(table())
    assert [one.decision for one in lines if one.rule] == ["supported"] * 5
    assert judged(lines, "SGD").estimate.replicates == 0
    assert judged(lines, "updates").estimate.value == pytest.approx(0.5)  # without the cell that has no updates
    correlated = judged(lines, "correlated")
    assert correlated.estimate.value == pytest.approx(0.3, abs=1e-3)
    assert "64 pairs, d_key = 32, cosine 0.3" in correlated.name
    assert line(lines, "correlated keys: top-1").estimate.value == pytest.approx(0.46 - 0.94)
    assert judged(lines, "random keys", "error").estimate.value == pytest.approx(1.05 - 2.01)
    assert judged(lines, "random keys", "top-1").estimate.value == pytest.approx(0.46 - 0.94)
    recall = line(lines, "mqar")
    assert recall.estimate.value == pytest.approx(0.05)
    assert recall.reason == "0.64 and 0.59, states of 400 and 400 numbers"


def test_clear_refutation(delta):
    lines = delta.judge(table(sgd=1e-6, updates=(0.5, 0.4), ratio=0.8, errors=TOP1, top1=ERRORS))
    assert judged(lines, "SGD").decision == "refuted"
    assert judged(lines, "updates").decision == "refuted"
    assert judged(lines, "correlated").decision == "refuted"


def test_no_reversal(delta):
    lines = delta.judge(table(errors={DELTA: 2.0, LINEAR: 1.0}, top1={DELTA: 0.9, LINEAR: 0.5}))
    assert [judged(lines, "random keys", metric).decision for metric in ("error", "top-1")] == ["refuted"] * 2
    assert judged(lines, "updates").decision == "supported"


def test_undecided_lines(delta):
    lines = delta.judge(table(seeds=3, updates=(0.7, 0.4)))
    assert judged(lines, "updates").reason == "the interval contains the threshold"
    assert judged(lines, "correlated").decision == "supported"
    for metric in ("error", "top-1"):
        assert judged(lines, "random keys", metric).reason == "3 seeds, at least 5 are needed"
    assert judged(lines, "SGD").decision == "supported"  # exact
    two = delta.judge(table(seeds=2))
    assert judged(two, "updates").reason == "2 seeds, at least 3 are needed"


def test_models_that_have_not_learned_decide_nothing(delta):
    found = judged(delta.judge(table(updates=(0.1, 0.1), learned=0.1)), "updates")
    assert (found.decision, found.reason) == (
        "undecided",
        "no model has learned the task: validation score at most 0.10",
    )


@pytest.mark.parametrize(
    ("lost", "words", "reason"),
    [
        ({"metric": "sgd_error"}, ("SGD",), "sgd_error of delta_rule"),
        ({"experiment": "updates", "mixer": LINEAR}, ("updates",), "accuracy on updates of linear"),
        ({"experiment": "updates"}, ("updates",), "accuracy on updates of delta_rule, linear"),
        ({"experiment": "updates", "mixer": DELTA, "task.updates": 16, "seed": 4}, ("updates",),
         "delta_rule at updates=16, seed 4"),
        ({"experiment": "correlated_keys", "mixer": DELTA}, ("correlated",), "correlated keys of delta_rule"),
        ({"experiment": "correlated_keys"}, ("correlated",), "delta_rule, linear"),
        ({"experiment": "correlated_keys", "mixer": LINEAR, "position": 64, "seed": 0, "oracle.cosine": 0.3},
         ("correlated",), "linear at position=64, seed 0"),
        ({"experiment": "random_keys", "d_key": 64}, ("random keys", "top-1"), "top1 with random keys of"),
        ({"experiment": "random_keys", "mixer": LINEAR}, ("random keys", "error"), "error with random keys of linear"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(delta, lost, words, reason):
    whole = table()
    gone = pd.concat([whole[name] == value for name, value in lost.items()], axis=1).all(axis=1)
    found = judged(delta.judge(whole[~gone]), *words)
    assert (found.decision, found.missing) == ("undecided", True)
    assert reason in found.reason


def test_a_reported_line_says_what_was_not_measured(delta):
    whole = table()
    found = line(delta.judge(whole[whole["experiment"] != "beyond_capacity"]), "mqar")
    assert (found.decision, found.reason) == ("reported", "not measured: accuracy on mqar of delta_rule, linear")
