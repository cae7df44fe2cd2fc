"""Figures of the probes' rows, drawn from small runs of the oracle."""

import importlib

import hydra
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import config
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from tables import legend, named, note

from recall_lab.figure import style
from recall_lab.folders import flatten
from recall_lab.model import Model
from recall_lab.oracle import Oracle
from recall_lab.probe.cost import cost
from recall_lab.probe.dynamic_access import dynamic_access
from recall_lab.probe.effective_attention import effective_attention
from recall_lab.probe.state_retention import state_retention
from recall_lab.task.mqar import MQAR
from recall_lab.theory import decay, delta_rule, least_squares, linear_attention

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
PROBES = {
    state_retention: {"after": (0.25, 0.5, 1.0), "age_bins": 6, "age_reads": 0, "lags": ()},
    effective_attention: {"token_bins": 5, "matrix": True},
    dynamic_access: {"sequences": 1, "subsets": (2, 4)},
    cost: {"lengths": (128, 256), "timed": False},
}


def rows(mixer, seed=0, **oracle):
    torch.manual_seed(0)
    made = Oracle(**{"candidates": 256, "reads": 2048} | oracle)
    make = hydra.utils.instantiate(config(f"mixer={mixer}").mixer)
    trace = made.trace(made.mixer(make), np.random.default_rng(seed))
    settings = flatten({"oracle": {"d_key": made.d_key, "candidates": made.candidates} | oracle})
    facts = {"run": f"{mixer}{seed}{oracle}", "mixer": mixer, "task": "oracle", "seed": seed, "split": "oracle"}
    found = [row for probe, options in PROBES.items() for row in probe(trace, np.random.default_rng(seed), **options)]
    return [facts | settings | row for row in found]


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
    return named(pd.DataFrame(found))


@pytest.fixture(scope="module")
def capacity(table):
    return drawn("capacity", table)["capacity"]


@pytest.fixture(scope="module")
def colours():
    series = ["linear", "softmax", "mesa", "gated_linear", "delta_rule beta=0.1", "delta_rule beta=1"]
    return {name: look.colour for name, look in style.looks(series).items()}


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
def test_no_figure_without_rows(name, table):
    bare = pd.DataFrame({"metric": ["accuracy"], "value": [1.0], "task": ["mqar"], "mixer": ["linear"], "run": ["a"]})
    assert drawn(name, bare.assign(series="linear", seed=0, split="test")) == {}
    assert drawn(name, table[table["metric"] == "norm"].dropna(axis=1, how="all")) == {}
    assert drawn(name, table[table["metric"] == "norm"]) == {}


def test_widths_are_panels_and_gates_are_series(table, capacity):
    assert [text.split("\n")[0] for text in legend(capacity)] == [
        "softmax", "linear", "gated_linear", "delta_rule beta=0.1", "delta_rule beta=1", "mesa",
    ]  # fmt: skip
    assert [ax.get_title() for ax in capacity.axes[:2]] == ["d_key = 4", "d_key = 8"]
    assert "mean of 1 to 2 seeds" in note(capacity)


def test_capacity_points_and_lines(table, capacity, colours):
    axes = capacity.axes
    points, law = lines(axes[1], colours["linear"])
    expected = table[(table["mixer"] == "linear") & (table["d_key"] == 8) & (table["metric"] == "top1")]
    assert list(points.get_xdata()) == [1, 2, 4]
    assert points.get_ydata() == pytest.approx(expected.groupby("pairs")["value"].mean().to_numpy())
    n = np.round(law.get_xdata() * 8)
    assert law.get_ydata() == pytest.approx(linear_attention.top1(n, 8, 8, 256))
    _, error = lines(axes[3], colours["linear"])
    assert error.get_ydata() == pytest.approx((n - 1) / 8)
    _, squares = lines(axes[3], colours["mesa"])
    assert squares.get_ydata() == pytest.approx(least_squares.error(n, 8))
    # There is no law for softmax: its points are joined by a line.
    assert len(lines(axes[1], colours["softmax"])) == 1


def test_laws_of_capacity_depend_on_the_gates(capacity, colours):
    axes = capacity.axes
    ages = np.arange(32)
    _, slow = lines(axes[3], colours["delta_rule beta=0.1"])
    assert slow.get_ydata()[-1] == pytest.approx(delta_rule.error(ages, 32, 8, 0.1).mean())
    _, faded = lines(axes[3], colours["gated_linear"])
    assert faded.get_ydata()[-1] == pytest.approx(decay.error(ages, 32, 8, np.exp(-0.2)).mean())


def retained(ages, values, counts, **facts) -> pd.DataFrame:
    made = [
        {"metric": metric, "value": value, "low": 0.1, "high": 0.9, "count": count, "age": age, "position": 16,
         "pairs": 16, "d_key": 8, "layer": 0, "run": "a", "mixer": "linear", "task": "oracle", "seed": 0, **facts}
        for metric in ("top1_by_age", "cosine_by_age")
        for age, value, count in zip(ages, values, counts, strict=True)
    ]  # fmt: skip
    return pd.DataFrame(made)


def triangles(ax) -> list:
    return [line for line in ax.get_lines() if line.get_marker() == "v" and len(line.get_xdata()) == 1]


def test_half_life_is_where_the_curve_falls_to_half():
    table = named(retained([0, 1, 3, 7, 15], [1.0, 0.9, 0.7, 0.3, 0.1], [100] * 5))
    ax = drawn("retention", table)["retention_oracle_d8"].axes[0]
    (triangle,) = triangles(ax)
    assert triangle.get_xdata()[0] == pytest.approx((4 * 8) ** 0.5)


