"""Static sparse caches: the claim's verdict and the figure, on made-up tables."""

from functools import partial
from itertools import product

import numpy as np
import pandas as pd
import pytest
from conftest import config
from hydra.utils import instantiate
from tables import drawn, legend, lines, named, note, panels

from recall_lab.claim.static_sparse import StaticSparse
from recall_lab.figure import static_sparse

CLAIM: StaticSparse = instantiate(config("+claim=static_sparse").claim, _convert_="all")
BLIND = ["window", "sink_window", "heavy_hitter", "merging", "random_k"]
POLICIES = [*BLIND, "paged", "top_k", "top_k C=2B"]
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
N = 64


def recall(policy: str, share: float, seed: int, split: str, *, dynamic=1.0, share_loss=0.0, spread=0.01) -> float:
    """Static policies recall B/n, heavy_hitter .1 more; top_k `dynamic`, with a loss below B/n = 1."""
    jitter = spread * np.sin(7 * seed)
    if share == 1:
        return 1.0
    if policy == "top_k C=2B":
        return min(1.0, 2 * share) + jitter
    static = share + 0.1 * (policy == "heavy_hitter") + jitter
    return static if policy in BLIND else min(1.0, dynamic - share_loss + jitter / 10)


def on_weights(score=recall, seeds=range(5)) -> pd.DataFrame:
    """What the probe policies measures."""
    rows = []
    for policy, share, seed, queries in product(POLICIES, SHARES, seeds, (np.nan, 1.0)):
        own = {"run": f"s{seed}", "mixer": "softmax", "task": "mqar", "seed": seed, "data_seed": 0, "split": "probe",
               "task.length": N, "task.queries": queries, "policy": policy, "share": share, "budget": share * N,
               "experiment": "static_sparse"}  # fmt: skip
        for metric, split in (("policy_accuracy", "test"), ("policy_validation_accuracy", "validation")):
            value = score(policy, share, seed, split)
            rows.append({**own, "metric": metric, "value": value, "low": value - 0.002, "high": value + 0.002})
    return pd.DataFrame(rows)


def trained(score=recall, seeds=range(5)) -> pd.DataFrame:
    """What training with a policy gives: variants of the mixers, softmax and linear attention."""
    rows = []
    variant = {"paged": "paged/small_pages", "sink_window": "sink_window/one_sink"}
    models = [(p, share) for p in POLICIES if "=" not in p for share in SHARES[:-1]] + [
        ("softmax", 1),
        ("linear", 0.25),
    ]
    for (policy, share), seed in product(models, seeds):
        own = {"run": f"{policy}{share}{seed}", "mixer": variant.get(policy, policy), "task": "mqar", "seed": seed,
               "data_seed": 0, "task.length": N, "experiment": "static_sparse_trained",
               "mixer.budget": np.nan if policy in ("softmax", "linear") else share * N}  # fmt: skip
        for split, queries in (("test", np.nan), ("test", 1.0), ("validation", np.nan)):
            value = 0.5 if policy == "linear" else score(policy, share, seed, split)
            for metric, number in (
                ("accuracy", value),
                ("sequences", 512),
                ("chance", 0.01),
                ("state_elements", 4096 * share),
            ):
                rows.append({**own, "split": split, "task.queries": queries, "metric": metric, "value": number})
        rows.append(rows[-4] | {"task.length": 16, "metric": "accuracy", "value": 0.99, "split": "validation"})
    return pd.DataFrame(rows)


def verdict(*tables: pd.DataFrame) -> dict:
    return {line.name: line for line in CLAIM.judge(pd.concat(tables, ignore_index=True))}


def decisions(found: dict, words: str) -> set[str]:
    chosen = [line.decision for name, line in found.items() if words in name]
    assert len(chosen) in (2, 4)
    return set(chosen)


WHERE = [f"{arm}, {asked}" for arm in ("softmax weights", "trained with it") for asked in ("many queries", "one query")]


def test_clear_support():
    found = verdict(on_weights(), trained())
    assert decisions(found, "top_k − best blind policy") == {"supported"}
    assert decisions(found, "loss from B/n = 1") == {"supported"}
    assert decisions(found, "paged − best blind policy") == {"reported"}
    assert not any(line.missing for line in found.values())
    expected = 1 - np.mean(SHARES[:3]) - 0.1
    for where in WHERE:
        assert found[f"{where}: top_k − best blind policy"].estimate.value == pytest.approx(expected, abs=0.01)
        best = found[f"{where}: best blind policy"]
        assert best.reason == "heavy_hitter at 0.0625, heavy_hitter at 0.125, heavy_hitter at 0.25"
        kept = found.get(f"{where}: top_k from all tokens − from the last 2B")
        assert (kept is None) == where.startswith("trained")
        assert kept is None or kept.estimate.value == pytest.approx(1 - 2 * np.mean(SHARES[:3]), abs=0.01)


def test_clear_refutation():
    """Dynamism of .13 on average, and a loss of .3."""
    score = partial(recall, dynamic=0.68, share_loss=0.3)
    found = verdict(on_weights(score), trained(score))
    assert decisions(found, "top_k − best blind policy") == {"refuted"}
    assert decisions(found, "loss from B/n = 1") == {"refuted"}


def test_a_softmax_model_that_has_not_learned_decides_nothing():
    models = trained()
    models.loc[(models["mixer"] == "softmax") & (models["split"] == "validation"), "value"] = 0.1
    found = verdict(on_weights(), models)
    assert {line.decision for line in found.values()} == {"undecided", "reported"}
    assert {line.reason for line in found.values() if line.rule} == {
        "no model has learned the task: validation score at most 0.10"
    }


