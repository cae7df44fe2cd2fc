"""Figures of scores: lines, panels, axes, notes, and what is left blank."""

import numpy as np
import pandas as pd
from tables import drawn, legend, lines, named, note, numbers, panels, scores

from recall_lab.figure import accuracy_by, retrieval, style, tasks, training, updates

LENGTHS = [{"length": length} for length in (16, 64, 256)]


def test_accuracy_over_length():
    table = named(scores("mqar", LENGTHS, lambda mixer, cell: 1 - cell["length"] / 1000, seeds=(0, 1, 2)))
    table.loc[(table["metric"] == "state_elements") & (table["mixer"] == "linear"), "value"] = (
        table["task.length"] + 100
    )
    ((name, figure),) = drawn(retrieval, table).items()
    assert name == "retrieval_mqar"
    (ax,) = panels(figure)
    assert ax.get_xscale() == "log"
    assert list(ax.get_xticks()) == [16, 64, 256]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["16", "64", "256"]
    assert np.allclose(lines(ax)["linear"].get_ydata(), [0.984, 0.936, 0.744])
    assert any(np.allclose(line.get_ydata(), 0.1) for line in ax.lines)
    assert set(numbers(ax)) == {"0.1", "trained on"}
    assert legend(figure) == ["linear (356 at n = 256)", "delta_rule (9)"]
    assert note(figure) == "mean of 3 seeds\nbars: 95 % interval\ndotted: chance\nin brackets: state size (elements)"


def test_a_single_seed_has_no_bars():
    figure = drawn(retrieval, named(scores("mqar", LENGTHS, lambda mixer, cell: 0.5, seeds=[0])))["retrieval_mqar"]
    assert note(figure).startswith("one seed\ndotted")
    assert not panels(figure)[0].collections


def test_bars_do_not_exceed_one():
    table = named(scores("mqar", LENGTHS, lambda mixer, cell: 0.5, seeds=range(4)))
    table.loc[table["metric"] == "accuracy", "value"] = np.random.default_rng(0).choice(
        [1.0, 0.9], len(table.query("metric == 'accuracy'"))
    )
    (ax,) = panels(drawn(retrieval, table)["retrieval_mqar"])
    bars = [bar.vertices[:, 1] for series in ax.collections for bar in series.get_paths()]
    assert bars
    assert max(bar.max() for bar in bars) <= 1


def test_a_series_without_scores_is_not_in_the_legend():
    table = named(scores("mqar", LENGTHS, lambda mixer, cell: 0.5))
    table = table[(table["mixer"] != "linear") | (table["metric"] != "accuracy")]
    assert legend(drawn(retrieval, table)["retrieval_mqar"]) == ["delta_rule (9)"]


def test_numbers_of_pairs_at_one_length_are_an_axis():
    """Five numbers of pairs at one length give five points, not one point with their mean."""
    cells = [{"length": 64, "pairs": pairs} for pairs in (2, 4, 8, 16, 32)]
    table = named(scores("mqar", cells, lambda mixer, cell: 1 / cell["pairs"]))
    ((name, figure),) = drawn(retrieval, table).items()
    assert name == "retrieval_mqar_by_pairs"
    (ax,) = panels(figure)
    assert lines(ax)["linear"].get_xdata().tolist() == [2, 4, 8, 16, 32]
    assert np.allclose(lines(ax)["linear"].get_ydata(), [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32])
    assert ax.get_xlabel() == "pairs"


def test_pairs_that_grow_with_the_length_get_no_axis():
    cells = [{"length": 4 * pairs, "pairs": pairs} for pairs in (4, 8, 16)]
    assert set(drawn(retrieval, named(scores("mqar", cells, lambda mixer, cell: 0.5)))) == {"retrieval_mqar"}


def test_each_of_two_parameters_is_an_axis_and_a_panel():
    cells = [{"length": n, "data": m} for n in (32, 64, 128) for m in (2, 8)]
    table = named(scores("selective_copying", cells, lambda mixer, cell: cell["data"] / cell["length"]))
    made = drawn(retrieval, table)
    assert set(made) == {"retrieval_selective_copying", "retrieval_selective_copying_by_data"}
    few, many = panels(made["retrieval_selective_copying"])
    assert [few.get_title(), many.get_title()] == ["data = 2", "data = 8"]
    assert np.allclose(lines(many)["linear"].get_ydata(), [8 / 32, 8 / 64, 8 / 128])
    by_data = panels(made["retrieval_selective_copying_by_data"])
    assert [ax.get_title() for ax in by_data] == ["length = 32", "length = 64", "length = 128"]
    assert np.allclose(lines(by_data[2])["linear"].get_ydata(), [2 / 128, 8 / 128])


