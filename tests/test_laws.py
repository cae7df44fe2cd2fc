"""Which closed form is drawn for which run of the oracle."""

import numpy as np
import pandas as pd
import pytest

from recall_lab.figure import laws
from recall_lab.theory import decay, delta_rule, keys, least_squares, linear_attention

SIZES = {"oracle.d_key": 8, "oracle.candidates": 64}


def law(mixer: str, **settings) -> laws.Law | None:
    return laws.law(
        pd.Series({"mixer": mixer, **SIZES, **{name.replace("__", "."): x for name, x in settings.items()}})
    )


@pytest.mark.parametrize("mixer", ["linear", "gla", "mamba2", "gated_linear", "hgrn2"])
def test_sums(mixer):
    found = law(mixer)
    assert found.mean("top1", 16) == pytest.approx(linear_attention.top1(16, 8, 8, 64))
    assert found.mean("error", 16) == pytest.approx(15 / 8)
    assert found.by_age("cosine", np.arange(16), 16) == pytest.approx(np.full(16, linear_attention.cosine(16, 8)))
    assert found.lifetime() is None


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_delta_rules(beta):
    ages = np.arange(16)
    found = law("kda", oracle__gates__beta=beta)
    assert found.mean("error", 16) == pytest.approx(delta_rule.error(ages, 16, 8, beta).mean())
    assert found.by_age("top1", ages, 16) == pytest.approx(delta_rule.top1(ages, 16, 8, 8, 64, beta))
    assert found.lifetime() == (pytest.approx(delta_rule.lifetime(8, 8, 64)) if beta == 1 else None)


@pytest.mark.parametrize(
    ("settings", "gamma"),
    [
        ({"oracle__gates__log_decay": -0.2}, np.exp(-0.2)),
        ({"mixer__decay": 0.9}, 0.9),
        ({"mixer__decay": "0.9"}, 0.9),
        ({"mixer__decay": "retention", "mixer__write": 1}, 1 - 1 / 32),
        ({"mixer__decay": 0.9, "oracle__gates__log_decay": -0.2}, np.exp(-0.2)),
    ],
)
def test_decays(settings, gamma):
    """The decay is read from the gate given to the oracle, or from the option of the mechanism that fixes it."""
    ages = np.arange(16)
    found = law("gated_linear", **settings)
    assert found.by_age("error", ages, 16) == pytest.approx(decay.error(ages, 16, 8, gamma))
    assert found.lifetime() == pytest.approx(decay.lifetime(gamma, 8, 8, 64))


def test_least_squares_and_budgets():
    assert law("mesa").mean("error", 16) == pytest.approx(least_squares.error(16, 8))
    assert law("mesa").mean("top1", 16) is None
    assert law("heavy_hitter", mixer__budget=4).mean("top1", 16) == pytest.approx(1 / 4)
    assert law("window").mean("top1", 16) is None


def test_correlated_keys_have_a_law_for_sums():
    moments = keys.cosine_moments("correlated", 8, 0.4)
    found = law("linear", oracle__keys="correlated", oracle__cosine=0.4)
    assert found.mean("error", 16) == pytest.approx(linear_attention.error(16, 8, *moments))
    assert law("delta_rule", oracle__keys="correlated", oracle__cosine=0.4) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"oracle__keys": "softplus"},
        {"oracle__centered": True},
        {"oracle__overwrites": 3},
        {"oracle__passes": 2},
        {"oracle__gates__write": 0.5},
        {"mixer__write": 0.5},
        {"mixer__feature_map": "relu"},
        {"mixer__normalizer": True},
    ],
)
def test_no_law_outside_the_assumptions(settings):
    assert law("linear") is not None
    assert law("linear", **settings) is None


def test_no_law_for_a_decayed_delta_rule_or_an_unknown_mechanism():
    assert law("gated_delta") is not None
    assert law("gated_delta", oracle__gates__log_decay=-0.1) is None
    assert law("softmax") is None
    assert law("mine") is None
