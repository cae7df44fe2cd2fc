"""The probes' figures: drawn from small tables of the oracle's own rows, and showing what stands in them."""

import importlib
from functools import partial

import hydra
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import config
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from recall_lab import results, theory
from recall_lab.figure import capacity as capacity_figure
from recall_lab.figure import style
from recall_lab.model import Model
from recall_lab.oracle import Oracle
from recall_lab.probe.base import run, run_trace
from recall_lab.probe.cost import cost
from recall_lab.probe.dynamic_access import dynamic_access
from recall_lab.probe.effective_attention import effective_attention
from recall_lab.probe.state_retention import state_retention
from recall_lab.task.mqar import MQAR

FIGURES = [
    "capacity",
    "error_vs_top1",
    "retention",
    "spectrum",
    "effective_attention",
    "weight_distribution",
    "dynamic_access",
    "selectability",
    "cost",
]
PROBES = [
    partial(state_retention, at=(0.25, 0.5, 1.0), age_bins=6),
    partial(effective_attention, token_bins=5, matrix=True),
    partial(dynamic_access, sequences=1, places=4, subsets=(2, 4)),
    partial(cost, lengths=(128, 256), timed=False),
]


def rows(mixer, seed=0, **oracle):
    torch.manual_seed(0)
    made = Oracle(**{"candidates": 256, "reads": 64} | oracle)
    make = hydra.utils.instantiate(config(f"mixer={mixer}").mixer)
    trace = made.trace(made.mixer(make), np.random.default_rng(seed))
    settings = results.flatten({"oracle": {"d_key": made.d_key, "candidates": made.candidates} | oracle})
    facts = {"run": f"{mixer}{seed}{oracle}", "mixer": mixer, "task": "oracle", "seed": seed, "split": "test"}
    return [facts | settings | row for row in run_trace(PROBES, trace, np.random.default_rng(seed))]


@pytest.fixture(scope="module")
def table():
    found = []
    found += rows("linear", d_key=4, pairs=16)
    found += rows("linear", seed=1, d_key=8, pairs=32)
    for mixer in ("linear", "softmax", "mesa"):
        found += rows(mixer, d_key=8, pairs=32)
    found += rows("delta_rule", d_key=8, pairs=32, gates={"beta": 0.1})
    found += rows("delta_rule", d_key=8, pairs=32, gates={"beta": 1.0})
    found += rows("gated_linear", d_key=8, pairs=32, gates={"log_decay": -0.2})
    made = pd.DataFrame(found)
    made["series"] = results.series(made)
    return made


@pytest.fixture(scope="module")
def capacity(table):
    return drawn("capacity", table)["capacity"]


def drawn(name, table):
    return dict(importlib.import_module(f"recall_lab.figure.{name}").draw(table))


def lines(ax, label_colour):
    return [line for line in ax.get_lines() if line.get_color() == label_colour and len(line.get_xdata()) > 1]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_and_saved(name, table, tmp_path):
    made = drawn(name, table)
    assert made
    for title, figure in made.items():
        assert isinstance(figure, Figure)
        assert title.startswith(name)
        figure.savefig(tmp_path / f"{title}.png", dpi=60)
        assert (tmp_path / f"{title}.png").stat().st_size > 2000


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_drawn_of_a_table_without_its_rows(name, table):
    bare = pd.DataFrame({"metric": ["accuracy"], "value": [1.0], "task": ["mqar"], "mixer": ["linear"], "run": ["a"]})
    assert drawn(name, bare.assign(series="linear", seed=0, split="test")) == {}
    assert drawn(name, table[table["metric"] == "norm"].dropna(axis=1, how="all")) == {}
    assert drawn(name, table[table["metric"] == "norm"]) == {}


def test_settings_of_the_oracle_name_a_series(table):
    deltas = {"delta_rule beta=0.1", "delta_rule beta=1"}
    assert set(table["series"]) == {"linear", "softmax", "mesa", "gated_linear"} | deltas


def test_capacity_points_and_lines(table, capacity):
    axes = capacity.axes
    assert [ax.get_title() for ax in axes[:2]] == ["d_key = 4", "d_key = 8"]
    points, law = lines(axes[1], style.look("linear")[0])
    expected = table[(table["series"] == "linear") & (table["d_key"] == 8) & (table["metric"] == "top1")]
    assert list(points.get_xdata()) == [1, 2, 4]
    assert points.get_ydata() == pytest.approx(expected.groupby("pairs")["value"].mean().to_numpy())
    n = np.round(law.get_xdata() * 8)
    assert law.get_ydata() == pytest.approx(theory.top1(1.0, (n - 1) / 8, n - 1, 8, 8, 256))
    _, error = lines(axes[3], style.look("linear")[0])
    assert error.get_ydata() == pytest.approx((n - 1) / 8)
    _, squares = lines(axes[3], style.look("mesa")[0])
    assert squares.get_ydata() == pytest.approx(theory.least_squares_error(n, 8))
    # Softmax has no such law: its points are joined, and that is all.
    assert len(lines(axes[1], style.look("softmax")[0])) == 1


