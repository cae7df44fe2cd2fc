"""One attempt at a run: what it writes, which signals stop it, and what the processes of a sweep know of each other."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from command_line import TINY

from recall_lab import files, folders, machine, provenance, runner
from recall_lab.cli.base import compose, resolved
from recall_lab.optimization import Stepper
from recall_lab.sweep import ENVIRONMENT, Sweep

pytestmark = pytest.mark.usefixtures("empty_folder")


def settings(*overrides: str) -> dict:
    """The settings of a tiny run."""
    return resolved(compose([*TINY, *overrides]), {"task": "mqar", "mixer": "softmax"})


@pytest.fixture
def parent() -> Path:
    """A sweep's folder."""
    folder = Path("sweep")
    folders.claim(folder)
    return folder


def test_a_run_gives_its_validation_loss_and_notes_how_long_it_took(parent, capsys):
    config = settings()
    loss = runner.execute(config, parent)
    run = parent / folders.identity(config)
    assert loss == files.read_json(run / "curve.json")[-1]["loss"]
    status = folders.status(run)
    (leg,) = status["legs"]
    assert status["seconds"] == leg["seconds"] == round(leg["seconds"], 3) > 0
    assert status["started"] == leg["started"]
    assert (status["loss"], status["missing"], status["device"]) == (loss, [], "cpu")
    for line in (run / "run.log").read_text().splitlines():
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING) \S", line)
    assert capsys.readouterr().out.startswith(f"finished  {run.name} softmax on mqar, seed 0: ")


def test_a_run_of_another_revision_is_found_and_that_is_printed(parent, capsys, monkeypatch):
    config = settings("train.steps=1", "train.validate_every=1")
    loss = runner.execute(config, parent)
    capsys.readouterr()
    assert runner.execute(config, parent) == loss
    assert "revision" not in capsys.readouterr().out
    monkeypatch.setattr(provenance, "revision", lambda: "another")
    assert runner.execute(config, parent) == loss
    assert ", made at another revision (" in capsys.readouterr().out


def test_ctrl_c_saves_a_stop_by_the_sweep_is_a_failure_and_an_error_is_printed_beside_others(
    parent, capsys, monkeypatch
):
    """A run is left as interrupted by both kinds of stop; only the one of this process goes on to the caller."""
    step = Stepper.step
    for action, number in ((lambda: signal.raise_signal(signal.SIGTERM), signal.SIGTERM), (ctrl_c, signal.SIGINT)):
        monkeypatch.setattr(Stepper, "step", lambda *arguments, action=action: action() or step(*arguments))
        with pytest.raises(runner.Stopped) as stopped:
            runner.execute(settings(), parent)
        assert stopped.value.args == (number,)
        assert folders.status(parent / folders.identity(settings()))["state"] == "interrupted"
    sweep = Sweep(parent, "command")
    sweep.begin()
    monkeypatch.setenv(ENVIRONMENT, "command")
    monkeypatch.setattr(Stepper, "step", lambda *arguments: sweep.ask_to_stop(0) or step(*arguments))
    assert runner.execute(settings(), parent) == runner.FAILED
    assert sweep.last()[folders.identity(settings())]["event"] == "interrupted"
    sweep.end()
    for job, printed in ((None, 0), (3, 1)):
        assert runner.execute(settings("task.pairs=9"), parent, job) == runner.FAILED
        assert capsys.readouterr().out.count("failed    ") == printed


def ctrl_c() -> None:
    raise KeyboardInterrupt


def test_the_order_of_the_settings_is_no_part_of_the_identity():
    config = settings()
    assert folders.identity(dict(reversed(config.items()))) == folders.identity(config)


