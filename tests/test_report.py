"""The report of a sweep's folder: its contents, and the runs and failures that it names."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import yaml
from sweep_folder import write

from recall_lab import folders, report, results
from recall_lab.figure import needle, retrieval


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "sweep"


def page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_contents_of_a_report(folder):
    for seed in (0, 1):
        for mixer in ("linear", "softmax"):
            write(folder, mixer, seed=seed)
    made = report.make(folder)
    assert made.failed == []
    assert {path.name for path in (folder / "figure").iterdir()} == {
        f"{name}.{kind}" for name in ("retrieval_mqar", "training_mqar") for kind in ("png", "svg", "pdf")
    }
    assert len(pd.read_parquet(folder / "table.parquet")) == 4 * 9
    for text in ("accuracy per scored token", "0.026", "0.074", "linear", "softmax"):
        assert text in page(folder)
        assert text in made.text
    assert page(folder).count("data:image/png;base64,") == 2
    assert str(folder / "report.html") in made.text


def test_a_report_made_again_is_the_same(folder):
    write(folder)
    report.make(folder)
    files = [folder / "report.html", folder / "report.md", *(folder / "figure").iterdir()]
    before = [path.read_bytes() for path in files]
    report.make(folder)
    assert [path.read_bytes() for path in files] == before


def broken(table):
    yield "before", next(retrieval.draw(table))[1]
    raise KeyError("task.pairs")


def test_a_figure_that_fails_is_named_and_left_out(folder, monkeypatch):
    write(folder)
    monkeypatch.setattr(needle, "draw", broken)
    made = report.make(folder)
    line = "figure needle of mqar: KeyError: 'task.pairs'"
    assert made.failed == [line]
    assert line in made.text
    assert "figure needle of mqar: KeyError: &#39;task.pairs&#39;" in page(folder)
    assert page(folder).count("data:image/png;base64,") == 3


def test_a_figure_that_fails_for_one_task_is_drawn_for_the_others(folder, monkeypatch):
    write(folder)
    write(folder, task="copying")

    def fussy(table):
        if table["task"].iloc[0] == "copying":
            raise ValueError("not this one")
        yield from retrieval.draw(table)

    monkeypatch.setattr(needle, "draw", fussy)
    assert report.make(folder).failed == ["figure needle of copying: ValueError: not this one"]


def test_a_figure_that_cannot_be_saved_is_named(folder, monkeypatch):
    write(folder)
    (folder / "figure" / "retrieval_mqar.png").mkdir(parents=True)
    made = report.make(folder)
    assert len(made.failed) == 1
    assert made.failed[0].startswith("figure retrieval_mqar: ")
    assert str(folder / "figure" / "retrieval_mqar.png") in made.failed[0]
    assert (folder / "figure" / "training_mqar.png").exists()


def test_a_grid_that_fails_is_named_and_left_out(folder, monkeypatch):
    write(folder)
    write(folder, task="copying")
    grid = report._grid

    def fussy(task, part):
        if task == "copying":
            raise ValueError("not this one")
        yield from grid(task, part)

    monkeypatch.setattr(report, "_grid", fussy)
    made = report.make(folder)
    assert made.failed == ["table of copying: ValueError: not this one"]
    assert "mqar: accuracy" in made.text


@pytest.mark.parametrize("task", ["hard/reversal", "a b", "[x],y", "..", "täsk"])
def test_any_task_name_gives_a_valid_file_name(folder, task):
    write(folder, task=task)
    made = report.make(folder)
    assert made.failed == []
    names = [path.name for path in (folder / "figure").iterdir()]
    assert len(names) == 6
    assert all(re.fullmatch(r"[\w.+=-]+", name) for name in names)
    assert f"retrieval_{task}" in page(folder)


def test_equal_file_names_are_made_different(folder):
    write(folder, task="a/b")
    write(folder, task="a b", seed=1)
    assert report.make(folder).failed == []
    assert len(list((folder / "figure").iterdir())) == 15


def test_names_are_escaped(folder):
    write(folder, task="<b>&x</b>", state="finished")
    write(folder, task="copying", state="failed", error="<script>")
    report.make(folder)
    assert "&lt;b&gt;&amp;x&lt;/b&gt;" in page(folder)
    assert "&lt;script&gt;" in page(folder)
    assert "<b>" not in page(folder)
    assert page(folder).count("<script>") == 1  # that of the page itself


def test_series_are_sorted_by_number(folder):
    for heads in (16, 8, 32):
        write(folder, heads=heads)
    text = report.make(folder).text
    assert text.index("heads=8") < text.index("heads=16") < text.index("heads=32")


def test_runs_that_are_missing_are_named(folder):
    write(folder)
    write(folder, "softmax", state="failed", error="it broke")
    write(folder, "delta_rule", state="incomplete", error="probe cost failed")
    made = report.make(folder)
    for text in ("softmax on mqar, seed 0 is failed: it broke", "delta_rule on mqar, seed 0 is incomplete: probe cost"):
        assert text in made.text
        assert text in page(folder)
    assert made.failed == []


@pytest.fixture
def _without_figures(monkeypatch):
    monkeypatch.setattr("recall_lab.page.pictures", lambda *_: [])


@pytest.mark.usefixtures("_without_figures")
def test_commands_and_descriptions(folder):
    write(folder)
    for command, description in (("recall-lab run a", "Of <two>\nlines."), ("recall-lab probe b", "")) * 2:
        folders.add_command(folder, command, description)
    report.make(folder)
    assert page(folder).count("<code>recall-lab run a</code>") == page(folder).count("recall-lab probe b</code>") == 1
    assert "Of &lt;two&gt;\nlines." in page(folder)
    assert "recall-lab run a\nrecall-lab probe b" in (folder / "report.md").read_text("utf-8")
    (folder / folders.COMMANDS).write_text("{}")
    assert report.make(folder).failed == [f"commands: ValueError: {folder / folders.COMMANDS} is damaged; delete it"]


def test_settings_that_vary_and_those_that_do_not(folder):
    write(folder, heads=1)
    write(folder, heads=2)
    write(folder, "softmax", heads=2)
    table = results.collect(folder)
    varying, constant = (report._settings(table, which).set_index("setting") for which in (True, False))
    assert varying["values"].to_dict() == {"mixer._target_": "linear.M, softmax.M", "mixer.heads": "1, 2"}
    assert constant["value"].to_dict() == {
        "trained._target_": "mqar.T",
        "trained.length": "16",
        "seed": "0",
        "data_seed": "0",
    }
    table.loc[table["mixer"] == "linear", "mixer.feature_map"] = "elu"
    only = report._settings(table, False).set_index("setting")
    assert only.loc["mixer.feature_map"].tolist() == ["elu", "linear"]
    assert only.loc["seed"].tolist() == ["0", ""]


@pytest.mark.usefixtures("_without_figures")
def test_a_damaged_training_curve_is_named(folder):
    run = write(folder)
    (run / "curve.json").write_text("[{")
    (line,) = report.make(folder).failed
    assert line.startswith(f"training curve of {run.name}: ValueError: {run / 'curve.json'} is damaged")
    assert "0.026" in page(folder)


@pytest.mark.usefixtures("_without_figures")
def test_cells_and_seeds_that_a_series_lacks_are_named(folder):
    write(folder)
    write(folder, seed=1)
    short = write(folder, "softmax")
    rows = json.loads((short / "rows.json").read_text())
    rows["rows"] = [row for row in rows["rows"] if row["task.length"] == 16]
    (short / "rows.json").write_text(json.dumps(rows))
    report.make(folder)
    for line in ("mqar: softmax has 1 of 2 seeds", "mqar: softmax was not tested at length=64"):
        assert f"<li>{line}</li>" in page(folder)
        assert f"- {line}\n" in (folder / "report.md").read_text("utf-8")
    assert "linear has" not in page(folder)


def test_learning_rates_and_training_to_the_end(folder):
    for steps, lr, value in ((10, 0.1, 0.5), (10, 0.2, 0.6), (20, 0.2, 0.8)):
        run = write(folder, heads=steps, seed=round(lr * 10))
        config = yaml.safe_load((run / "config.yaml").read_text())
        config |= {"seed": 0, "train": {"lr": lr, "steps": steps}, "mixer": {"_target_": "linear.M"}}
        rows = json.loads((run / "rows.json").read_text())
        for row in rows["rows"]:
            row["value"] = value if row["metric"] == "accuracy" else row["value"]
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        (run / "rows.json").write_text(json.dumps(rows))
    table = results.collect(folder)
    (shown,) = report._training(results.select(table), table)
    found = shown.set_index("steps")[["trained to the end", "best train.lr", "of"]]
    assert found.loc[10].tolist() == ["no: +0.200 from twice 10 steps", "0.2, at the edge of the grid", "0.1, 0.2"]
    assert found.loc[20].tolist() == ["no: +0.200 from twice 10 steps", "", ""]


def test_a_folder_without_results(folder):
    write(folder, state="failed")
    with pytest.raises(folders.ForeignFolder, match="no finished run yet"):
        report.make(folder)


def test_a_single_seed_has_no_interval(folder):
    write(folder)
    assert "over seeds" not in report.make(folder).text
    write(folder, seed=1)
    assert "mean [range] over seeds" in report.make(folder).text
