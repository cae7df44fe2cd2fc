"""Sweeps on a cluster, without one: what a job does, what the command says, what Slurm is asked for."""

import inspect
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import TINY, recall, rows, states
from conftest import CONF, names
from hydra.utils import get_class
from omegaconf import OmegaConf

from recall_lab import folders, messages, runner, train, workers
from recall_lab.cli.base import compose, resolved
from recall_lab.cli.listing import listing
from recall_lab.cluster import base, ray, slurm
from recall_lab.sweep import ENVIRONMENT, FAILED, UNWRITTEN, WORKER_OF, Sweep

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def sweep(monkeypatch) -> Sweep:
    """The journal of a command that this process belongs to."""
    monkeypatch.setenv(ENVIRONMENT, "command")
    monkeypatch.setenv(WORKER_OF, str(os.getpid()))
    parent = Path("outputs/main")
    folders.claim(parent)
    made = Sweep(parent, "command")
    made.begin()
    return made


def settings(*overrides: str) -> dict:
    return resolved(compose([*TINY, *overrides]), {"task": "mqar", "mixer": "softmax"})


class Engine:
    """A cluster whose jobs end at the first look, each as its seed says: 0 finishes, 1 dies, 2 has no time left."""

    at_a_time = 2

    def __init__(self, folder: Path, options: dict) -> None:
        self.sweep, self.most, self.running, self.cancelled, self.clean = Sweep(folder, "command"), 0, 0, [], None
        Engine.made = self

    def start(self, runs):
        self.running += len(runs)
        self.most = max(self.most, self.running)
        return [run[0] for run in runs]

    def ended(self, job):
        return job["seed"] < 3

    def answer(self, job):
        self.running -= 1
        name = folders.identity(job)
        self.sweep.note(name, "started")
        if job["seed"] == 0:
            self.sweep.note(name, "finished", "", "finished  by another process")
            return {"loss": 0.5, "unwritten": []}
        if job["seed"] == 2:
            self.sweep.note(name, "interrupted")
        return "its time is up" if job["seed"] == 2 else "out of memory"

    def cancel(self, jobs):
        self.cancelled = jobs

    def close(self, clean):
        self.clean = clean


def test_the_command_prints_what_jobs_say_and_notes_those_that_die(sweep, monkeypatch, capsys):
    monkeypatch.setattr(base, "PAUSE", 0)
    monkeypatch.setattr("recall_lab.sweep.print_line", lambda line: None)  # the job prints it on another machine
    runs = [settings(f"seed={seed}") for seed in (0, 1, 2, 0, 0)]
    losses = base.run_all(Engine, {"cpus": 1}, [(each, 0) for each in runs], sweep.folder)
    assert losses == [0.5, FAILED, FAILED, 0.5, 0.5]
    assert (Engine.made.most, Engine.made.running, Engine.made.cancelled, Engine.made.clean) == (2, 0, [], False)
    printed = capsys.readouterr().out.splitlines()
    assert printed.count("finished  by another process") == 3
    dead, cut = (folders.title(folders.identity(each), each) for each in runs[1:3])
    assert f"died      {dead}: out of memory" in printed
    assert f"interrupted {cut}: its time is up" in printed
    last = sweep.last()
    assert last[folders.identity(runs[1])]["text"].endswith("died: out of memory")
    assert last[folders.identity(runs[2])]["text"].endswith("was interrupted: its time is up")
    sweep.end()