def test_the_title_names_parameters_that_are_averaged():
    """If pairs vary at one length only, a panel per number of pairs would have a single point."""
    cells = [{"length": 64, "pairs": 4}, {"length": 64, "pairs": 16}, {"length": 256, "pairs": 64}]
    made = drawn(retrieval, named(scores("mqar", cells, lambda mixer, cell: cell["pairs"] / 64)))
    (ax,) = panels(made["retrieval_mqar"])
    assert np.allclose(lines(ax)["linear"].get_ydata(), [10 / 64, 1])
    assert made["retrieval_mqar"].get_suptitle() == "mqar: accuracy over length, mean over pairs"
    (ax,) = panels(made["retrieval_mqar_by_pairs"])
    assert ax.get_title() == "length = 64"
    assert np.allclose(lines(ax)["linear"].get_ydata(), [4 / 64, 16 / 64])


def test_each_value_of_a_nonnumeric_parameter_gets_a_panel():
    parts = [
        scores("state_tracking", [{"length": n, "group": group} for n in (4, 8)], lambda mixer, cell, a=a: a)
        for group, a in (("parity", 1.0), ("s3", 0.5))
    ]
    figure = drawn(retrieval, named(*parts))["retrieval_state_tracking"]
    assert [ax.get_title() for ax in panels(figure)] == ["group = parity", "group = s3"]
    assert [lines(ax)["linear"].get_ydata().tolist() for ax in panels(figure)] == [[1, 1], [0.5, 0.5]]


def test_a_panel_names_what_its_models_were_trained_with():
    """The names of series leave it out, so that a mechanism has one colour in all panels."""
    parts = [
        scores("state_tracking", [{"length": n, "group": group} for n in (4, 8)], lambda mixer, cell: 0.5,
               **{"trained.group": group})
        for group in ("parity", "s3")
    ]  # fmt: skip
    figure = drawn(retrieval, named(*parts))["retrieval_state_tracking"]
    named_lines = [{name for name in lines(ax) if not name.startswith("_")} for ax in panels(figure)]
    assert named_lines == [{"linear", "delta_rule"}] * 2


def test_a_task_without_a_parameter_that_varies():
    cells = [{"words": words} for words in (2, 4)]
    assert set(drawn(retrieval, named(scores("mine", cells, lambda mixer, cell: 0.5)))) == {"retrieval_mine_by_words"}
    assert drawn(retrieval, named(scores("mine", cells[:1], lambda mixer, cell: 0.5))) == {}


def test_tasks_in_which_only_the_length_varies_share_a_figure():
    grid = [{"length": length, "data": data} for length in (16, 32) for data in (2, 4)]
    parts = [scores(task, LENGTHS, lambda mixer, cell: 0.5) for task in ("mqar", "updates")]
    made = drawn(tasks, named(*parts, scores("selective_copying", grid, lambda mixer, cell: 0.5)))
    assert [ax.get_title() for ax in panels(made["tasks"])] == ["mqar", "updates"]
    assert drawn(tasks, named(parts[0])) == {}


def test_many_series_get_panels_of_at_most_ten():
    parts = [
        scores("mqar", LENGTHS, lambda mixer, cell: 0.5, mixers=["linear"], seeds=[0], **{"mixer.heads": heads})
        for heads in range(1, 24)
    ]
    figure = drawn(retrieval, named(*parts))["retrieval_mqar"]
    assert [len([x for x in lines(ax) if x.startswith("linear")]) for ax in panels(figure)] == [8, 7, 8]
    assert [text.split(" (")[0] for text in legend(figure)] == [f"linear heads={heads}" for heads in range(1, 24)]


def test_accuracy_by_age_is_pooled_over_cells():
    rows = [
        {"run": f"linear{seed}", "mixer": "linear", "task": "mqar", "seed": seed, "split": "probe",
         "metric": "accuracy_by_age", "task.length": length, "age": age, "value": value - 0.1 * seed, "count": count}
        for seed in (0, 1)
        for length, age, value, count in ((64, 4.0, 1.0, 90), (128, 4.0, 0.5, 10), (128, 32.0, 0.25, 4))
    ]  # fmt: skip
    ((name, figure),) = drawn(accuracy_by, named(pd.DataFrame(rows))).items()
    assert name == "accuracy_by_age_mqar"
    (ax,) = panels(figure)
    assert np.allclose(lines(ax)["linear"].get_ydata(), [0.9, 0.2])
    assert np.allclose(lines(ax)["linear"].get_xdata(), [4, 32])
    # Eight answers are too few for a bar.
    (bars,) = ax.collections
    assert [bar.vertices[0, 0] for bar in bars.get_paths()] == [4]


