"""The report of a sweep's folder: its contents, and the runs and failures that it names."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import yaml

from recall_lab import folders, report
from recall_lab.figure import needle, retrieval

STATUS = {
    "format": folders.FORMAT,
    "started": "2025-01-01T00:00:00",
    "sweep": "",
    "seconds": 2.0,
    **dict.fromkeys(("git", "version", "torch", "numpy", "python", "device", "threads"), "1"),
}


def write(
    folder: Path, mixer: str = "linear", task: str = "mqar", seed: int = 0, state: str = "finished", **more
) -> Path:
    """A finished run with an accuracy in two cells, and a training curve."""
    folder.mkdir(exist_ok=True)
    (folder / folders.MARK).touch()
    heads, facts = more.pop("heads", 1), more
    run = folder / f"{re.sub('[^a-z]', '', mixer + task)}-{heads}-{seed}"
    run.mkdir()
    config = {
        "seed": seed,
        "data_seed": 0,
        "mixer": {"_target_": f"{mixer}.M", "heads": heads},
        "task": {"_target_": f"{task}.T", "length": 16},
        "choice": {"mixer": mixer, "task": task},
    }
    rows = [
        {"split": split, "metric": metric, "value": value, "task.length": length}
        for split, lengths in (("validation", (16,)), ("test", (16, 64)))
        for length in lengths
        for metric, value in (("accuracy", heads / 100 + length / 1000), ("chance", 0.1), ("state_elements", 9.0))
    ]
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (run / "rows.json").write_text(json.dumps({"format": folders.FORMAT, "rows": rows}), encoding="utf-8")
    (run / "curve.json").write_text(json.dumps([{"step": 1, "accuracy": 0.5}]), encoding="utf-8")
    (run / "status.json").write_text(json.dumps(STATUS | {"state": state} | facts), encoding="utf-8")
    return run


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
        f"{name}.{kind}" for name in ("retrieval_mqar", "training_mqar") for kind in ("png", "svg")
    }
    assert len(pd.read_parquet(folder / "table.parquet")) == 4 * 9
    for text in ("accuracy per scored token", "0.026", "0.074", "linear", "softmax"):
        assert text in page(folder)
        assert text in made.text
    assert page(folder).count("data:image/png;base64,") == 2
    assert "src=" not in page(folder).replace('src="data:', "")
    assert str(folder / "report.html") in made.text


def test_a_report_made_again_is_the_same(folder):
    write(folder)
    report.make(folder)
    files = [folder / "report.html", *(folder / "figure").iterdir()]
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
    assert len(names) == 4
    assert all(re.fullmatch(r"[\w.+=-]+", name) for name in names)
    assert f"retrieval_{task}" in page(folder)


def test_equal_file_names_are_made_different(folder):
    write(folder, task="a/b")
    write(folder, task="a b", seed=1)
    assert report.make(folder).failed == []
    assert len(list((folder / "figure").iterdir())) == 8


def test_names_are_escaped(folder):
    write(folder, task="<b>&x</b>", state="finished")
    write(folder, task="copying", state="failed", error="<script>")
    report.make(folder)
    assert "&lt;b&gt;&amp;x&lt;/b&gt;" in page(folder)
    assert "&lt;script&gt;" in page(folder)
    assert not re.search("<b>|<script>", page(folder))


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


def test_a_folder_without_results(folder):
    write(folder, state="failed")
    with pytest.raises(folders.ForeignFolder, match="no finished run yet"):
        report.make(folder)


def test_a_single_seed_has_no_interval(folder):
    write(folder)
    assert "over seeds" not in report.make(folder).text
    write(folder, seed=1)
    assert "mean [range] over seeds" in report.make(folder).text