def test_an_interval_across_the_threshold():
    score = partial(recall, dynamic=0.65, spread=0.2)
    found = verdict(on_weights(score), trained(score))
    assert decisions(found, "top_k − best blind policy") == {"undecided"}
    assert {line.reason for name, line in found.items() if "top_k − best" in name} == {
        "the interval contains the threshold"
    }


def test_too_few_seeds():
    """Three seeds are enough for the threshold .3, but not for .02."""
    found = verdict(on_weights(seeds=range(3)), trained(seeds=range(3)))
    assert decisions(found, "top_k − best blind policy") == {"supported"}
    assert decisions(found, "loss from B/n = 1") == {"undecided"}
    found = verdict(on_weights(seeds=range(2)), trained(seeds=range(2)))
    assert decisions(found, "top_k − best blind policy") == {"undecided"}


def test_missing_cells_are_named():
    table = pd.concat([on_weights(), trained()], ignore_index=True)
    table = table[~((table["policy"] == "merging") & (table["share"] == 1 / 8))]
    table = table[~((table["mixer"] == "top_k") & (table["mixer.budget"] == 4) & (table["task.queries"] == 1))]
    found = verdict(table)
    line = found["softmax weights, many queries: top_k − best blind policy"]
    assert (line.decision, line.missing, line.reason) == ("undecided", True, "not measured: merging at B/n = 0.125")
    line = found["trained with it, one query: top_k − best blind policy"]
    assert (line.missing, line.reason) == (True, "not measured: top_k at B/n = 0.0625")
    assert not found["trained with it, many queries: top_k − best blind policy"].missing
    nothing = verdict(on_weights())
    assert nothing["trained with it, one query: top_k, loss from B/n = 1 to 0.125"].missing
    assert not nothing["softmax weights, one query: top_k, loss from B/n = 1 to 0.125"].missing


def test_the_best_blind_policy_is_chosen_on_validation():
    """merging is the best on test data alone: what counts is the accuracy of the one best on validation."""

    def score(policy, share, seed, split):
        lucky = 0.2 * (policy == "merging" and split == "test")
        return recall(policy, share, seed, split) + lucky

    found = verdict(on_weights(score), trained(score))
    for where in WHERE:
        assert found[f"{where}: best blind policy"].reason.startswith("heavy_hitter at 0.0625, heavy_hitter")
        assert found[f"{where}: best blind policy"].estimate.value == pytest.approx(np.mean(SHARES[:3]) + 0.1, abs=0.01)


def test_other_experiments_and_swapped_mixers_do_not_count():
    extra = trained(partial(recall, dynamic=0.0))
    other, swapped = extra.assign(experiment="window_coverage"), extra.assign(trained_as="softmax")
    alone, more = verdict(on_weights(), trained()), verdict(on_weights(), trained(), other, swapped)
    assert {name: line.decision for name, line in alone.items()} == {name: line.decision for name, line in more.items()}


def test_the_error_of_sampling_widens_the_interval():
    """Equal seeds: the interval is that of 512 sequences, which are right or wrong as a whole, in both arms."""
    score = partial(recall, dynamic=0.9, spread=0)
    line = verdict(trained(score))["trained with it, many queries: top_k − best blind policy"]
    variance = np.mean([0.9 * 0.1 / 512 + p * (1 - p) / 512 for p in np.array(SHARES[:3]) + 0.1]) / 3
    half = (line.estimate.high - line.estimate.low) / 2
    assert half == pytest.approx(2.776 * variance**0.5, rel=1e-3)


def test_figure():
    table = named(on_weights().drop(columns="experiment"), trained().drop(columns="experiment"))
    ((name, figure),) = drawn(static_sparse, table).items()
    assert name == "static_sparse_mqar"
    assert [ax.get_title() for ax in panels(figure)] == [
        f"trained {how}\nqueries = {queries}"
        for queries in ("1", "all")
        for how in ("softmax weights", "with the policy")
    ]
    weights, own = panels(figure)[:2]
    assert lines(weights)["window"].get_xdata() == pytest.approx(SHARES)
    assert lines(weights)["window"].get_ydata()[:4] == pytest.approx(SHARES[:4], abs=0.01)
    assert lines(own)["softmax"].get_xdata() == pytest.approx([1])
    assert lines(own)["linear"].get_xdata() == pytest.approx([0.25])
    dashes = {label: line.get_linestyle() for label, line in lines(own).items() if not label.startswith("_")}
    assert dashes == {"softmax": "-", "top_k": "-", "paged": "-", "linear": ":"} | dict.fromkeys(BLIND, "--")
    assert [tick.get_text() for tick in own.get_xticklabels()] == ["1/16", "1/8", "1/4", "1/2", "1"]
    assert {"the query chooses", "blind to the query", "top_k C=2B"} <= set(legend(figure))
    assert "mean of 5 seeds" in note(figure)


def test_figure_of_one_panel_or_none():
    weights, own = named(on_weights()), named(trained())
    chance = own[own["metric"] == "chance"]
    assert len(panels(drawn(static_sparse, pd.concat([weights, chance]))["static_sparse_mqar"])) == 2
    assert len(panels(drawn(static_sparse, own)["static_sparse_mqar"])) == 2
    assert drawn(static_sparse, own[own["mixer"].isin(["window", "softmax"])]) == {}
    assert drawn(static_sparse, own[own["mixer"] == "linear"]) == {}