def test_accuracy_by_rebindings_shows_the_law_of_sums():
    rows = [
        {"run": "linear0", "mixer": "linear", "task": "updates", "seed": 0, "split": "probe", "metric":
         "accuracy_by_rebindings", "rebindings": float(m), "value": 1 / (1 + m), "count": 100}
        for m in range(4)
    ]  # fmt: skip
    (ax,) = panels(drawn(accuracy_by, named(pd.DataFrame(rows)))["accuracy_by_rebindings_updates"])
    law = next(line for line in ax.lines if line.get_linestyle() == "--")
    measured = lines(ax)["linear"]
    assert np.allclose(
        np.interp(measured.get_xdata(), law.get_xdata(), law.get_ydata()), measured.get_ydata(), atol=1e-3
    )


def test_training_curves():
    table = scores("mqar", LENGTHS, lambda mixer, cell: 0.5)
    curves = [
        {**run, "split": "validation", "metric": "curve_accuracy", "step": step, "value": step / 10}
        for run in table[["run", "mixer", "task", "seed"]].drop_duplicates().to_dict("records")
        for step in (1, 2)
    ]
    ((name, figure),) = drawn(training, named(table, pd.DataFrame(curves))).items()
    assert name == "training_mqar"
    (ax,) = panels(figure)
    assert [line.get_label() for line in ax.lines] == ["linear", "delta_rule"]
    for line in ax.lines:  # two runs, with a gap after each
        np.testing.assert_equal(line.get_xydata(), [[1, 0.1], [2, 0.2], [np.nan, np.nan]] * 2)
    assert legend(figure) == ["linear", "delta_rule"]


def test_updates():
    cells = [{"length": 128, "pairs": pairs, "updates": updates} for pairs in (4, 8) for updates in (0, 4, 8)]
    table = named(
        scores("updates", cells, lambda mixer, cell: 1.0 if mixer == "delta_rule" else 1 / (1 + cell["updates"]))
    )
    ((_, figure),) = drawn(updates, table).items()
    few, many = panels(figure)
    assert [few.get_title(), many.get_title()] == ["4 keys, n = 128", "8 keys, n = 128"]
    assert lines(many)["linear"].get_xdata().tolist() == [0, 0.5, 1]
    assert np.allclose(lines(many)["linear"].get_ydata(), [1, 1 / 5, 1 / 9])
    assert drawn(updates, table[table["task.updates"] == 0]) == {}


def test_no_figure_without_rows():
    empty = named(scores("mqar", LENGTHS, lambda mixer, cell: 0.5))[:0]
    for module in (
        retrieval,
        training,
        updates,
        accuracy_by,
    ):
        assert list(module.draw(empty)) == []


def test_the_same_table_draws_the_same_svg(tmp_path):
    texts = []
    for name in ("a", "b"):
        ((_, figure),) = retrieval.draw(named(scores("mqar", LENGTHS, lambda mixer, cell: 0.5)))
        with style.style():
            figure.savefig(tmp_path / f"{name}.svg", metadata={"Date": None})
        texts.append((tmp_path / f"{name}.svg").read_text(encoding="utf-8"))
    assert texts[0] == texts[1]


def test_bins_that_differ_from_cell_to_cell_are_pooled():
    """Mean ages of 13.9 and 14.1 give one point; depths of 0 and 1/4 give two."""
    facts = {"run": "a", "mixer": "linear", "task": "mqar", "seed": 0, "split": "probe"}
    ages = [(3.0, 1.0), (13.9, 1.0), (14.1, 0.0)]
    rows = [{**facts, "metric": "accuracy_by_age", "age": age, "value": value, "count": 60} for age, value in ages]
    (ax,) = panels(drawn(accuracy_by, named(pd.DataFrame(rows)))["accuracy_by_age_mqar"])
    assert np.allclose(lines(ax)["linear"].get_xdata(), [3, 14])
    assert np.allclose(lines(ax)["linear"].get_ydata(), [1, 0.5])
    depths = [{**facts, "metric": "accuracy_by_depth", "depth": d, "value": d, "count": 60} for d in (0, 0.25, 1)]
    (ax,) = panels(drawn(accuracy_by, named(pd.DataFrame(depths)))["accuracy_by_depth_mqar"])
    assert np.allclose(lines(ax)["linear"].get_ydata(), [0, 0.25, 1])
