"""`recall-lab status`: states, progress, time left and sizes, read from the files of a sweep's folder."""

import re
import signal
import time
from pathlib import Path

import pytest
from command_line import TINY, background, recall, run_folders, shell
from filelock import FileLock

from recall_lab import files, folders, overview
from recall_lab.cli.status import status
from recall_lab.overview import Entry
from recall_lab.sweep import Sweep

pytestmark = pytest.mark.usefixtures("empty_folder")

PARENT = Path("outputs/main")


def fabricate(name: str, state: str, seed: int = 0, **facts: object) -> Path:
    """A run's folder with a status, as a run leaves it."""
    run = PARENT / name
    run.mkdir(parents=True)
    (PARENT / folders.MARK).touch()
    folders.write_config(run, {"choice": {"mixer": "softmax", "task": "mqar"}, "seed": seed})
    more = {"format": folders.FORMAT, "state": state, "started": name, "seconds": 10.0}
    files.write_json(run / "status.json", more | facts)
    (run / "rows.json").write_text("[]")
    (run / ".lock").touch()
    return run


def test_one_line_for_each_run_and_totals():
    going = {"phase": "training", "done": 50, "total": 200, "step": 50, "accuracy": 0.25, "left": 30.0}
    run = fabricate("a", "running", 0, **going)
    fabricate("b", "running", 1, **going)
    fabricate("c", "finished", 2, accuracy=0.5, phase="test", done=1, total=2, seconds=100.0)
    fabricate("d", "failed", 3)
    fabricate("e", "interrupted", 4, phase="test", done=1, total=3)
    files.write_text(fabricate("f", "finished", 5) / "status.json", "{")
    sweep = Sweep(PARENT, "other")
    sweep.begin()
    sweep.plan({"c": "softmax on mqar, seed 2", "g": "softmax on mqar, seed 6"})
    with FileLock(run / ".lock"):
        *lines, total = status("outputs/main").splitlines()
    found = {re.split(r"  +", line)[0]: re.split(r"  +", line)[1:-1] for line in lines}
    assert found == {
        "f": ["softmax on mqar, seed 5", "interrupted"],
        "a": ["softmax on mqar, seed 0", "running", "step 50 of 200", "accuracy 0.250", "30 s left"],
        "b": ["softmax on mqar, seed 1", "interrupted", "step 50 of 200", "accuracy 0.250"],
        "c": ["softmax on mqar, seed 2", "done", "accuracy 0.500"],
        "d": ["softmax on mqar, seed 3", "failed"],
        "e": ["softmax on mqar, seed 4", "interrupted", "test cell 1 of 3"],
        "g": ["softmax on mqar, seed 6", "new"],
    }
    # 30 s of the running one, twice 90 s of the interrupted ones that took 10 s, 100 s of the damaged and the new one
    words = r"7 runs: 1 running, 1 done, 1 failed, 3 interrupted, 1 new; time left: 7 min; [\d.]+ k?B on disk"
    assert re.fullmatch(words, total)
    sweep.end()


def test_the_time_left_is_shared_by_the_runs_that_go_on_at_a_time():
    done = [Entry("a", "x on t, seed 0", "done", seconds=8.0), Entry("b", "y on t, seed 0", "done", seconds=20.0)]
    going = [Entry("c", "x on t, seed 1", "running", left=4.0), Entry("d", "x on t, seed 2", "running", left=6.0)]
    new = [Entry("e", "y on t, seed 1", "new"), Entry("f", "z on t, seed 1", "new")]
    assert overview.time_left([*done, *going, *new]) == (4 + 6 + 20 + 14) / 2
    assert overview.time_left([*going, *new]) is None
    assert overview.time_left(going) == 5
    assert overview.time_left([Entry("c", "", "running")]) is None
    assert overview.totals([]) == "no runs yet"
    assert overview.totals(going) == "2 running; time left: 5 s"


def test_sizes_in_words(tmp_path):
    assert [overview.bytes_in_words(n) for n in (0, 999, 1500, 45e3, 2.34e6, 5e9, 5e12)] == [
        "0 B", "999 B", "1.5 kB", "45 kB", "2.3 MB", "5.0 GB", "5000.0 GB",
    ]  # fmt: skip
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_bytes(b"12345")
    (tmp_path / "c").write_bytes(b"12")
    assert overview.size(tmp_path) == 7


def test_a_process_that_only_looks_does_not_make_a_run_busy():
    run = fabricate("a", "running")
    assert not folders.busy(run)
    with folders.locked(run):
        assert folders.busy(run)
        with pytest.raises(folders.Busy), folders.locked(run, patience=0):
            pass
    assert not folders.busy(run)


def test_a_folder_of_others_is_refused():
    done = shell("status", ".")
    assert done.returncode == 2
    assert done.stderr == "recall-lab: . was not written by recall-lab run\n"


def test_the_accuracy_of_a_finished_run():
    assert recall(*TINY) == 0
    (run,) = run_folders("main")
    (found,) = overview.entries(PARENT)
    assert (found.state, found.accuracy) == ("done", files.read_json(run / "curve.json")[-1]["accuracy"])
    assert found.left is None
    assert found.progress == ""


@pytest.mark.slow
def test_progress_moves_while_a_run_goes_on():
    """Before the first validation too; afterwards the run counts as interrupted, killed or not."""
    some = ["train.steps=100000", "train.validate_every=100000", "name=main"]
    with background("run", *TINY, *some, slowed=True) as process:
        seen: set[int] = set()
        for _ in range(600):
            found = overview.entries(PARENT) if (PARENT / folders.MARK).exists() else []
            seen |= {each.done for each in found if each.state == "running" and each.left is not None}
            if len(seen) >= 3:
                break
            time.sleep(0.2)
        assert len(seen) >= 3
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        (found,) = overview.entries(PARENT)
        assert found.state == "interrupted"
