"""Several commands on one folder: every run is done once."""

import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import SERIAL, TINY, background, command, recall, rows, run_folders, started, states

from recall_lab import files, folders
from recall_lab.cli import plan
from recall_lab.folders import add_command, commands
from recall_lab.sweep import Sweep

pytestmark = pytest.mark.usefixtures("empty_folder")

SOME = ["train.steps=400", "train.validate_every=20", "train.solved=null"]
SWEEP = ["run", "-m", *TINY, *SOME, "mixer=softmax,linear", "seed=0,1", "hydra.launcher.n_jobs=2"]
"""Four runs of some seconds."""


def undisturbed() -> dict[str, str]:
    """The rows of the same sweep, one run after the other."""
    words = [word for word in SWEEP[1:] if "n_jobs" not in word]
    assert recall(*words, SERIAL, "name=alone") == 0
    return rows("alone")


@pytest.mark.parametrize("words", [[], ["-m", SERIAL]], ids=["run", "sweep"])
@pytest.mark.parametrize("state", ["finished", "running"])
def test_two_processes_never_work_on_one_run(words, state, capsys, monkeypatch):
    """A run of another process is left to it; if that ends without having finished the run, it is taken over."""
    from filelock import FileLock

    from recall_lab import sweep

    assert recall(*TINY) == 0
    (folder,) = run_folders("main")
    facts = files.read_json(folder / "status.json")
    files.write_json(folder / "status.json", facts | {"state": "running"})
    before = (folder / "status.json").read_text()
    lock = FileLock(folder / ".lock")

    def other_process_ends(seconds):
        assert (folder / "status.json").read_text() == before
        files.write_json(folder / "status.json", facts | {"state": state})
        lock.release()

    monkeypatch.setattr(sweep, "time", SimpleNamespace(sleep=other_process_ends))
    capsys.readouterr()
    with lock:
        assert recall(*words, *TINY) == 0
    printed = capsys.readouterr()
    skipped, waiting, end, *_ = printed.out.splitlines()
    assert "another process is working on it" in skipped
    assert waiting == "waiting   for other processes to end their runs: 1"
    assert end.startswith("found     " if state == "finished" else "finished  ")
    assert printed.err == ""
    assert states("main") == ["finished"]


def test_a_failed_run_is_not_repeated_while_others_are_waited_for():
    named = {"choice": {"mixer": "a", "task": "b"}}
    jobs = [plan.Job((f"seed={seed}",), {"seed": seed, **named}, "failed") for seed in (0, 1, 1)]
    Path("main").mkdir()
    sweep = Sweep(Path("main"), "command")
    sweep.begin()
    assert plan.start(jobs, sweep) == [("seed=0",), ("seed=1",)]
    for job, event in zip(jobs, ("failed", "skipped"), strict=False):
        sweep.note(folders.identity(job.settings), event)
    assert plan.start(jobs, sweep) == [("seed=1",)]
    sweep.end()


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 3])
def test_commands_on_one_folder_share_the_runs(number):
    """Every run is done once, and every command ends with all of them finished."""
    processes = [subprocess.Popen(command(*SWEEP, "name=shared"), stderr=subprocess.PIPE, text=True)
                 for _ in range(number)]  # fmt: skip
    for process in processes:
        _, error = process.communicate(timeout=600)
        assert process.returncode == 0, error
    assert states("shared") == ["finished"] * 4
    for run in run_folders("shared"):
        assert len(folders.status(run)["legs"]) == 1
        assert (run / "run.log").read_text().count("INFO finished") == 1
    assert rows("shared") == undisturbed()
    assert not list(Path("outputs/shared").glob(".sweep-*"))


@pytest.mark.slow
def test_processes_that_stand_still_lose_nothing():
    """Command and workers are stopped (as by Ctrl-Z) for longer than any period; another command waits meanwhile."""
    with background(*SWEEP, "name=still") as process:
        started(process, "still", runs=2)
        os.killpg(process.pid, signal.SIGSTOP)
        with background(*SWEEP, "name=still") as other:
            time.sleep(8)
            assert process.poll() is other.poll() is None
            os.killpg(process.pid, signal.SIGCONT)
            assert process.wait(timeout=300) == 0, process.stderr.read()
            assert other.wait(timeout=300) == 0, other.stderr.read()
    assert states("still") == ["finished"] * 4
    assert {len(folders.status(run)["legs"]) for run in run_folders("still")} == {1}
    assert rows("still") == undisturbed()


@pytest.mark.slow
def test_commands_of_different_experiments_in_one_folder():
    """Each does its own runs; the report of the one that ends last holds all of them."""
    other = [word for word in SWEEP if not word.startswith("mixer")] + ["mixer=window,delta_rule"]
    words = ["name=two", "report=true"]
    with background(*SWEEP, *words) as one, background(*other, *words) as two:
        for process in (one, two):
            assert process.wait(timeout=300) == 0, process.stderr.read()
    assert states("two") == ["finished"] * 8
    assert len(commands(Path("outputs/two"))) == 2
    report = Path("outputs/two/report.html").read_text()
    assert all(name in report for name in ("softmax", "linear", "window", "delta_rule"))


def test_commands_that_start_together_are_all_kept(tmp_path):
    """Each reads the list and writes it; a process in between would be lost."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: add_command(tmp_path, f"command {number}"), range(8)))
    assert {each["command"] for each in commands(tmp_path)} == {f"command {number}" for number in range(8)}