@pytest.mark.parametrize("setting", [{"keys": "relu"}, {"centered": True}, {"overwrites": 3}, {"gates.a": 0.5}])
def test_no_law_is_drawn_where_it_does_not_hold(setting):
    known = {"mixer": "rwkv7", "oracle.d_key": 8, "oracle.candidates": 64}
    asked = {f"oracle.{name}": value for name, value in setting.items()}
    assert capacity_figure._law(pd.Series(known), "top1") is not None
    assert capacity_figure._law(pd.Series(known | asked), "top1") is None


def test_capacity_laws_follow_the_gates(capacity):
    axes = capacity.axes
    _, slow = lines(axes[3], style.look("delta_rule beta=0.1")[0])
    assert slow.get_ydata()[-1] == pytest.approx(theory.delta_mean_error(32, 8, 0.1))
    _, faded = lines(axes[3], style.look("gated_linear")[0])
    ages = np.arange(32)
    assert faded.get_ydata()[-1] == pytest.approx(theory.decay_error(ages, 32, 8, np.exp(-0.2)).mean())


def test_half_life_stands_where_the_curve_is_halved():
    ages = [0, 1, 3, 7, 15]
    made = pd.DataFrame(
        [
            {"metric": metric, "value": value, "age": age, "place": 16, "pairs": 16, "d_key": 8, "layer": 0, "run": "a",
             "mixer": "linear", "series": "linear", "task": "oracle", "seed": 0}
            for metric in ("top1_by_age", "cosine_by_age")
            for age, value in zip(ages, [1.0, 0.9, 0.7, 0.3, 0.1], strict=True)
        ]
    )  # fmt: skip
    ax = drawn("retention", made)["retention_oracle_d8"].axes[0]
    (triangle,) = [line for line in ax.get_lines() if line.get_marker() == "v" and len(line.get_xdata()) == 1]
    assert triangle.get_xdata()[0] == pytest.approx((4 * 8) ** 0.5)


def test_attention_is_signed_and_centred(table):
    figure = drawn("effective_attention", table[table["d_key"] == 8])["effective_attention_oracle"]
    image = next(image for ax in figure.axes for image in ax.get_images())
    assert image.get_clim() == (-1, 1)
    assert np.isnan(image.get_array().filled(np.nan)[0, 1])
    assert not any(isinstance(c, PathCollection) for ax in figure.axes for c in ax.collections)


def test_attention_marks_what_is_asked_and_where_it_stands():
    torch.manual_seed(0)
    batch = MQAR(vocab=32, length=24, pairs=3).sample(4, np.random.default_rng(0))
    made = []
    for mixer in ("softmax", "delta_rule"):
        model = Model(
            vocab=32, mixer=hydra.utils.instantiate(config(f"mixer={mixer}").mixer), d_model=8, layers=2, mlp=0.0
        )
        found = run([partial(effective_attention, matrix=True)], model, batch, np.random.default_rng(0))
        made += [row | {"run": mixer, "mixer": mixer, "series": mixer, "task": "mqar", "seed": 0} for row in found]
    figure = drawn("effective_attention", pd.DataFrame(made))["effective_attention_mqar"]
    panels = [ax for ax in figure.axes if ax.get_images()]
    circles = [c for ax in panels for c in ax.collections if isinstance(c, PathCollection)]
    asked = np.flatnonzero(batch.scored[0])
    answer = batch.factors["source"][0][asked]
    assert len(circles) == 8  # circles and ticks of two layers by two mechanisms
    assert np.allclose(circles[0].get_offsets(), np.c_[answer, asked])
    assert np.allclose(circles[1].get_offsets()[:, 1], asked)


def test_bounds_of_dynamic_access(table):
    rank, residual = drawn("dynamic_access", table)["dynamic_access"].axes[2:4]
    ranks = [list(line.get_ydata()) for line in rank.get_lines() if line.get_color() == style.look("linear")[0]]
    assert ranks == [[8]]
    bound = max(residual.get_lines(), key=lambda line: line.get_linewidth())
    assert bound.get_ydata()[-1] == pytest.approx(1 - 8 / 32)


def test_slopes_of_cost(table):
    figure = drawn("cost", table)["cost"]
    (legend,) = figure.legends
    labels = {text.get_text().split(":")[0]: text.get_text().split(":")[1].split() for text in legend.get_texts()}
    assert labels["softmax"][0] == "2.00"
    assert labels["linear"] == ["1.00", "0.00", "0.00"]