def test_jobs_are_cancelled_when_the_command_is_interrupted(sweep, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(base.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        base.run_all(Engine, {"cpus": 1}, [(settings("seed=3"), 0)] * 3, sweep.folder)
    assert len(Engine.made.cancelled) == 2
    assert Engine.made.clean is True  # no log is of use


def test_a_job_whose_time_is_up_saves_its_run_before_anybody_else_gets_the_signal(sweep, monkeypatch):
    """Submitit listens, and ends the process. The next job resumes the run, with the results of an undisturbed one."""
    assert recall(*TINY, "name=alone") == 0
    monkeypatch.setenv(ENVIRONMENT, "command")
    monkeypatch.setenv(WORKER_OF, str(os.getpid()))
    loss, heard = train.loss, []

    def signalled(*arguments):
        signalled.steps += 1
        if signalled.steps == 5:
            signal.raise_signal(signal.SIGUSR2)
        return loss(*arguments)

    def listener(number, frame):
        heard.append((number, states("main")))
        sys.exit(7)

    monkeypatch.setattr(runner, "ATTEMPTS", 1)  # the end of a job's time is no death
    monkeypatch.setattr(train, "loss", signalled)
    old = signal.signal(signal.SIGUSR2, listener)
    try:
        work, config = base.Work(), settings()
        for _ in range(2):
            signalled.steps = 4
            with pytest.raises(SystemExit):
                work(config, "outputs/main", 0)
        assert work(config, "outputs/main", 0) == {"loss": pytest.approx(4, abs=2), "unwritten": UNWRITTEN}
    finally:
        signal.signal(signal.SIGUSR2, old)
    assert heard == [(signal.SIGUSR2, ["interrupted"])] * 2
    assert states("main") == ["finished"]
    assert rows("main") == rows("alone")
    sweep.end()


def test_what_cannot_be_launched_is_named_in_one_line(monkeypatch, capsys):
    for name in ("submitit", "ray"):  # as if they were not installed
        monkeypatch.setitem(sys.modules, name, None)
    for words, message in (
        (["hydra/launcher=slurm"], "hydra/launcher=slurm has an effect on a sweep only: add -m, also for one run"),
        (["-m", "hydra/launcher=slurm", "threads=2", "hydra.launcher.cpus=1"], "cpus=1: must be at least threads=2"),
        (["-m", "hydra/launcher=slurm"], "hydra/launcher=slurm: pip install 'recall_lab[slurm]'"),
    ):
        assert recall(*words, *TINY) == 2
        printed = capsys.readouterr().err
        assert printed.endswith(f"{message}\n")
        assert printed.count("\n") == 1
    with pytest.raises(OSError, match="refused"):
        ray._answers("127.0.0.1:1")
    with pytest.raises(ValueError, match=r"hydra/launcher=ray: pip install 'recall_lab\[ray\]'"):
        ray.Ray(Path("outputs"), {})


def test_options_of_launchers_are_known():
    assert messages.no_setting("hydra.launcher.partitoin").endswith("did you mean hydra.launcher.partition?")
    assert "no effect with the chosen hydra/launcher" in messages.no_setting("hydra.launcher.partition")
    assert {"slurm", "ray", "workers"} <= set(listing("launchers").split())


@pytest.mark.parametrize("name", names("hydra/launcher"))
def test_a_launcher_takes_the_options_of_its_yaml(name):
    chosen = OmegaConf.load(CONF / "hydra" / "launcher" / f"{name}.yaml")
    made = get_class(chosen._target_)
    assert made.__name__.lower() == name
    assert ["_target_", *inspect.signature(made).parameters] == list(chosen)


def test_a_job_is_lost_when_the_queue_lacks_it_two_times_in_a_row(monkeypatch):
    monkeypatch.setattr(slurm, "QUEUE_PERIOD", 0)
    answers = iter([(0, "7_0\n7_1\n"), (0, "7_1\n"), (1, ""), (0, "7_0\n7_1\n"), (0, "7_1\n"), (0, "7_1\n")])

    def squeue(words, **more):
        assert words[0] == "squeue"
        return subprocess.CompletedProcess(words, *next(answers))

    monkeypatch.setattr(slurm.subprocess, "run", squeue)
    queue = slurm.Queue()
    assert [queue.lost("7_0") for _ in range(6)] == [False] * 5 + [True]


def test_each_worker_keeps_its_gpu(sweep, monkeypatch):
    """That of its own number, whatever the number of the run: no two share one while another one is idle."""

    class Worker(workers.Worker):
        def __init__(self, threads):
            pass

        def do(self, job):
            given.append(job["number"])
            time.sleep(0.3 if job["settings"]["seed"] == 0 else 0.01)
            return 0.0

        def end(self):
            pass

    given: list[int] = []
    monkeypatch.setattr(workers, "Worker", Worker)
    jobs = [({"seed": seed, "choice": {}}, seed) for seed in range(6)]
    assert workers.run_all(jobs, sweep.folder, parallel=2, cores=2) == [0.0] * 6
    assert sorted(given) == [0, 1, 1, 1, 1, 1]  # one worker has the long run, the other one does the rest


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """Programs of Slurm's names on the path; sbatch answers as the test says."""
    for name in ("srun", "squeue", "scancel", "sbatch"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\necho Submitted batch job 7\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path / "bin" / "sbatch"


def options(**changed) -> dict:
    launcher = compose([*TINY, "hydra/launcher=slurm"], with_hydra=True).hydra.launcher
    return {name: launcher[name] for name in launcher if name != "_target_"} | changed


def test_the_options_of_a_slurm_array(fake_slurm, sweep):
    pytest.importorskip("submitit")
    given = options(n_jobs=2, partition="a", timeout_min=90, gpus=1, options={"qos": "high"}, setup=["module load x"])
    engine = slurm.Slurm(sweep.folder, given)
    jobs = engine.start([(settings(f"seed={seed}"), "outputs/main", seed) for seed in range(3)])
    assert [job.job_id for job in jobs] == ["7_0", "7_1", "7_2"]
    lines = (sweep.folder / ".slurm" / "command" / "7_submission.sh").read_text().splitlines()
    for line in ("--array=0-2%2", "--partition=a", "--time=90", "--gpus-per-node=1", "--qos=high", "--mem=4096MB",
                 "--cpus-per-task=1", "--signal=USR2@120", "--job-name=main"):  # fmt: skip
        assert f"#SBATCH {line}" in lines
    assert "module load x" in lines
    assert "--cpus-per-task=1" in lines[-1].split()
    engine.close(clean=True)
    assert not (sweep.folder / ".slurm").exists()


def test_what_slurm_refuses_is_said_in_one_line(fake_slurm, capfd):
    pytest.importorskip("submitit")
    fake_slurm.write_text("#!/bin/sh\necho sbatch: error: invalid partition specified: a >&2\nexit 1\n")
    assert recall("-m", *TINY, "hydra/launcher=slurm", "hydra.launcher.partition=a") == 2
    assert "recall-lab: hydra/launcher=slurm: invalid partition specified: a\n" in capfd.readouterr().err
