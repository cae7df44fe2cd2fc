"""Claim 6 on made-up tables: weights over all queries, and recall below and beyond capacity."""

import pandas as pd
import pytest

from recall_lab.claim.dynamic_access import DynamicAccess

PAIR = "task.pairs"
PAIRS = (2, 4, 8, 16, 32)
CLAIM = DynamicAccess(linear_in_query=("linear", "mesa"))


def weights(rank=lambda mixer, n, d: n if mixer == "softmax" else min(n, d), residual=0.0, mixers=None):
    """Rows of the probe dynamic_access for histories of n = 8 and 64 tokens, d_key = 16."""
    made = []
    for mixer in mixers or ("softmax", "linear", "mesa"):
        for n in (8, 64):
            own = {"run": f"{mixer}{n}", "mixer": mixer, "series": mixer, "experiment": "access", "split": "oracle",
                   "task": "oracle", "seed": 0, "data_seed": 0, "d_key": 16, "tokens": n}  # fmt: skip
            left = 0.0 if mixer == "softmax" else max(0.0, 1 - 16 / n) + residual
            made.append({**own, "metric": "rank", "value": rank(mixer, n, 16)})
            made.append({**own, "metric": "one_hot_residual", "value": left})
            made += [{**own, "metric": "selectable", "subset": size, "value": 2 / size} for size in (2, 4)]
    return pd.DataFrame(made)


DELTA = {2: 1.0, 4: 1.0, 8: 0.995, 16: 0.9, 32: 0.6}
ARMS = {
    "softmax": dict.fromkeys(PAIRS, 0.98),
    "softmax/rotary": dict.fromkeys(PAIRS, 1.0),
    "linear": dict.fromkeys(PAIRS, 0.5),
    "delta_rule": DELTA,
}


def recall(arms=ARMS, seeds=5, end="end", spread=0.0):
    made = []
    for mixer, levels in arms.items():
        for seed in range(seeds):
            for pairs, level in levels.items():
                own = {"run": f"{mixer}{seed}", "mixer": mixer, "series": mixer, "experiment": "beyond_capacity",
                       "task": "mqar", "seed": seed, "data_seed": 0, "trained_to_end": end, PAIR: pairs}  # fmt: skip
                for split in ("validation", "test"):
                    metrics = {"accuracy": level + (spread * (-1) ** seed if split == "test" else 0),
                               "standard_error": 0.002, "state_elements": 400.0}  # fmt: skip
                    made += [{**own, "split": split, "metric": name, "value": x} for name, x in metrics.items()]
    return pd.DataFrame(made)


def judge(*parts, claim=CLAIM):
    return claim.judge(pd.concat(parts, ignore_index=True))


def line(lines, words):
    (found,) = [each for each in lines if words in each.name]
    return found


def test_everything_is_supported():
    lines = judge(weights(), recall())
    assert {each.decision for each in lines} == {"supported", "reported"}
    assert line(lines, "P, the pairs").estimate.value == 8
    assert line(lines, "P, the pairs").reason == "delta_rule, 0.995 on validation"
    beyond = line(lines, "beyond capacity")
    assert beyond.name == "beyond capacity, 32 pairs: softmax/rotary minus delta_rule"
    assert (beyond.estimate.value, beyond.estimate.replicates) == (pytest.approx(0.4), 5)
    assert line(lines, "below capacity").name == "below capacity, 2 pairs: softmax/rotary minus delta_rule"
    assert line(lines, "state in elements").reason == "softmax/rotary 400, delta_rule 400"
    assert line(lines, "share of subsets").reason == "1 of size 2, 0.5 of size 4"


def test_a_rank_above_d_key_refutes():
    lines = judge(weights(rank=lambda mixer, n, d: n), recall())
    assert line(lines, "largest rank").decision == "refuted"
    assert line(lines, "largest rank").estimate.value == 64 - 16
    assert line(judge(weights(residual=1e-3)), "one-hot residual from").decision == "refuted"
    lines = judge(weights(rank=lambda mixer, n, d: min(n, d)))
    assert line(lines, "softmax: rank").decision == "refuted"


def test_refutation_beyond_and_below_capacity():
    """A fixed state that recalls as much beyond its capacity, and less than softmax below it."""
    other = ARMS | {"delta_rule": {2: 0.9, 4: 0.95, 8: 0.995, 16: 0.98, 32: 0.95}}
    lines = judge(weights(), recall(other))
    assert line(lines, "beyond capacity").decision == "refuted"
    assert line(lines, "below capacity").decision == "refuted"


def test_an_interval_across_the_threshold():
    other = ARMS | {"delta_rule": DELTA | {32: 0.8}}
    assert line(judge(recall(other)), "beyond capacity").reason == "the interval contains the threshold"


def test_too_few_seeds():
    """Three are enough for a difference of .2, five are needed for one of .02."""
    lines = judge(recall(seeds=3))
    assert line(lines, "beyond capacity").decision == "supported"
    assert line(lines, "below capacity").reason == "3 seeds, at least 5 are needed"
    assert line(judge(recall(seeds=2)), "beyond capacity").decision == "undecided"


def test_runs_that_are_not_trained_to_the_end():
    lines = judge(recall(end="gains"))
    for place in ("beyond", "below"):
        found = line(lines, f"{place} capacity")
        assert (found.decision, found.missing) == ("undecided", False)
        assert found.reason == "not trained to the end: softmax/rotary (more steps help), delta_rule (more steps help)"


def test_a_capacity_that_was_not_reached_or_not_exceeded():
    weak = ARMS | {"delta_rule": dict.fromkeys(PAIRS, 0.7)}
    for place in ("beyond", "below"):
        found = line(judge(recall(weak)), f"{place} capacity")
        assert (found.decision, found.missing) == ("undecided", False)
        assert found.reason == "no fixed state reaches 0.99 on validation; best is delta_rule, 0.700 at 2 pairs"
    strong = judge(recall(ARMS | {"delta_rule": dict.fromkeys(PAIRS, 1.0)}))
    found = line(strong, "beyond capacity")
    assert (found.decision, found.missing) == ("undecided", False)
    assert found.reason == "no model was trained with 128 pairs, the largest number is 32"
    assert line(strong, "below capacity").decision == "supported"


def test_the_best_is_chosen_on_validation():
    table = recall()
    lucky = (table["mixer"] == "linear") & (table["split"] == "test") & (table["metric"] == "accuracy")
    table.loc[lucky, "value"] = 1.0
    assert line(judge(table), "beyond capacity").estimate.value == pytest.approx(0.4)


def test_what_is_missing_is_named():
    lines = judge(weights(mixers=("softmax", "linear")))
    assert line(lines, "largest rank").reason == "not measured: rank of mesa with more than d_key tokens"
    found = line(lines, "beyond capacity")
    assert found.missing
    assert found.reason == "not measured: validation accuracy of softmax and any mechanism with a fixed state"
    lines = judge(recall({"softmax": ARMS["softmax"]}))
    assert line(lines, "softmax: rank").missing
    assert (
        line(lines, "below capacity").reason == "not measured: validation accuracy of any mechanism with a fixed state"
    )
    table = recall()
    gone = (table[PAIR] == 32) & (table["split"] == "test") & (table["mixer"] == "delta_rule")
    found = line(judge(table[~gone]), "beyond capacity")
    assert found.missing
    assert "test accuracy of softmax/rotary and delta_rule at 32 pairs" in found.reason
