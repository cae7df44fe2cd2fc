"""Sweeps: failed, killed, interrupted and concurrent runs."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from command_line import LONG, SERIAL, TINY, background, recall, run_folders, shell, started, states
from hydra.core.plugins import Plugins

from recall_lab import building, files, folders
from recall_lab.cli import run
from recall_lab.sweep import Sweep

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_one_failing_run_of_three(capsys, monkeypatch):
    """The others finish. The failed one is named, with its error, in its folder, the summary and the report."""
    monkeypatch.setattr(building, "check", lambda settings: None)  # nothing is refused before the start
    tiny = [word for word in TINY if not word.startswith("task.pairs")]
    assert recall("-m", *tiny, SERIAL, "task.pairs=2,9,3", "name=three", "report=true") == 1
    assert sorted(states("three")) == ["failed", "finished", "finished"]
    bad = next(f for f in run_folders("three") if folders.status(f)["state"] == "failed")
    assert "Traceback" in (bad / "run.log").read_text()
    printed = capsys.readouterr()
    line = [line for line in printed.err.splitlines() if str(bad) in line]
    assert len(line) == 1
    assert "a length of at least 36 (2 positions each), not 16" in line[0]
    assert f"missing or replaced: {bad.name}" in printed.out
    assert bad.name in Path("outputs/three/report.html").read_text()


def test_options_of_a_swept_group_that_the_default_lacks(capsys):
    """Hydra composes a configuration without the sweep first, with softmax, which has no such option."""
    swept = ["mixer=delta_rule,gated_delta", "mixer.allow_neg_eigval=true"]
    assert recall("-m", *TINY, SERIAL, *swept) == 0
    assert [folders.read_config(folder)["mixer"]["allow_neg_eigval"] for folder in run_folders("main")] == [True, True]
    words = ["task=a,b", "task.x=1", "+task.y=[1,2]", "task.z=", "~task.u", "task.v=1,2", "train.lr=1", "--config-dir"]
    assert run.with_options_swept(words) == [
        "task=a,b", "task.x=choice(1)", "+task.y=choice([1,2])", "task.z=choice('')", *words[4:]
    ]  # fmt: skip
    assert run.with_options_swept(["mixer=window", "mixer.budget=4"]) == ["mixer=window", "mixer.budget=4"]


def test_options_are_put_before_the_overrides():
    words = ["task=x", "--config-dir", "mine", "-m", "mixer=y"]
    assert run.options_first(words) == (["--config-dir", "mine", "-m"], ["task=x", "mixer=y"])


def test_finished_runs_of_a_sweep_are_not_launched(monkeypatch, capsys):
    assert recall("-m", *TINY, SERIAL, "seed=0,1") == 0
    launched = []

    def launch(self, jobs, initial_job_idx):
        launched.extend(jobs)
        return []

    launcher = Plugins.instance().class_name_to_class["hydra._internal.core_plugins.basic_launcher.BasicLauncher"]
    monkeypatch.setattr(launcher, "launch", launch)
    capsys.readouterr()
    assert recall("-m", *TINY, SERIAL, "seed=0,2,1", "hydra.sweeper.max_batch_size=1") == 0
    assert [[word for word in job if word.startswith("seed")] for job in launched] == [["seed=2"]]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["found"] * 2
    launched.clear()
    assert recall("-m", *TINY, SERIAL, "seed=0,1") == 0
    assert launched == []


def test_settings_that_only_the_launcher_knows(capsys):
    words = ["-m", *TINY, SERIAL, "data_seed=5,6", "seed=${hydra:job.num}"]
    assert recall(*words) == recall(*words) == 0
    made = [folders.read_config(folder) for folder in run_folders("main")]
    assert sorted((config["seed"], config["data_seed"]) for config in made) == [(0, 5), (1, 6)]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()].count("found") == 2


def test_the_journal_of_a_killed_command_is_removed_and_that_of_a_living_one_is_kept():
    assert recall(*TINY) == 0
    dead, living = (Sweep(Path("outputs/main"), name) for name in ("dead", "living"))
    living.begin()
    dead.private.mkdir()
    (dead.private / "alive").touch()
    assert recall(*TINY) == 0
    assert list(Path("outputs/main").glob(".sweep-*")) == [living.private]
    living.end()
    assert not list(Path("outputs/main").glob(".sweep-*"))


def test_a_failed_run_is_repeated(monkeypatch):
    from recall_lab import train

    evaluate = train.evaluate
    calls = []

    def broken(*arguments, **more):
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("out of luck")
        return evaluate(*arguments, **more)

    monkeypatch.setattr(train, "evaluate", broken)
    assert recall(*TINY) == 1
    assert states("main") == ["failed"]
    monkeypatch.setattr(train, "evaluate", evaluate)
    assert recall(*TINY) == 0
    assert states("main") == ["finished"]


def test_a_loss_that_is_not_finite_fails_the_run(capsys, monkeypatch):
    from recall_lab import train

    monkeypatch.setattr(train, "loss", lambda logits, targets: logits.sum() * torch.nan)
    assert recall(*TINY) == 1
    (folder,) = run_folders("main")
    assert re.search(r"training step 0 is nan", folders.status(folder)["error"])
    assert "training step 0 is nan" in capsys.readouterr().err
    assert not (folder / "rows.json").exists()


@pytest.mark.slow
def test_a_job_of_a_parallel_sweep_equals_the_same_run_alone():
    done = shell("run", "-m", *TINY, "mixer=softmax,delta_rule", "seed=0,1", "name=sweep")
    assert done.returncode == 0, done.stderr
    assert states("sweep") == ["finished"] * 4
    assert recall(*TINY, "mixer=delta_rule", "seed=1", "name=alone") == 0
    (alone,) = run_folders("alone")
    twin = Path("outputs/sweep") / alone.name
    assert (twin / "rows.json").read_text() == (alone / "rows.json").read_text()
    ours, theirs = (torch.load(f / "checkpoint.pt", weights_only=True)["model"] for f in (alone, twin))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {folders.status(folder)["threads"] for folder in run_folders("sweep")} == {1}


@pytest.mark.slow
def test_kill_and_rerun(monkeypatch):
    """After kill −9 in a sweep, finished runs are kept and the others resume from their checkpoints."""
    assert recall(*TINY, "name=long") == 0
    finished = {path: path.read_bytes() for path in Path("outputs/long").glob("*/*.json")}
    with background("run", *TINY, *LONG) as process:
        started(process, "long", runs=2)
        os.killpg(process.pid, signal.SIGKILL)
    assert {path: path.read_bytes() for path in finished} == finished
    assert sorted(states("long")) == ["finished", "running"]
    (cut,) = (folder for folder in run_folders("long") if folders.status(folder)["state"] == "running")
    for path in cut.glob("*.json"):
        json.loads(path.read_text())
    reached = torch.load(cut / "checkpoint.pt", weights_only=True)["curve"][-1]["step"]

    from recall_lab.optimization import Stepper

    seen = []
    step = Stepper.step

    def watched(self, value, number):
        seen.append(number)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return step(self, value, number)

    monkeypatch.setattr(Stepper, "step", watched)
    assert recall(*TINY, *LONG) == 130
    assert seen == [reached, reached + 1, reached + 2]
    assert sorted(states("long")) == ["finished", "interrupted"]
    assert len(run_folders("long")) == 2


def test_ctrl_c_explains_how_to_resume():
    with background("run", *TINY, *LONG) as process:
        started(process, "long")
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=120)
        message = process.stderr.read()
    assert process.returncode == 130
    assert message.splitlines() == ["recall-lab: interrupted; the same command resumes the runs"]
    assert states("long") == ["interrupted"]


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["softmax", "gated_delta"])
def test_compiled_training_is_the_same_training(mixer):
    """In separate processes, because the compiler cannot handle the type checks of the tests."""
    for flag in ("false", "true"):
        done = shell("run", *TINY, f"mixer={mixer}", f"train.compile={flag}", f"name=compile-{flag}")
        assert done.returncode == 0, done.stderr
    (plain,), (compiled,) = run_folders("compile-false"), run_folders("compile-true")
    ours, theirs = ([p["train_loss"] for p in files.read_json(f / "curve.json")] for f in (plain, compiled))
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_run_whose_process_always_dies_is_abandoned(monkeypatch):
    """A run whose process died in every allowed attempt is reported as died and not tried again."""
    assert recall(*TINY, "name=main") == 0
    (folder,) = run_folders("main")
    status = files.read_json(folder / "status.json") | {"state": "running"}
    files.write_json(folder / "status.json", status)
    from recall_lab import runner

    monkeypatch.setattr(Sweep, "attempts", lambda self, run: runner.ATTEMPTS)
    assert recall(*TINY, "name=main") == 1
    assert states("main") == ["died"]


def test_a_sweep_over_the_output_folder_is_refused(capsys):
    for setting in ("name=a,b", "root=a,b"):
        assert recall("-m", *TINY, SERIAL, setting) == 2
        printed = capsys.readouterr()
        assert re.fullmatch(
            r"recall-lab: a sweep over (name|root) would .*; run the command once for each .*\n", printed.err
        )
        assert printed.out == ""
    assert list(Path.cwd().iterdir()) == []


def test_a_resolver_in_the_output_folder_works_or_fails_visibly(capsys):
    assert recall(*TINY, "root=${hydra:runtime.cwd}/r") == 0
    assert len(list(Path("r/main").glob("*/status.json"))) == 1
    assert recall(*TINY, "root=${nothing}/r") == 2
    assert capsys.readouterr().err.startswith("recall-lab: ")


def test_a_second_value_for_a_swept_setting_is_refused(capsys):
    assert recall("-m", *TINY, SERIAL, "mixer.heads=1,2", "mixer.heads=4") == 2
    assert "mixer.heads is given twice: mixer.heads=1,2 and mixer.heads=4" in capsys.readouterr().err
    assert recall(*TINY, "train.steps=3") == 0  # of two single values the last one counts


def test_a_run_without_a_lock_fails(capsys, monkeypatch):
    import fcntl

    def no_locks(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    assert recall(*TINY) == 1
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert ".lock: No locks available" in printed


@pytest.mark.slow
def test_a_full_disk_names_the_file_and_leaves_finished_runs_alone():
    """The full disk is simulated by a limit on the size of files: both make a write fail half-way."""
    assert recall(*TINY) == 0
    (finished,) = run_folders("main")
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}

    def limit():
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = shell("run", *TINY, "seed=1", preexec_fn=limit)
    assert done.returncode == 1
    assert re.fullmatch(
        r"recall-lab: outputs/main/\w+ failed: cannot write outputs/main/\w+/\S+: File too large\n", done.stderr
    )
    assert {path: path.read_bytes() for path in before} == before
    assert recall(*TINY, "seed=1") == 0
