"""Signals and killed processes: what is saved, and that a run is resumed exactly."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from command_line import LONG, TINY, background, recall, run_folders, started, states

from recall_lab import files, folders
from recall_lab.cli import run
from recall_lab.sweep import stopping

pytestmark = pytest.mark.usefixtures("empty_folder")


def finished_alone(*arguments: str) -> Path:
    """The folder of the same run without interruption."""
    assert recall(*TINY, *arguments, "name=alone") == 0
    return run_folders("alone")[0]


SLOW_ENOUGH = ["train.steps=3000", "train.validate_every=50", "train.solved=null"]
"""A run of some seconds, so that a signal arrives while it trains."""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_saves_a_checkpoint_from_which_the_run_is_resumed_exactly(number, code):
    some = ["train.steps=200", "train.validate_every=5", "train.solved=null"]
    with background("run", *TINY, *some, "name=cut", slowed=True) as process:
        started(process, "cut")
        os.kill(process.pid, number)
        process.wait(timeout=60)
    assert process.returncode == code
    (cut,) = run_folders("cut")
    first = folders.status(cut)
    assert first["state"] == "interrupted"
    assert "interrupted" in (cut / "run.log").read_text(encoding="utf-8")
    assert recall(*TINY, *some, "name=cut") == 0
    second = folders.status(cut)
    assert second["state"] == "finished"
    assert second["legs"][0]["started"] == first["started"] == second["started"]
    assert len(second["legs"]) == 2
    assert second["seconds"] >= files.read_json(cut / "curve.json")[-1]["seconds"]
    assert second["seconds"] >= first["seconds"] > 0
    alone = finished_alone(*some)
    assert (cut / "rows.json").read_text() == (alone / "rows.json").read_text()
    ours, theirs = (torch.load(run / "checkpoint.pt", weights_only=True)["model"] for run in (cut, alone))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_second_signal_ends_the_command_at_once_with_the_status_of_that_signal():
    old = {number: signal.getsignal(number) for number in stopping()}
    try:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt) as raised:
                run._stop_all(signal.SIGTERM, None)
            assert raised.value.args == (signal.SIGTERM,)
            with pytest.raises(KeyboardInterrupt) as raised:
                signal.raise_signal(signal.SIGTERM)
            assert raised.value.args == (signal.SIGTERM,)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def test_a_closed_terminal_stops_a_command_unless_it_is_to_be_ignored():
    """nohup ignores the signal."""
    old = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert stopping() == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert stopping() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, old)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_command_alone_stops_its_workers(number):
    with background("run", "-m", *TINY, *LONG, "seed=0,1", "hydra.launcher.n_jobs=2") as process:
        started(process, "long", runs=2)
        os.kill(process.pid, number)
        process.wait(timeout=90)
        printed = process.stderr.read()
    assert process.returncode == 128 + number
    assert printed == "recall-lab: interrupted; the same command resumes the runs\n"
    assert states("long") == ["interrupted"] * 2
    before = [(run / "checkpoint.pt").stat().st_mtime_ns for run in run_folders("long")]
    assert not list(Path("outputs/long").glob(".sweep-*"))
    assert [(run / "checkpoint.pt").stat().st_mtime_ns for run in run_folders("long")] == before


@pytest.mark.slow
def test_a_killed_worker_does_not_affect_other_runs(tmp_path):
    """After kill −9 of one of two workers, the same command still finishes every run."""
    with background("run", "-m", *TINY, *SLOW_ENOUGH, "seed=0,1,2,3", "hydra.launcher.n_jobs=2", "name=hit") as process:
        started(process, "hit", runs=2)
        workers = subprocess.check_output(["pgrep", "-P", str(process.pid), "-f", "runner import serve"], text=True)
        worker = workers.split()[0]
        os.kill(int(worker), signal.SIGKILL)
        process.wait(timeout=240)
        printed = process.stderr.read()
    assert process.returncode == 0, printed
    assert states("hit") == ["finished"] * 4
    assert sorted(len(folders.status(run)["legs"]) for run in run_folders("hit")) == [1, 1, 1, 2]
    alone = finished_alone(*SLOW_ENOUGH, "seed=0")
    assert (Path("outputs/hit") / alone.name / "rows.json").read_text() == (alone / "rows.json").read_text()
