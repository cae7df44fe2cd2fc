"""The claim on dilution, judged on made-up tables."""

import numpy as np
import pandas as pd
import pytest
from claims import claim, line, rows, spread

from recall_lab.claim.dilution import best_on_validation
from recall_lab.theory import linear_attention, softmax

TOKENS = np.unique(np.round(np.geomspace(2, 1024, 24)))
RANDOM, NEEDLE = "random_keys", "needle_in_noise"


def oracle(seeds=5, slope=0.0, excess=1.0, pairs=1024):
    """Shares as in theory, those of linear attention times n^slope, those of softmax times excess."""
    parts = []
    for d in (16, 64):
        for n in TOKENS:
            shares = {
                "linear": linear_attention.share(n, d) * n**slope,
                "softmax": softmax.mass(n, d, d**0.5) * excess,
            }
            for mixer, share in shares.items():
                values = share * np.array(spread(1, seeds, 0.002))
                where = {"d_key": d, "tokens": n, "statistic": "mean", "oracle.pairs": pairs}
                parts.append(rows(RANDOM, "target_share_by_tokens", mixer, values, "oracle", **where))
    return pd.concat(parts, ignore_index=True)


def trained(seeds=3, kept=(0.1, 0.9, 0.6), validation=(0.9, 0.99, 0.95)):
    """Shares of 0.8 in head 1 at the trained length, of which a part is kept; head 0 has less, and keeps everything."""
    parts = []
    for mixer, part, accuracy in zip(("linear", "softmax", "softmax/rotary"), kept, validation, strict=True):
        for metric, value in (("accuracy", accuracy), ("loss_bits", 1 - accuracy)):
            for length in (16, 64):
                parts.append(rows(NEEDLE, metric, mixer, [value] * seeds, "validation", task__length=length))
        for length, head, share in ((64, 0, 0.2), (1024, 0, 0.2), (64, 1, 0.8), (1024, 1, 0.8 * part), (256, 1, 0.0)):
            for depth in (0, 1):
                where = {"task__length": length, "task__depth": depth, "layer": 0, "head": head, "statistic": "mean"}
                shares = np.array(spread(share, seeds, 0.001))
                parts.append(
                    rows(NEEDLE, "target_share", mixer, shares, low=shares - 0.01, high=shares + 0.01, **where)
                )
    return pd.concat(parts, ignore_index=True)


@pytest.fixture(scope="module")
def dilution():
    return claim("dilution")


def judged(lines, *words):
    return line([one for one in lines if one.rule], *words)


def test_theory_and_models_that_dilute_support_the_claim(dilution):
    lines = dilution.judge(pd.concat([oracle(), trained()], ignore_index=True))
    assert {one.decision for one in lines if one.rule} == {"supported"}
    slope = judged(lines, "slope")
    assert -0.95 < slope.estimate.value < -0.9
    assert "d_key = 16" in slope.name  # where theory is flattest
    assert judged(lines, "half-mass").estimate.value == pytest.approx(2 / 3, abs=0.01)
    kept = judged(lines, "share kept")
    assert kept.estimate.value == pytest.approx(0.1 - 0.9, abs=1e-3)
    assert kept.name.endswith("linear minus softmax")
    assert line(lines, "needle: share kept, softmax/rotary").estimate.value == pytest.approx(0.6, abs=1e-3)


def test_raw_scores_are_exact(dilution):
    lines = dilution.judge(pd.DataFrame(columns=["experiment", "metric", "split", "value"]))
    drowned, kept = (judged(lines, "raw scores", who) for who in ("linear", "softmax"))
    assert drowned.estimate.value == pytest.approx(100 / (100 + 9999))
    assert kept.estimate.value == pytest.approx(1)
    assert (drowned.decision, kept.decision, drowned.estimate.replicates) == ("supported", "supported", 0)
    assert line(lines, "share is ½", "linear").estimate.value == 101
    assert line(lines, "share is ½", "softmax").estimate.value == pytest.approx(np.exp(99))


def test_models_that_do_not_dilute_refute_the_claim(dilution):
    lines = dilution.judge(pd.concat([oracle(slope=0.5, excess=0.7), trained(kept=(0.8, 0.9, 0.9))], ignore_index=True))
    measured = [one for one in lines if one.rule and "raw" not in one.name]
    assert [one.decision for one in measured] == ["refuted"] * 4


def test_one_octave_off_theory_counts(dilution):
    table = oracle()
    off = (table["mixer"] == "softmax") & (table["d_key"] == 64) & table["tokens"].between(128, 255)
    table.loc[off, "value"] *= 1.05
    found = judged(dilution.judge(table), "over theory")
    assert found.decision == "refuted"
    assert "d_key = 64, n = 128 to 256" in found.name
    assert found.estimate.value == pytest.approx(1.05, abs=1e-3)


def test_positions_are_chosen_on_validation(dilution):
    lines = dilution.judge(trained(validation=(0.9, 0.95, 0.99)))
    assert judged(lines, "share kept").estimate.value == pytest.approx(0.1 - 0.6, abs=1e-3)
    assert judged(lines, "share kept").name.endswith("linear minus softmax/rotary")
    rows = trained(validation=(0.9, 0.99, 0.99))
    rows.loc[(rows["metric"] == "loss_bits") & (rows["mixer"] == "softmax/rotary"), "value"] = 0.001
    assert best_on_validation(rows, ("softmax", "softmax/rotary")) == "softmax/rotary"
    assert best_on_validation(rows, ("window",)) is None


def test_undecided_lines(dilution):
    three = dilution.judge(pd.concat([oracle(seeds=3), trained(kept=(0.6, 0.9, 0.6))], ignore_index=True))
    assert judged(three, "over theory").reason == "3 seeds, at least 5 are needed"
    assert judged(three, "slope").decision == "supported"
    assert judged(three, "share kept").reason == "the interval contains the threshold"
    assert judged(dilution.judge(trained(seeds=2)), "share kept").reason == "2 seeds, at least 3 are needed"


def test_weights_of_models_that_have_not_learned_decide_nothing(dilution):
    found = judged(dilution.judge(trained(validation=(0.1, 0.99, 0.95))), "share kept")
    assert (found.decision, found.reason) == (
        "undecided",
        "no model has learned the task: validation score at most 0.10",
    )


@pytest.mark.parametrize(
    ("lost", "words", "reason"),
    [
        ({"experiment": RANDOM}, ("slope",), "target_share_by_tokens with random keys of linear"),
        ({"experiment": RANDOM, "mixer": "softmax"}, ("half-mass",), "random keys of softmax"),
        ({"experiment": NEEDLE}, ("share kept",), "of linear, softmax"),
        ({"metric": "target_share", "mixer": "linear"}, ("share kept",), "16 times it, of linear"),
        ({"metric": "target_share", "task.length": 1024}, ("share kept",), "16 times it, of linear, softmax"),
        ({"mixer": "linear", "split": "validation"}, ("share kept",), "16 times it, of linear"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(dilution, lost, words, reason):
    whole = pd.concat([oracle(), trained()], ignore_index=True)
    gone = pd.concat([whole[name] == value for name, value in lost.items()], axis=1).all(axis=1)
    found = judged(dilution.judge(whole[~gone]), *words)
    assert (found.decision, found.missing) == ("undecided", True)
    assert reason in found.reason


def test_sequences_that_are_too_short_do_not_count(dilution):
    assert judged(dilution.judge(oracle(pairs=200)), "slope").missing
