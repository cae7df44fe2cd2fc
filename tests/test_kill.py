"""Nothing is lost: damaged, removed and half-written files, copied folders, a clock set back, SIGTERM."""

import re
import shutil
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from command_line import SERIAL, TINY, recall, rows, run_folders, states
from conftest import CPU

from recall_lab import checkpoint, files, folders, report, runner
from recall_lab.optimization import Stepper
from recall_lab.sweep import Sweep

pytestmark = pytest.mark.usefixtures("empty_folder")


def interrupt_after_five_steps(monkeypatch):
    """Does a tiny run that Ctrl-C ends; a later command trains on."""
    step = Stepper.step

    def interrupted(self, value, number):
        if number == 5:
            raise KeyboardInterrupt
        return step(self, value, number)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "step", interrupted)
        assert recall(*TINY) == 130


def test_a_checkpoint_of_another_version_is_deleted_and_the_run_starts_again(monkeypatch):
    assert recall(*TINY, "name=alone") == 0
    for change in (lambda saved: saved.pop("step"), lambda saved: saved.update(ema={}),
                   lambda saved: saved["model"].popitem()):  # fmt: skip
        interrupt_after_five_steps(monkeypatch)
        (run,) = run_folders("main")
        saved = checkpoint.load(run / "checkpoint.pt", CPU)
        change(saved)
        checkpoint.write(run / "checkpoint.pt", saved)
        assert recall(*TINY) == 0
        assert "another version wrote it; it is deleted, and training starts" in (run / "run.log").read_text()
        assert rows("main") == rows("alone")
        shutil.rmtree("outputs/main")


def test_a_folder_that_is_removed_while_its_runs_go_on_fails_visibly(monkeypatch, capsys):
    step = Stepper.step

    def removing(self, value, number):
        if number == 2:
            shutil.rmtree("outputs/main")
        return step(self, value, number)

    monkeypatch.setattr(Stepper, "step", removing)
    for words in ([], ["-m", SERIAL, "seed=0,1"]):
        assert recall(*TINY, *words) == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines
        assert all(re.match(r"recall-lab: .*(No such file or directory|was not written by)", line) for line in lines), (
            lines
        )
        assert not Path("outputs/main").exists()


def test_a_copy_of_a_folder_in_use_is_a_folder_of_its_own(monkeypatch):
    """As of cp -r to another machine while a run goes on: the copied journal, lock and half-written file do no harm."""
    assert recall(*TINY, "name=alone") == 0
    step = Stepper.step

    def copying(self, value, number):
        if number == 4:  # there is a checkpoint after three steps
            (run,) = run_folders("main")
            (run / ".status.json.4711").write_text("half")
            shutil.copytree("outputs/main", "elsewhere/main")
        return step(self, value, number)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "step", copying)
        assert recall(*TINY) == 0
    (copied,) = Path("elsewhere/main").glob("*/status.json")
    assert files.read_json(copied)["state"] == "running"
    assert len(list(Path("elsewhere/main").glob(".sweep-*"))) == 1
    assert recall(*TINY, "root=elsewhere") == 0
    facts = folders.status(copied.parent)
    assert (facts["state"], len(facts["legs"])) == ("finished", 2)
    assert (copied.parent / "rows.json").read_text() == rows("alone")[copied.parent.name]
    assert not [*Path("elsewhere/main").glob(".sweep-*"), *copied.parent.glob(".*.[0-9]*")]


@pytest.mark.parametrize("name", ["checkpoint.pt", "status.json"])
def test_a_run_with_a_file_cut_short_is_done_again(name, monkeypatch):
    """Interrupted after five steps, with a checkpoint after three."""
    assert recall(*TINY, "name=alone") == 0
    interrupt_after_five_steps(monkeypatch)
    (run,) = run_folders("main")
    (run / name).write_bytes((run / name).read_bytes()[:50])
    assert recall(*TINY) == 0
    assert states("main") == ["finished"]
    assert rows("main") == rows("alone")
    assert ("training starts from the beginning" in (run / "run.log").read_text()) == (name == "checkpoint.pt")


def test_a_finished_run_whose_rows_are_cut_short_is_done_again(capsys):
    assert recall("-m", *TINY, SERIAL, "seed=0,1") == 0
    before = rows("main")
    run = run_folders("main")[0]
    (run / "rows.json").write_text(before[run.name][:100])
    assert recall("-m", *TINY, SERIAL, "seed=0,1") == 0
    assert rows("main") == before
    assert capsys.readouterr().out.count("found ") == 1


def test_what_a_killed_process_has_half_written_is_removed():
    assert recall(*TINY) == 0
    (run,) = run_folders("main")
    (run / ".checkpoint.pt.4711").write_bytes(b"half")
    files.write_json(run / "status.json", files.read_json(run / "status.json") | {"state": "running"})
    assert recall(*TINY) == 0
    assert not list(run.glob(".*.[0-9]*"))
    assert (run / ".lock").exists()


def test_a_clock_that_is_set_back_loses_nothing(monkeypatch):
    clock = iter(datetime(2030, 1, 1, tzinfo=UTC) - timedelta(days=days) for days in range(100))
    monkeypatch.setattr(runner, "now", lambda: next(clock).isoformat(timespec="milliseconds"))
    interrupt_after_five_steps(monkeypatch)
    assert recall(*TINY) == 0
    assert recall(*TINY, "seed=1") == 0
    assert recall(*TINY) == 0
    assert states("main") == ["finished"] * 2
    facts = [folders.status(run) for run in run_folders("main")]
    assert sorted(len(each["legs"]) for each in facts) == [1, 2]
    assert all(each["seconds"] > 0 and each["started"] == each["legs"][0]["started"] for each in facts)


def test_events_that_a_full_disk_refuses_are_kept_by_the_process(monkeypatch):
    Path("sweep").mkdir()
    sweep = Sweep(Path("sweep"), "command")
    sweep.begin()
    sweep.note("a", "started")
    with (sweep.private / "journal.jsonl").open("a") as journal:
        journal.write('{"run": "a", "ev')  # all that a full disk took

    def full(*arguments, **more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        sweep.note("a", "failed", "no space")
    assert sweep.last()["a"] == {"run": "a", "event": "failed", "text": "no space", "line": ""}
    sweep.end()
    assert sweep.events() == []


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["training", "validation", "test", "report"])
def test_sigterm_in_every_phase(phase, monkeypatch, capsys):
    """The command ends with 143, says how to go on, and the same command finishes with the same results."""
    assert recall(*TINY, "name=alone") == 0
    from recall_lab import measuring, train

    module, name = {
        "training": (train, "loss"),
        "validation": (train, "_validate"),
        "test": (measuring, "cell_columns"),
        "report": (report, "make"),
    }[phase]
    work = getattr(module, name)

    def terminated(*arguments, **more):
        if not sent:
            sent.append(1)
            signal.raise_signal(signal.SIGTERM)
        return work(*arguments, **more)

    sent: list[int] = []
    monkeypatch.setattr(module, name, terminated)
    words = [word for word in TINY if word != "report=false"] if phase == "report" else TINY
    assert recall(*words) == 143
    assert re.search(r"recall-lab: interrupted; the same command resumes the runs\n$", capsys.readouterr().err)
    assert states("main") == ["finished" if phase == "report" else "interrupted"]
    assert not list(Path("outputs/main").glob(".sweep-*"))
    assert recall(*words) == 0
    assert rows("main") == rows("alone")