def test_the_first_signal_asks_to_stop_and_the_second_stops(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with runner.stop_signal(Sweep(tmp_path, "")) as stop:
        assert not stop()
        signal.raise_signal(signal.SIGTERM)
        assert stop()
        assert stop.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("adopted_by", [1, 10**9])
def test_a_worker_whose_parent_is_gone_stops(adopted_by, tmp_path, monkeypatch):
    stop = runner.StopSignal(Sweep(tmp_path, ""))
    command = ("0", "999999999")  # process ids that sort before and after any other as words
    for pid in command:
        monkeypatch.setenv("RECALL_LAB_PID", pid)
        assert not stop()
    monkeypatch.setattr(os, "getppid", lambda: adopted_by)
    for pid in command:
        monkeypatch.setenv("RECALL_LAB_PID", pid)
        assert stop()
    monkeypatch.setenv("RECALL_LAB_PID", str(os.getpid()))  # the command itself may outlive the shell
    assert not stop()


def test_progress_is_noted_once_a_second_with_the_time_left(monkeypatch):
    """The first report of a phase is noted at once; the rate is that of the steps of this process."""
    clock = iter([10.0, 10.5, 11.0, 12.5, 13.0])
    monkeypatch.setattr(runner.time, "monotonic", lambda: next(clock))
    progress = runner.Progress()
    noted = [progress("training", step, 100) for step in (41, 42, 43, 46)]
    assert noted == [True, False, True, True]
    assert progress.facts == {"phase": "training", "done": 46, "total": 100, "step": 46, "left": 27.0}
    assert progress("test", 0, 3)
    assert progress.facts == {"phase": "test", "done": 0, "total": 3, "step": 46}


def test_one_command_starts_a_run_three_times_at_most(parent, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "command")
    sweep = Sweep(parent, "command")
    sweep.begin()
    third, fourth = (settings("train.steps=1", "train.validate_every=1", f"seed={seed}") for seed in (0, 1))
    for config in (third, third, fourth, fourth, fourth):
        sweep.note(folders.identity(config), "started")
    assert runner.execute(third, parent) < runner.FAILED
    assert runner.execute(fourth, parent) == runner.FAILED
    status = [folders.status(parent / folders.identity(config)) for config in (third, fourth)]
    assert [(facts["state"], facts["sweep"]) for facts in status] == [("finished", "command"), ("died", "command")]
    assert sweep.attempts(folders.identity(third)) == 3
    assert "its process was killed 3 times" in sweep.last()[folders.identity(fourth)]["text"]


def test_asking_to_stop_waits_until_the_runs_have_ended(tmp_path):
    sweep = Sweep(tmp_path, "command")
    sweep.begin()
    assert not sweep.asked_to_stop()
    sweep.note("run", "started")
    began = time.monotonic()
    sweep.ask_to_stop(patience=0.3)
    assert time.monotonic() - began >= 0.3
    assert sweep.unfinished() == ["run"]
    assert Sweep(tmp_path, "command").asked_to_stop()
    sweep.note("run", "interrupted")
    began = time.monotonic()
    sweep.ask_to_stop(patience=60)
    assert time.monotonic() - began < 30
    sweep.end()
    assert not sweep.asked_to_stop()
    assert sweep.events() == []


def test_a_run_that_another_process_has_is_busy_at_once(tmp_path):
    with folders.locked(tmp_path), pytest.raises(folders.Busy), folders.locked(tmp_path):
        pass
    with folders.locked(tmp_path):
        pass


def test_the_runs_of_a_sweep_are_dealt_to_the_gpus_in_turn(monkeypatch):
    """A run alone takes the current GPU, and a GPU that is named is used by all."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    found = [str(machine.prepare(device, 1, job=job)) for device in ("auto", "cuda") for job in (None, 0, 1, 2, 3)]
    assert found == ["cuda", "cuda:0", "cuda:1", "cuda:2", "cuda:0"] * 2
    assert str(machine.prepare("cuda:1", 1, job=2)) == "cuda:1"
    assert str(machine.prepare("cpu", 1, job=2)) == "cpu"


def test_determinism_is_a_setting():
    for wanted in (False, True):
        machine.prepare("cpu", 1, wanted)
        assert torch.are_deterministic_algorithms_enabled() is wanted
