"""The claim on gates, judged on made-up tables."""

import pandas as pd
import pytest
from claims import claim, line, rows, spread
from command_line import UNTRAINED

from recall_lab.cli.claim import claim as judge_claims

BOTH, NO_DECAY, NO_WRITE, NEITHER = "gated_linear", "gated_linear/no_decay", "gated_linear/no_write", "linear"
COPY, NEEDLE, UPDATES = "selective_gates", "needle_in_noise", "updates"
ACCURACY = {BOTH: 0.9, NO_DECAY: 0.88, NO_WRITE: 0.5, NEITHER: 0.45}
"""The write gate brings 0.4, the decay 0.02."""


def table(seeds=5, accuracy=ACCURACY, sigma=(0.8, 0.2), old=0.4, half_lives=(100.0, 20.0)):
    """Results in which each is as the claim says, except for the gain by the decay."""
    parts = []
    for experiment, cell in ((COPY, {"task__data": 4}), (NEEDLE, {"task__haystack": "noise"})):
        for mixer, level in accuracy.items():
            for length in (64, 1024):
                where = {**cell, "task__length": length}
                parts.append(rows(experiment, "accuracy", mixer, spread(level, seeds), "test", **where))
                parts.append(rows(experiment, "standard_error", mixer, [0.01] * seeds, "test", **where))
            parts.append(
                rows(experiment, "accuracy", mixer, [level] * seeds, "validation", **{**cell, "task__length": 64})
            )
        for role, gate, length in zip(("value", "filler"), sigma, (3.0, 0.5), strict=True):
            where = {**cell, "task__length": 64, "layer": 0, "head": 0, "role": role}
            parts.append(rows(experiment, "gate_write", BOTH, spread(gate, seeds), **where))
            parts += [rows(experiment, "k_norm", mixer, [length] * seeds, **where) for mixer in (BOTH, NEITHER)]
    for experiment, half_life in zip((NEEDLE, UPDATES), half_lives, strict=True):
        where = {"task__haystack": "noise"} if experiment == NEEDLE else {}
        decay = [-0.6931471805599453 / half_life * (1 + seed / 100) for seed in range(seeds)]
        parts.append(rows(experiment, "gate_log_decay", BOTH, decay, layer=0, head=0, role="all", **where))
    for mixer in (BOTH, NEITHER):
        parts.append(rows(UPDATES, "accuracy", mixer, [0.8] * seeds, "validation", task__length=64))
        for age, share in ((2, 0.9), (4, 0.9), (8, old), (16, old)):
            where = {"task__updates": 8, "age": age, "count": 100, "test.probe_sequences": 256}
            parts.append(rows(UPDATES, "accuracy_by_age", mixer, spread(share, seeds), **where))
    return pd.concat(parts, ignore_index=True)


@pytest.fixture(scope="module")
def gates():
    return claim("gates")


def test_each_line_is_decided_by_its_own_contrast(gates):
    lines = gates.judge(table())
    for place in ("selective copying of 4 tokens", "needle in noise"):
        found = {one.name: one for one in lines if one.name.startswith(place)}
        assert found[f"{place}: gain by the write gate"].decision == "supported"
        assert found[f"{place}: gain by the write gate"].estimate.value == pytest.approx(0.4)
        assert found[f"{place}: gain by the decay"].decision == "refuted"
        assert found[f"{place}: gain by the decay"].estimate.value == pytest.approx(0.02)
        assert found[f"{place}: gain by the decay without the other gate"].estimate.value == pytest.approx(0.05)
        assert found[f"{place}: σ on data minus σ on filler"].decision == "supported"
        assert found[f"{place}: ‖k‖ on data over ‖k‖ on filler, linear"].estimate.value == pytest.approx(6)
    age = line([one for one in lines if one.rule], "younger half")
    assert (age.decision, age.estimate.value) == ("supported", pytest.approx(0.5))
    assert line([one for one in lines if not one.rule], "younger half").name.endswith(", linear")
    life = line(lines, "power of 2")
    assert (life.decision, life.estimate.value) == ("supported", pytest.approx(2.3219, abs=1e-4))
    assert line(lines, "half-life", "tokens, updates").estimate.value == pytest.approx(19.6, abs=0.1)
    assert not any(one.missing for one in lines)


