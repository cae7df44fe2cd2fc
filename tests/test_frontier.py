"""The recall–memory frontier: its figure on made-up tables, and the coverage law in it."""

import numpy as np
import pandas as pd
import pytest
from tables import drawn, legend, lines, named, note, panels

from recall_lab.figure import coverage, frontier

CELLS = [{"vocab": 256, "length": 4 * pairs, "pairs": pairs, "gap_exponent": 0.01} for pairs in (4, 8, 16, 32)]
ZOOLOGY = [
    {"vocab": 8192, "length": n, "pairs": pairs, "gap_exponent": 0.01} for _, n, pairs in frontier.PUBLISHED_CELLS
]


def recall(width: float, pairs: int, seed: int = 0) -> float:
    return min(1.0, width**2 / (10 * pairs)) - 0.01 * seed


def runs(mixer: str, size: dict, elements: int, score, cells=CELLS, seeds=(0, 1, 2), **settings) -> pd.DataFrame:
    """Test rows of one setting of a mixer. The state after fewer tokens is smaller, as that of softmax is."""
    rows = []
    longest = max(one["length"] for one in cells)
    for seed in seeds:
        for cell in cells:
            own = {"run": f"{mixer}{size}{settings}{seed}", "mixer": mixer, "task": "mqar", "seed": seed,
                   "data_seed": 0, "split": "test", "model.layers": 1, "mixer.short_conv": 4, "train.lr": 0.01,
                   "task.queries": None, **size, **settings,
                   **{f"task.{name}": value for name, value in cell.items()}}  # fmt: skip
            for metric, value in (
                ("accuracy", score(cell["pairs"], seed)),
                ("chance", 2 / cell["vocab"]),
                ("state_elements", elements * cell["length"] / longest),
            ):
                rows.append({**own, "metric": metric, "value": value})
    return pd.DataFrame(rows)


def by_width(mixer: str, widths=(4, 8, 16), **more) -> pd.DataFrame:
    made = [
        runs(
            mixer,
            {"mixer.d_key": d, "mixer.d_value": d},
            d * d,
            lambda pairs, seed, d=d: recall(d, pairs, seed),
            **more,
        )
        for d in widths
    ]
    return pd.concat(made, ignore_index=True)


def windows(**settings) -> pd.DataFrame:
    made = [
        runs("window", {"mixer.budget": w, "mixer.d_key": 16, "mixer.d_value": 16}, 32 * w, lambda *_: 0.5, **settings)
        for w in (8, 16, 64)
    ]
    return pd.concat(made, ignore_index=True)


def frontier_of(table: pd.DataFrame):
    ((name, figure),) = drawn(frontier, table).items()
    assert name == "frontier_mqar"
    return figure, lines(panels(figure)[0])


def test_one_line_per_mechanism_over_the_state_at_the_longest_length():
    figure, found = frontier_of(named(by_width("linear"), by_width("delta_rule"), windows()))
    assert legend(figure) == ["linear", "delta_rule", "window"]
    assert found["linear"].get_xdata() == pytest.approx([16, 64, 256])
    expected = [np.mean([recall(d, pairs) for pairs in (4, 8, 16, 32)]) - 0.01 for d in (4, 8, 16)]
    assert found["linear"].get_ydata() == pytest.approx(expected)
    assert found["window"].get_xdata() == pytest.approx([256, 512, 2048])
    ax = panels(figure)[0]
    assert ax.get_xlabel() == "state size (elements) at n = 128"
    assert ax.get_ylabel() == "accuracy per scored token\nmean over 4 cells"
    assert [text.get_text() for text in ax.get_xticklabels()][:2] == ["16", "32"]
    assert "mean of 3 seeds" in note(figure)
    assert "published" not in note(figure)


def test_settings_other_than_the_size_make_series():
    table = named(by_width("linear", **{"mixer.heads": 1}), by_width("linear", **{"mixer.heads": 2}))
    _, found = frontier_of(table)
    assert {name for name in found if not name.startswith("_")} == {"linear heads=1", "linear heads=2"}


def test_rates_chosen_on_validation_do_not_split_a_line():
    table = by_width("linear")
    table["train.lr"] = np.where(table["mixer.d_key"] == 4, 0.03, 0.01)
    _, found = frontier_of(named(table))
    assert len(found["linear"].get_xdata()) == 3


def test_only_cells_that_all_runs_share_count():
    short = by_width("delta_rule", cells=CELLS[:2])
    figure, found = frontier_of(named(by_width("linear"), short))
    assert panels(figure)[0].get_ylabel().endswith("mean over 2 cells")
    for name in ("linear", "delta_rule"):
        assert found[name].get_ydata()[0] == pytest.approx(np.mean([recall(4, pairs, 1) for pairs in (4, 8)]))


def law_lines(figure) -> list[tuple[np.ndarray, np.ndarray]]:
    return [line.get_data() for line in panels(figure)[0].lines if line.get_linewidth() == 0.8]


def test_the_coverage_law_of_a_window():
    """At a window as long as the sequence every pair is covered, and the law at w = 16 is the mean over the cells."""
    figure, _ = frontier_of(named(windows()))
    (x, early), (_, late) = law_lines(figure)
    assert x[[0, -1]] == pytest.approx([256, 2048])
    facts = [{**{f"task.{k}": v for k, v in cell.items()}, "mixer.short_conv": 4, "mixer.budget": 16} for cell in CELLS]
    expected = np.mean([coverage.law(one) for one in facts], axis=0)
    assert np.interp(512, x, early) == pytest.approx(expected[0], abs=1e-6)
    assert np.interp(512, x, late) == pytest.approx(expected[1], abs=1e-6)
    assert (late >= early).all()
    assert "coverage law" in note(figure)


@pytest.mark.parametrize("settings", [{"model.layers": 2}, {"task": "copying"}, {"mixer": "sink_window"}])
def test_no_law_where_it_does_not_apply(settings):
    figures = drawn(frontier, named(windows().assign(**settings)))
    (figure,) = figures.values()
    assert law_lines(figure) == []
    assert "coverage law" not in note(figure)


def test_published_points_only_in_their_cells():
    figure, _ = frontier_of(named(by_width("delta_rule", cells=ZOOLOGY), by_width("linear", cells=ZOOLOGY)))
    hollow = [line for line in panels(figure)[0].lines if line.get_fillstyle() == "none"]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in hollow] == frontier.PUBLISHED["delta_rule"]
    assert "hollow: published" in note(figure)
    assert "at n = 1024" in panels(figure)[0].get_xlabel()


def test_no_figure_without_several_sizes():
    assert drawn(frontier, named(by_width("linear", widths=(8,)), by_width("delta_rule", widths=(8,)))) == {}
    table = named(by_width("linear"))
    assert drawn(frontier, table[table["metric"] != "state_elements"]) == {}
    apart = [by_width("linear", widths=(d,), cells=[cell]) for d, cell in ((4, CELLS[0]), (8, CELLS[1]))]
    assert drawn(frontier, named(*apart)) == {}
    assert drawn(frontier, table[:0]) == {}


def test_other_mixers_on_trained_weights_are_left_out():
    swapped = by_width("softmax").assign(trained_as="linear")
    table = named(by_width("linear").assign(trained_as=None), swapped)
    figure, _ = frontier_of(table)
    assert legend(figure) == ["linear"]
