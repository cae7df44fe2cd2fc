"""One report of several sweeps, as of several machines."""

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml
from sweep_folder import write

import recall_lab as rl
from recall_lab import __main__ as main
from recall_lab import folders, report, results


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("recall_lab.page.pictures", lambda *_: [])


def called(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main._main(["report", *words])
    return int(ended.value.code or 0)


def scored(run: Path, value: float) -> Path:
    """The run with this value of all its metrics."""
    content = json.loads((run / "rows.json").read_text())
    for row in content["rows"]:
        row["value"] = value
    (run / "rows.json").write_text(json.dumps(content))
    return run


def test_runs_of_several_sweeps_come_into_one_table(capsys):
    """A seed measured elsewhere is a replicate."""
    one, two = Path("outputs/one"), Path("outputs/two")
    write(one, seed=0)
    write(two, seed=1)
    write(two, "softmax", seed=1)
    folders.add_command(one, "recall-lab run one", "About one.")
    folders.add_command(two, "recall-lab run two", "About two.")
    before = sorted(Path("outputs").rglob("*"))
    assert called("outputs/one", "outputs/two") == 0
    made = Path("outputs/one+two")
    table = pd.read_parquet(made / "table.parquet")
    assert table.groupby("mixer")["run"].nunique().to_dict() == {"linear": 2, "softmax": 1}
    assert len(table) == 3 * 9
    text = (made / "report.md").read_text("utf-8")
    assert text.startswith("# one+two\n")
    assert "recall-lab run one\nrecall-lab run two\nrecall-lab report outputs/one outputs/two\n" in text
    assert "About one." in text
    assert "About two." in text
    assert "mqar: softmax has 1 of 2 seeds" in text
    assert "mean [range] over seeds" in capsys.readouterr().out
    assert [path for path in sorted(Path("outputs").rglob("*")) if made not in (path, *path.parents)] == before
    loaded = rl.load("outputs/one", two)
    again = rl.load(made)  # it has no runs of its own, but a table
    assert set(again) == set(loaded)
    assert all((again[name] == loaded[name]).all() for name in ("run", "value", "mixer.heads", "seconds"))
    assert len(loaded) == len(table)

    # Again, into the same folder; and elsewhere.
    assert called("outputs/one", "outputs/two", "--to", "outputs/one+two") == 0
    assert called("outputs/one", "--to", "elsewhere/both", "--csv") == 0
    assert set(pd.read_parquet("elsewhere/both/table.parquet")["mixer"]) == {"linear"}
    assert len(pd.read_csv("elsewhere/both/table.csv")) == 9
    assert len(pd.read_csv("elsewhere/both/settings.csv")) == 1
    assert called("outputs/one", "outputs/one/") == 0
    assert (one / "report.md").exists()


@pytest.mark.parametrize("newer", ["one", "two"])
def test_a_run_in_two_folders_counts_once(newer):
    """Whichever folder is named first, the newer run is used, and the other is named."""
    for name in ("one", "two"):
        run = scored(write(Path(name), started=f"202{6 if name == newer else 5}-01-01"), 1.0 if name == newer else 0.0)
        (run / "curve.json").write_text(json.dumps([{"step": 1, "accuracy": 1.0 if name == newer else 0.0}]))
    older = {"one": "two", "two": "one"}[newer]
    for sweeps in ([Path("one"), Path("two")], [Path("two"), Path("one")]):
        table = results.collect(*sweeps)
        assert len(table) == 9
        assert set(table["value"]) == {1.0}
        made = report.make(Path("both"), sweeps)
        assert (
            f"{older}/linearmqar-1-0 is repeated by {newer}/linearmqar-1-0 (same settings), which is used" in made.text
        )


def test_the_curve_is_that_of_the_run_that_is_used(monkeypatch):
    drawn = []
    monkeypatch.setattr("recall_lab.page.pictures", lambda folder, chosen, *_: drawn.append(chosen) or [])
    for name, year, accuracy in (("one", 2026, 0.75), ("two", 2025, 0.25)):
        run = write(Path(name), started=f"{year}-01-01")
        (run / "curve.json").write_text(json.dumps([{"step": 1, "accuracy": accuracy}]))
    report.make(Path("both"), [Path("one"), Path("two")])
    curves = drawn[0][drawn[0]["metric"] == "curve_accuracy"]
    assert curves["value"].tolist() == [0.75]


def test_a_run_that_is_finished_in_one_folder_is_not_missing():
    """Even if it was started later elsewhere; one that is finished nowhere is named once."""
    write(Path("one"), started="2025-01-01")
    write(Path("two"), state="running", started="2026-01-01")
    for name in ("one", "two"):
        write(Path(name), "softmax", state="failed", error=f"broke in {name}")
    found = folders.merged([Path("one"), Path("two")])
    assert sorted((run.name, run.status["state"]) for run in found) == [
        ("linearmqar-1-0", "finished"), ("softmaxmqar-1-0", "failed"),
    ]  # fmt: skip
    made = report.make(Path("both"), [Path("one"), Path("two")])
    assert made.text.count("missing or replaced") == 1
    assert "linear on mqar, seed 0 is running" not in made.text


def test_another_machine_is_a_circumstance():
    """The same settings with another number of threads are another run of the same name, of which the newer counts."""
    for name, threads in (("one", 1), ("two", 2)):
        run = write(Path(name), started=f"202{threads}-01-01")
        config = yaml.safe_load((run / "config.yaml").read_text()) | {"threads": threads}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        run.rename(run.with_name(f"run{threads}"))
    (table,) = (part for _, part in results.collect(Path("two"), Path("one")).groupby("series"))
    assert set(table["run"]) == {"run2"}


def test_what_is_selected_in_one_of_them_is_selected_in_all():
    for name, select in (("one", ["train.lr"]), ("two", ["train.clip", "train.lr"])):
        write(Path(name))
        folders.claim(Path(name), select)
    assert results.selected_settings(Path("one"), Path("two")) == ("train.lr", "train.clip")


def test_folders_that_cannot_be_used_are_refused(capsys):
    write(Path("one"))
    write(Path("two"), seed=1)
    folders.claim(Path("empty"))
    Path("foreign").mkdir()
    Path("foreign/mine.txt").write_text("mine")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for words, message in (
        (["one", "two", "--to", "two"], "two holds runs of its own; choose another folder with --to"),
        (["one", "two", "--to", "foreign"], "foreign holds other files"),
        (["one", "foreign"], "foreign was not written by recall-lab run"),
        (["one", "nowhere"], "nowhere was not written by recall-lab run"),
        (["one", "empty"], "empty has no runs"),
    ):
        assert called(*words) == 2
        printed = capsys.readouterr().err
        assert message in printed
        assert printed.count("\n") == 1
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    write(Path("three"), seed=2, state="failed")
    write(Path("four"), seed=3, state="failed")
    assert called("three", "four") == 2
    assert "three, four has no finished run yet: 2 failed" in capsys.readouterr().err
    assert not Path("three+four").exists()
