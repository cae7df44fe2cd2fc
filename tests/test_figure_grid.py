"""Heat maps over the cells of a task, and sliding windows versus their law."""

import numpy as np
import pandas as pd
import pytest
from tables import drawn, legend, named, note, numbers, panels, scores

from recall_lab.figure import coverage, needle, recall_phase_diagram, window_coverage
from recall_lab.task.mqar import MQAR
from recall_lab.theory import linear_attention


def test_needle():
    cells = [
        {"haystack": h, "length": n, "depth": d} for h in ("noise", "repeat") for n in (64, 256) for d in (0, 0.5, 1)
    ]
    table = named(scores("needle", cells, lambda mixer, cell: cell["depth"] if mixer == "linear" else 0.25))
    ((name, figure),) = drawn(needle, table).items()
    assert name == "needle"
    left, right = panels(figure)[:2]
    assert [left.get_title(), right.get_title()] == ["linear", "delta_rule"]
    assert numbers(left) == ["0", "0", "50", "50", "100", "100"]
    assert numbers(right) == ["25"] * 6
    assert {ax.collections[0].get_clim() for ax in panels(figure)[:4]} == {(0, 100)}
    assert left.get_ylim() == (0, 3)
    assert [tick.get_text() for tick in left.get_yticklabels()] == ["0", "50", "100"]
    assert left.get_ylabel() == "haystack = noise\ndepth (%)"
    # Trained at length 64 only: the line is to the right of the first column.
    assert left.lines[0].get_xdata()[0] == 1
    assert drawn(needle, table[table["task.depth"] == 0]) == {}


def test_every_heat_map_shows_the_union_of_the_cells():
    """A series that was not tested at length 256 has blank cells there; its cells for 1024 are in the column 1024."""
    cells = [{"haystack": "noise", "length": n, "depth": d} for n in (64, 256, 1024) for d in (0, 1)]
    table = named(scores("needle", cells, lambda mixer, cell: cell["length"] / 1024))
    table = table[(table["mixer"] != "delta_rule") | (table["task.length"] != 256)]
    table = table[(table["mixer"] != "linear") | (table["task.depth"] != 1)]
    left, right = panels(drawn(needle, table)["needle"])[:2]
    assert numbers(left) == ["6", "25", "100"]
    assert numbers(right) == ["6", "100"] * 2
    for ax in (left, right):
        assert [tick.get_text() for tick in ax.get_xticklabels()] == ["64", "256", "1024"]
    labels = [[tick.get_text() for tick in ax.get_yticklabels()] for ax in (left, right)]
    assert labels == [["0", "100"], ["", ""]]  # the depths of all heat maps of a row
    assert [text.get_position()[0] for text in right.texts] == [0.5, 2.5] * 2


def test_other_parameters_of_needle_are_rows():
    cells = [{"haystack": "noise", "keys": k, "length": 64, "depth": d} for k in (1, 4) for d in (0, 1)]
    figure = drawn(needle, named(scores("needle", cells, lambda mixer, cell: cell["keys"] / 4)))["needle"]
    few, _, many, _ = panels(figure)[:4]
    assert few.get_ylabel() == "keys = 1\ndepth (%)"
    assert [numbers(few), numbers(many)] == [["25"] * 2, ["100"] * 2]


def phase_diagram(widths, pairs=(4, 16, 64)) -> pd.DataFrame:
    cells = [{"vocab": 256, "length": 4 * p, "pairs": p} for p in pairs]
    return named(
        *(
            scores("mqar", cells, lambda mixer, cell, d=d: d / 100, **{"mixer.d_key": d, "mixer.d_value": d})
            for d in widths
        )
    )


