"""`recall-lab probe -m`: every combination of values on every finished run, once."""

from collections import Counter
from pathlib import Path

import pytest
from command_line import SERIAL, TINY, recall, run_folders, run_probe

from recall_lab import checkpoint, files, folders, report, results

RUNS = [*TINY, "name=grid", SERIAL, "train.steps=3"]
GRID = ["mixer=window,top_k", "mixer.budget=2,4", "test.sequences=2"]


@pytest.fixture
def calls(empty_folder, no_figures, monkeypatch) -> Counter[str]:
    """How often weights were loaded and the report was made."""
    counted: Counter[str] = Counter()
    load, make = checkpoint.load, report.make

    def counting_load(path, device):
        counted["loaded"] += 1
        return load(path, device)

    def counting_make(folder):
        counted["reported"] += 1
        return make(folder)

    monkeypatch.setattr(checkpoint, "load", counting_load)
    monkeypatch.setattr(report, "make", counting_make)
    return counted


def written(name: str = "grid") -> dict[Path, str]:
    return {path: path.read_text("utf-8") for path in Path("outputs", name).glob("*/probe-*.json")}


@pytest.mark.slow
def test_every_combination_is_measured_once(calls, capsys):
    assert recall("-m", *RUNS, "mixer=softmax", "seed=0,1") == 0
    calls.clear()
    assert run_probe("-m", "outputs/grid", *GRID) == 0
    assert calls == {"loaded": 2, "reported": 1}
    assert len(written()) == 8
    table = results.collect(Path("outputs/grid"))
    scores = table[(table["metric"] == "accuracy") & table["trained_as"].notna()]
    assert set(scores.groupby(["mixer", "mixer.budget"])["run"].nunique()) == {2}
    assert folders.commands(Path("outputs/grid"))[-1]["command"] == f"recall-lab probe -m outputs/grid {' '.join(GRID)}"

    # Each is what the command for it alone would have written.
    before = written()
    wanted = {"mixer": "top_k", "mixer.budget": 4}
    path = next(path for path in sorted(before) if wanted.items() <= files.read_json(path)["columns"].items())
    path.unlink()
    assert run_probe(str(path.parent), "mixer=top_k", "mixer.budget=4", "test.sequences=2") == 0
    assert written() == before

    # Again: nothing is left to do. What a probe had failed in is repeated, alone, and needs one model.
    calls.clear()
    capsys.readouterr()
    assert run_probe("-m", "outputs/grid", *GRID, "skip_invalid=false") == 0
    assert calls == {"reported": 1}
    assert capsys.readouterr().out.count("found     ") == 8
    files.write_json(path, files.read_json(path) | {"missing": ["probe x failed"], "rows": []})
    assert run_probe("-m", "outputs/grid", *GRID) == 0
    assert calls["loaded"] == 1
    assert written() == before

    # A finished combination needs no weights, a new one does.
    (path.parent / "checkpoint.pt").unlink()
    assert run_probe("-m", "outputs/grid", *GRID) == 0
    assert run_probe("-m", "outputs/grid", "mixer=window", "mixer.budget=2,3", "test.sequences=2") == 2
    assert f"{path.parent.name} mixer.budget=3: " in capsys.readouterr().err
    assert written() == before


def test_impossible_combinations_are_named_before_anything_runs(calls, capsys):
    assert recall("-m", *RUNS, "mixer=softmax,delta_rule") == 0
    known = {folders.read_config(path)["choice"]["mixer"]: path.name for path in run_folders("grid")}
    commands = folders.commands(Path("outputs/grid"))
    capsys.readouterr()
    calls.clear()
    words = ["mixer=window", "mixer.budget=-1,2", "test.sequences=2"]
    assert run_probe("-m", "outputs/grid", *words) == 2
    *named, last = capsys.readouterr().err.splitlines()
    assert last.endswith("nothing was started, 3 of 4 are impossible; skip_invalid=true runs the others")
    assert sorted(line.split(": ")[1] for line in named) == sorted(
        [f"{known['softmax']} mixer.budget=-1", *(f"{known['delta_rule']} mixer.budget={n}" for n in (-1, 2))]
    )
    assert any("budget" in line.split(": ", 2)[2] for line in named)
    assert any("window has other weights than the trained mixer" in line for line in named)
    assert (written(), dict(calls), folders.commands(Path("outputs/grid"))) == ({}, {}, commands)
    assert run_probe("-m", "outputs/grid", *words, "skip_invalid=true") == 0
    assert [path.parent.name for path in written()] == [known["softmax"]]

    # Cells that the task does not have, and settings given twice.
    run = f"outputs/grid/{known['softmax']}"
    assert run_probe("-m", run, "probe=retrieval", "test.cells=[{length: 8}],[{length: 1}]") == 2
    assert "test.cells=[{length:1}]" in capsys.readouterr().err
    assert run_probe("-m", run, "mixer=window", "mixer.budget=2", "mixer.budget=3,4") == 2
    assert "mixer.budget is given twice" in capsys.readouterr().err
    assert run_probe(run, "mixer=window", "skip_invalid=7") == 2
    assert "skip_invalid=7: must be true or false" in capsys.readouterr().err


def test_other_cells_have_a_file_of_their_own(calls):
    assert recall(*RUNS, "mixer=softmax") == 0
    words = ["probe=[retrieval],[retrieval,dynamic_access]", "test.cells=[{length: 8}],[{length: 12}]"]
    more = ["probe.retrieval.by=[]", "test.probe_sequences=2"]
    assert run_probe("-m", "outputs/grid", *words, *more) == 0
    found = [files.read_json(path)["rows"] for path in written()]
    assert sorted({(row["task.length"], len({row["probe"] for row in rows})) for rows in found for row in rows}) == [
        (8, 1), (8, 2), (12, 1), (12, 2),
    ]  # fmt: skip
    assert calls["loaded"] == 1