def test_points_with_few_answers_have_no_bars():
    table = named(retained([0, 1, 3, 7], [0.5] * 4, [8, 49, 50, 200]))
    figure = drawn("retention", table)["retention_oracle_d8"]
    for ax in figure.axes[:2]:
        (bars,) = ax.collections
        assert [bar.vertices[0, 0] for bar in bars.get_paths()] == [4, 8]
    assert "bars: 95 % interval over answers" in note(figure)
    few = drawn("retention", named(retained([0, 1], [0.5] * 2, [8, 8])))["retention_oracle_d8"]
    assert note(few).startswith("no bars: few answers")


def test_retention_with_theory_and_lifetime(table, colours):
    """Measured values by age are on the curve of the law, and a hollow triangle is at the predicted lifetime."""
    figure = drawn("retention", table)["retention_oracle_d8"]
    top1 = figure.axes[0]
    (law,) = [line for line in lines(top1, colours["gated_linear"]) if line.get_linestyle() == "--"]
    ages = law.get_xdata() - 1
    assert law.get_ydata() == pytest.approx(decay.top1(ages, 32, 8, 8, 256, np.exp(-0.2)))
    (hollow,) = [
        t for t in triangles(top1) if t.get_markerfacecolor() == "none" and t.get_color() == colours["gated_linear"]
    ]
    assert hollow.get_xdata()[0] - 1 == pytest.approx(decay.lifetime(np.exp(-0.2), 8, 8, 256))


def test_at_most_ten_series_share_a_panel():
    parts = [
        retained([0, 1, 3], [0.9, heads / 30, 0.1], [100] * 3, run=f"a{heads}", **{"mixer.heads": heads})
        for heads in range(1, 13)
    ]
    figure = drawn("retention", named(*parts))["retention_oracle_d8"]
    counts = [len({line.get_color() for line in ax.get_lines()}) for ax in figure.axes]
    assert counts == [6, 6, 6, 6]
    assert legend(figure) == [f"linear heads={heads}" for heads in range(1, 13)]


def test_attention_is_signed_and_centred(table):
    figure = drawn("effective_attention", table[table["d_key"] == 8])["effective_attention_oracle"]
    image = next(image for ax in figure.axes for image in ax.get_images())
    assert image.get_clim() == (-1, 1)
    assert np.isnan(image.get_array().filled(np.nan)[0, 1])
    assert not any(isinstance(c, PathCollection) for ax in figure.axes for c in ax.collections)


def test_attention_marks_queries_and_positions_of_answers():
    torch.manual_seed(0)
    batch = MQAR(vocab=32, length=24, pairs=3).sample(4, np.random.default_rng(0))
    made = []
    for mixer in ("softmax", "delta_rule"):
        model = Model(
            vocab=32, mixer=hydra.utils.instantiate(config(f"mixer={mixer}").mixer), d_model=8, layers=2, mlp=0.0
        )
        traces = model.trace(torch.from_numpy(batch.tokens), torch.from_numpy(batch.factors["source"]))
        found = [row for t in traces for row in effective_attention(t, np.random.default_rng(0), matrix=True)]
        made += [row | {"run": mixer, "mixer": mixer, "task": "mqar", "seed": 0} for row in found]
    figure = drawn("effective_attention", named(pd.DataFrame(made)))["effective_attention_mqar"]
    panels = [ax for ax in figure.axes if ax.get_images()]
    circles = [c for ax in panels for c in ax.collections if isinstance(c, PathCollection)]
    query = np.flatnonzero(batch.scored[0])
    answer = batch.factors["source"][0][query]
    assert len(circles) == 8  # circles and triangles of two layers of two mechanisms
    assert np.allclose(circles[0].get_offsets(), np.c_[answer, query])
    assert np.allclose(circles[1].get_offsets()[:, 1], query)


def test_a_thinned_matrix_fills_its_panel():
    """One entry per block of four queries and four tokens: cells without gaps, positions on the axes."""
    entries = [
        {"metric": "weight", "value": float(q >= t), "query": 4 * q, "token": 4 * t + 3 * (t < q), "source": -100,
         "block": 4, "head": 0, "layer": 0, "run": "a", "mixer": "linear", "task": "mqar", "seed": 0}
        for q in range(8) for t in range(q + 1)
    ]  # fmt: skip
    ax = drawn("effective_attention", named(pd.DataFrame(entries)))["effective_attention_mqar"].axes[0]
    (image,) = ax.get_images()
    shown = image.get_array().filled(np.nan)
    assert shown.shape == (8, 8)
    assert np.isfinite(shown).sum() == 36
    assert image.get_extent() == [-0.5, 31.5, 31.5, -0.5]


def test_bounds_of_dynamic_access(table, colours):
    rank, residual = drawn("dynamic_access", table)["dynamic_access"].axes[2:4]
    ranks = [list(line.get_ydata()) for line in rank.get_lines() if line.get_color() == colours["linear"]]
    assert ranks == [[8]]
    bound = max(residual.get_lines(), key=lambda line: line.get_linewidth())
    assert bound.get_ydata()[-1] == pytest.approx(1 - 8 / 32)


def test_exponents_of_cost(table):
    figure = drawn("cost", table)["cost"]
    (legend,) = figure.legends
    labels = {text.get_text().split(":")[0]: text.get_text().split(":")[1].split() for text in legend.get_texts()}
    assert labels["softmax"][0] == "2.00"
    assert labels["linear"] == ["1.00", "0.00", "0.00"]
