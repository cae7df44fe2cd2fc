"""Nothing is lost or done twice: processes killed at random, damaged files, a full disk, several commands."""

import os
import random
import re
import signal
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import SERIAL, TINY, background, command, recall, rows, run_folders, states

from recall_lab import files, folders, report, runner
from recall_lab.cli import plan
from recall_lab.folders import add_command, commands
from recall_lab.optimization import Stepper
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


def workers_of(process: subprocess.Popen) -> list[int]:
    done = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "runner import serve"], capture_output=True, text=True, check=False
    )
    return [int(word) for word in done.stdout.split()]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "command", "both"])
def test_kill_at_random_moments(victim):
    """After several rounds the results are those of an undisturbed sweep, bit for bit."""
    rng = random.Random(victim)
    for _ in range(5):
        with background(*SWEEP, "name=hit") as process:
            limit = time.monotonic() + rng.uniform(2, 12)
            while time.monotonic() < limit and process.poll() is None:
                time.sleep(0.05)
            if victim in ("worker", "both"):
                for pid in workers_of(process)[: 1 if victim == "worker" else 9]:
                    os.kill(pid, signal.SIGKILL)
            if victim in ("command", "both") and process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            if victim == "worker":
                assert process.wait(timeout=300) == 0, process.stderr.read()
            elif process.poll() is None:
                process.wait(timeout=60)
            time.sleep(1)  # workers whose command is gone stop at their next step
    assert recall(*SWEEP[1:], "name=hit") == 0
    assert states("hit") == ["finished"] * 4
    assert rows("hit") == undisturbed()
    assert not list(Path("outputs/hit").rglob(".*.[0-9]*"))


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


def test_commands_that_start_together_are_all_kept(tmp_path):
    """Each reads the list and writes it; a process in between would be lost."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: add_command(tmp_path, f"command {number}"), range(8)))
    assert {each["command"] for each in commands(tmp_path)} == {f"command {number}" for number in range(8)}


@pytest.mark.slow
def test_a_full_disk_leaves_finished_runs_whole():
    """A tmpfs of 300 kB; where none can be mounted, the limit on the size of files stands for it (test_sweep.py)."""
    Path("outputs").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", "outputs"], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        code = recall("-m", *TINY, "seed=range(0,12)", "hydra.launcher.n_jobs=2", "model.d_model=32")
        assert code in (1, 2)
        whole = [run for run in run_folders("main") if folders.status(run)["state"] == "finished"]
        assert whole
        for run in whole:
            assert files.read_json(run / "rows.json")["rows"]
    finally:
        subprocess.run(["umount", "-l", "outputs"], check=True)


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
