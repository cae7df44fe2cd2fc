"""Sweeps as jobs of submitit, without Slurm, and as tasks of a Ray cluster of this machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import TINY, background, recall, rows, run_folders, shell, started, states

from recall_lab import folders

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("empty_folder")]

LOCAL = ["hydra/launcher=slurm", "hydra.launcher.cluster=local", "hydra.launcher.timeout_min=10"]
"""Submitit's jobs on this machine, without Slurm."""

LONG = ["train.steps=500", "train.validate_every=20", "train.solved=null"]
"""A run of some seconds."""


@pytest.fixture(autouse=True)
def _without_token(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


@pytest.mark.parametrize("threads", [1, 2])
def test_submitit_gives_the_results_of_one_process(threads):
    """And starts no more jobs at a time than it is allowed to."""
    pytest.importorskip("submitit")
    words = ["-m", *TINY, "seed=0,1,2", f"threads={threads}"]
    done = shell("run", *words, *LOCAL, "hydra.launcher.n_jobs=1", "name=jobs")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:3]] == ["finished"] * 3
    assert recall(*words, "hydra/launcher=basic", "name=one") == 0
    assert rows("jobs") == rows("one")
    legs = sorted(folders.status(run)["legs"][0]["started"] for run in run_folders("jobs"))
    assert len(legs) == len(set(legs)) == 3
    assert not Path("outputs/jobs/.slurm").exists()
    done = shell("run", *words, *LOCAL, "name=jobs")
    assert [line.split()[0] for line in done.stdout.splitlines()[:3]] == ["found"] * 3


def test_ray_gives_the_results_of_one_process():
    pytest.importorskip("ray")
    words = ["-m", *TINY, "seed=0,1,2"]
    done = shell("run", *words, "hydra/launcher=ray", "name=tasks")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:3]] == ["finished"] * 3
    assert recall(*words, "hydra/launcher=basic", "name=one") == 0
    assert rows("tasks") == rows("one")


def tasks_of(process: subprocess.Popen) -> list[int]:
    """The processes in which submitit does the jobs of a command."""
    found = []
    for controller in children(process.pid):
        found += children(controller)
    return found


def children(pid: int) -> list[int]:
    done = subprocess.run(["pgrep", "-P", str(pid), "-f", "submitit"], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes with pgrep")
def test_a_job_whose_time_is_up_is_queued_again_and_resumes_its_run():
    pytest.importorskip("submitit")
    words = ["-m", *TINY, *LONG]
    with background("run", *words, *LOCAL, "name=long") as process:
        started(process, "long")
        (task,) = tasks_of(process)
        os.kill(task, signal.SIGUSR2)
        assert process.wait(timeout=300) == 0, process.stderr.read()
    (run,) = run_folders("long")
    facts = folders.status(run)
    assert (facts["state"], len(facts["legs"])) == ("finished", 2)
    assert (run / "run.log").read_text().count("WARNING interrupted") == 1
    assert recall(*words, "hydra/launcher=basic", "name=alone") == 0
    assert rows("long") == rows("alone")


@pytest.mark.parametrize("launcher", ["slurm", "ray"])
def test_ctrl_c_saves_the_runs_of_a_cluster(launcher):
    """The same command goes on."""
    pytest.importorskip({"slurm": "submitit", "ray": "ray"}[launcher])
    words = ["-m", *TINY, *LONG, "seed=0,1"]
    engine = LOCAL if launcher == "slurm" else ["hydra/launcher=ray"]
    with background("run", *words, *engine, "hydra.launcher.n_jobs=1", "name=long") as process:
        started(process, "long")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=120) == 130
        assert "recall-lab: interrupted; the same command resumes the runs" in process.stderr.read()
    assert states("long") == ["interrupted"]
    assert recall(*words, "hydra/launcher=basic", "name=long") == 0
    assert recall(*words, "hydra/launcher=basic", "name=alone") == 0
    assert rows("long") == rows("alone")
    assert 2 in [len(folders.status(run)["legs"]) for run in run_folders("long")]
