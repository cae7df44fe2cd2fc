"""What figures show: fixed looks, ticks where it was tested, bands within [0, 1], nobody without data in a legend."""

import numpy as np
import pandas as pd
import pytest
from conftest import names

from recall_lab.figure import retrieval, style, training_curve


def table(mixers=("softmax", "linear"), lengths=(16, 64, 256), seeds=(0, 1, 2)) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = []
    for mixer in mixers:
        for seed in seeds:
            for length in lengths:
                facts = {"run": f"{mixer}{seed}", "mixer": mixer, "series": mixer, "task": "mqar", "seed": seed,
                         "task.length": length}  # fmt: skip
                for split in ("validation", "test") if length < 256 else ("test",):
                    rows.append({**facts, "split": split, "metric": "accuracy", "value": rng.uniform(0.9, 1)})
                rows.append({**facts, "split": "test", "metric": "chance", "value": 0.125})
                rows.append({**facts, "split": "test", "metric": "state_elements", "value": 100.0 + length})
            for step in (1, 2):
                rows.append({**facts, "split": "validation", "metric": "curve_accuracy", "step": step, "value": 0.5})
    return pd.DataFrame(rows)


def axes(table: pd.DataFrame, module=retrieval):
    ((name, figure),) = module.draw(table)
    return name, figure.axes[0]


def test_retrieval():
    name, ax = axes(table())
    assert name == "retrieval_mqar"
    assert ax.get_xscale() == "log"
    assert [t for t in ax.get_xticks() if ax.get_xlim()[0] <= t <= ax.get_xlim()[1]] == [16, 64, 256]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["16", "64", "256"]
    lines = {line.get_label(): line for line in ax.lines}
    assert "softmax  (356 carried at n=256)" in lines
    shown = table()
    expected = shown.query("mixer=='softmax' and split=='test' and metric=='accuracy'").groupby("task.length")["value"]
    assert np.allclose(lines["softmax  (356 carried at n=256)"].get_ydata(), expected.mean())
    assert any(np.allclose(line.get_ydata(), 0.125) for line in ax.lines)
    texts = " ".join(text.get_text() for text in ax.texts)
    assert "chance 0.12" in texts
    assert "lengths trained on" in texts
    assert "3 runs a point" in ax.figure.legends[0].get_title().get_text()
    for band in ax.collections:
        y = band.get_paths()[0].vertices[:, 1]
        assert y.min() >= 0
        assert y.max() <= 1


def test_a_mechanism_without_data_is_not_in_the_legend():
    shown = table()
    shown = shown[(shown["mixer"] != "linear") | (shown["metric"] != "accuracy")]
    _, ax = axes(shown)
    assert [t.get_text().split()[0] for t in ax.figure.legends[0].get_texts()] == ["softmax"]


def test_training_curves():
    name, ax = axes(table(), training_curve)
    assert name == "training_mqar"
    assert len(ax.lines) == 6
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["softmax", "linear"]


def test_no_data_no_figure():
    assert list(retrieval.draw(table()[:0])) == []
    assert list(training_curve.draw(table()[:0])) == []


def test_a_look_belongs_to_a_mechanism_whoever_else_is_shown():
    looks = [style.look(name) for name in {*names("mixer"), *style.FIXED}]
    assert len(set(looks)) == len(looks)
    assert style.look("my_own") == style.look("my_own") != style.look("my_other")
    assert style.look("linear d_key=8") != style.look("linear d_key=16")


def test_order_is_fixed():
    assert style.ordered(["zzz", "rnn", "softmax", "linear b", "linear a"]) == [
        "softmax", "linear a", "linear b", "rnn", "zzz",
    ]  # fmt: skip


@pytest.mark.parametrize(("runs", "words"), [([1, 1], "1 run a"), ([2, 2], "2 runs a"), ([2, 3], "2 to 3 runs a")])
def test_number_of_seeds_in_words(runs, words):
    assert style.seeds(runs) == f"{words} point"


def test_the_same_table_draws_the_same_svg(tmp_path):
    texts = []
    for name in ("a", "b"):
        ((_, figure),) = retrieval.draw(table())
        with style.style():
            figure.savefig(tmp_path / f"{name}.svg", metadata={"Date": None})
        texts.append((tmp_path / f"{name}.svg").read_text())
    assert texts[0] == texts[1]