def test_effects_that_are_the_other_way_round_are_refuted(gates):
    worse = {BOTH: 0.5, NO_DECAY: 0.9, NO_WRITE: 0.9, NEITHER: 0.9}
    lines = gates.judge(table(accuracy=worse, sigma=(0.2, 0.8), old=1.0, half_lives=(10.0, 20.0)))
    judged = [one for one in lines if one.rule]
    assert {one.decision for one in judged} == {"refuted"}
    assert len(judged) == 8


def test_an_interval_across_the_threshold_is_undecided(gates):
    lines = gates.judge(table(accuracy={**ACCURACY, NO_WRITE: 0.8}))
    found = line([one for one in lines if one.rule], "needle in noise", "write gate")
    assert (found.decision, found.reason) == ("undecided", "the interval contains the threshold")


def test_three_seeds_decide_gains_but_not_signs(gates):
    """A threshold of at most .05 needs five."""
    lines = gates.judge(table(seeds=3))
    assert line([one for one in lines if one.rule], "needle in noise", "write gate").decision == "supported"
    for words in (("needle in noise", "σ"), ("younger half",), ("power of 2",)):
        found = line([one for one in lines if one.rule], *words)
        assert (found.decision, found.reason) == ("undecided", "3 seeds, at least 5 are needed")
    for found in gates.judge(table(seeds=2)):
        assert found.decision in ("undecided", "reported")


def test_other_numbers_of_data_tokens_and_other_haystacks_do_not_count(gates):
    elsewhere = {"task.data": {4: 8}, "task.haystack": {"noise": "repeat"}}
    other = table(accuracy=dict.fromkeys(ACCURACY, 0.1)).replace(elsewhere)
    other = other[other["metric"].str.startswith("accuracy") & (other["split"] == "test")]
    lines = gates.judge(pd.concat([table(), other[other["experiment"] != UPDATES]], ignore_index=True))
    assert [one.estimate for one in lines] == [one.estimate for one in gates.judge(table())]


@pytest.mark.parametrize(
    ("lost", "words", "reason"),
    [
        ({"mixer": NO_DECAY}, ("needle in noise", "by the decay"), f"accuracy on needle in noise of {NO_DECAY}"),
        ({"experiment": COPY}, ("selective copying", "write gate"), f"of {BOTH}, {NO_WRITE}"),
        ({"metric": "accuracy_by_age"}, ("younger half",), f"accuracy_by_age on updates of {BOTH}"),
        ({"metric": "gate_write", "role": "filler"}, ("needle in noise", "σ"), f"needle in noise of {BOTH}: filler"),
        ({"metric": "gate_log_decay", "experiment": UPDATES}, ("power of 2",), f"gate_log_decay of {BOTH}: updates"),
        ({"mixer": NO_WRITE, "task.length": 1024, "seed": 2, "experiment": NEEDLE}, ("needle in noise", "write gate"),
         f"{NO_WRITE} at length=1024, seed 2"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(gates, lost, words, reason):
    whole = table()
    gone = pd.concat([whole[name] == value for name, value in lost.items()], axis=1).all(axis=1)
    found = line([one for one in gates.judge(whole[~gone]) if one.rule], *words)
    assert (found.decision, found.missing) == ("undecided", True)
    assert reason in found.reason


def test_models_that_have_not_learned_decide_nothing(gates):
    whole = table(accuracy=dict.fromkeys(ACCURACY, 0.05))
    whole.loc[whole["split"] == "validation", "value"] = 0.05
    found = [one for one in gates.judge(whole) if one.rule]
    assert {(one.decision, one.missing) for one in found} == {("undecided", False)}
    assert {one.reason for one in found} == {"no model has learned the task: validation score at most 0.05"}


def test_no_results_at_all(gates):
    lines = gates.judge(table()[:0])
    assert all(one.missing for one in lines if one.rule)
    assert all(one.estimate is None for one in lines)


@pytest.mark.slow
def test_the_claim_runs_end_to_end(empty_folder, capsys):
    """With models that have hardly been trained, and one seed: nothing is decided, and nothing is missing."""
    assert judge_claims(["gates", *UNTRAINED, "seed=0", "test.probe_sequences=4"]) == 0
    text = capsys.readouterr().out
    assert text.count("undecided (no model has learned the task") == 8
    assert "not measured" not in text