def test_phase_diagram():
    ((_, figure),) = drawn(recall_phase_diagram, phase_diagram((8, 16, 32))).items()
    linear = panels(figure)[0]
    assert linear.get_title() == "linear"
    assert numbers(linear) == ["8", "16", "32"] * 3
    assert 64 < linear_attention.capacity(32, 32, 128) < 256
    trained, dashed, solid = linear.lines
    assert trained.get_ydata()[0] == 1
    # The solid line leaves the diagram at its top, between the centres of the second column and the third.
    assert 1.5 < solid.get_xdata()[-1] < 2.5
    # n = d_key = 16 is the centre of the second column and of the second row.
    assert np.interp(1.5, dashed.get_xdata(), dashed.get_ydata()) == pytest.approx(1.5, abs=0.02)
    assert drawn(recall_phase_diagram, phase_diagram((8,))) == {}


def test_phase_diagrams_share_their_cells():
    table = phase_diagram((8, 16, 32))
    table = table[(table["mixer"] != "delta_rule") | (table["mixer.d_key"] != 16)]
    delta = panels(drawn(recall_phase_diagram, table)["recall_phase_diagram"])[1]
    assert numbers(delta) == ["8", "32"] * 3
    assert [tick.get_text() for tick in delta.get_xticklabels()] == ["8", "16", "32"]


@pytest.mark.parametrize("selected", ["train.lr", "train.clip"])
def test_settings_chosen_on_validation_are_not_in_series_names(selected):
    """Each width has its own best value, but there is still one panel per mechanism."""
    table = phase_diagram((8, 16, 32))
    table[selected] = table["mixer.d_key"] / 1000
    table = named(table)
    if selected != "train.lr":
        table.attrs["selected"] = (selected,)
    figure = drawn(recall_phase_diagram, pd.concat(part for _, part in table.groupby("task")))["recall_phase_diagram"]
    assert [ax.get_title() for ax in panels(figure)[:2]] == ["linear", "delta_rule"]


WINDOWS = [{"vocab": 256, "length": 64, "pairs": pairs, "gap_exponent": 0.01} for pairs in (4, 8)]


def windows(task: str, cells, **settings) -> pd.DataFrame:
    return named(
        *(
            scores(task, cells, lambda mixer, cell: 0.5, mixers=["window"],
                   **{"model.layers": 1, "mixer.budget": budget, "mixer.short_conv": width}, **settings)
            for budget in (8, 16) for width in (2, 4)
        )
    )  # fmt: skip


def test_window_coverage():
    ((_, figure),) = drawn(window_coverage, windows("mqar", WINDOWS)).items()
    assert [ax.get_title() for ax in panels(figure)[:2]] == [f"short convolution of width c = {c}" for c in (2, 4)]
    assert legend(figure) == ["n = 64, 4 pairs", "n = 64, 8 pairs"]
    assert "mean of 2 seeds" in note(figure)


def test_windows_that_differ_in_more_than_the_budget_are_kept_apart():
    table = pd.concat([windows("mqar", WINDOWS, **{"model.d_model": d}) for d in (16, 32)])
    figure = drawn(window_coverage, named(table))["window_coverage"]
    assert [ax.get_title().split("\n")[0] for ax in panels(figure)[:4]] == [
        f"window d_model={d}" for d in (16, 16, 32, 32)
    ]


def test_window_coverage_needs_mqar():
    assert drawn(window_coverage, windows("copying", [{"length": 64, "vocab": 8}])) == {}


def test_the_law_of_the_window_counts_distances():
    facts = {**{f"task.{name}": value for name, value in WINDOWS[1].items()}, "mixer.budget": 16, "mixer.short_conv": 4}
    batch = MQAR(length=64, pairs=8).sample(4000, np.random.default_rng(5))
    age = batch.age[batch.scored]
    for reach, law in zip((16, 18), coverage.law(facts), strict=True):
        covered = (age < reach).mean()
        assert law == pytest.approx(covered + (1 - covered) * 2 / 256, abs=0.01)


def test_no_figure_without_rows():
    empty = named(scores("mqar", WINDOWS, lambda mixer, cell: 0.5))[:0]
    for module in (needle, recall_phase_diagram, window_coverage):
        assert list(module.draw(empty)) == []
