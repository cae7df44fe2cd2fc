"""Processor time of commands that train next to nothing, and of commands on a thousand finished runs.

The unit is the time that Python takes to import torch, measured in the same way: a process of its own.
"""

import os
import resource
import shutil
import subprocess
import sys
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from recall_lab import building, files, folders
from recall_lab.cli.base import compose, resolved
from recall_lab.files import CONF

SMALL = ["train.steps=1", "test.tokens=256", "test.sequences=4", "train.validation_sequences=8", "report=false"]
RUNS = 1000


def processor_seconds(*command: str, folder: Path) -> float:
    """Processor time of a process and its children, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def recall(*words: str, folder: Path) -> float:
    return processor_seconds("-m", "recall_lab", *words, folder=folder)


@pytest.fixture(scope="module")
def unit(tmp_path_factory) -> float:
    return min(processor_seconds("-c", "import torch", folder=tmp_path_factory.mktemp("torch")) for _ in range(3))


@pytest.fixture(scope="module")
def thousand(tmp_path_factory) -> Path:
    """A folder with outputs/main, in which one run is copied under a thousand seeds."""
    folder = tmp_path_factory.mktemp("thousand")
    recall("run", *SMALL, folder=folder)
    ((template,),) = [[path.parent for path in folder.glob("outputs/main/*/status.json")]]
    config = folders.read_config(template)
    for seed in range(1, RUNS):
        settings = {**config, "seed": seed}
        run = template.with_name(folders.identity(settings))
        run.mkdir()
        folders.write_config(run, settings)
        for name in ("status.json", "rows.json", "curve.json", "run.log"):
            shutil.copy(template / name, run / name)
    return folder


def test_a_run_and_a_finished_run_start_quickly(tmp_path, unit):
    """Half of a run's time is torch's: its import, and that of the compiler, which every optimizer of torch imports."""
    run, found = (recall("run", *SMALL, folder=tmp_path) for _ in range(2))
    print(f"\nrun {run:.2f} s, found again {found:.2f} s, import torch {unit:.2f} s")
    assert run < 5 * unit
    assert found < unit


def test_the_next_job_of_a_worker_starts_quickly(tmp_path):
    """From the end of a run to the first line that the next one logs, which is just before its training starts."""
    recall("run", "-m", *SMALL, "seed=range(0,6)", "hydra.launcher.n_jobs=1", folder=tmp_path)
    logs = [path.read_text("utf-8").splitlines() for path in tmp_path.glob("outputs/main/*/run.log")]
    spans = sorted([datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f") for line in (log[0], log[-1])] for log in logs)
    gaps = [(later[0] - earlier[1]).total_seconds() for earlier, later in pairwise(spans)]
    print(f"\n{min(gaps):.2f} s to {max(gaps):.2f} s from one job to the next")
    assert sorted(gaps)[len(gaps) // 2] < 0.3


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_workers_take_little_more_than_half_the_time(tmp_path):
    """Wall time from the first start of a run to the last end, over the sum of the seconds that runs take alone. Other
    processes must leave two cores free. RECALL_LAB_RUNS=64 does more runs."""
    number = int(os.environ.get("RECALL_LAB_RUNS", "8"))
    words = ["run", "-m", *SMALL[1:], "train.steps=600", "train.solved=null", "model.d_model=32", "train.tokens=2048"]
    spans = {}
    for name, jobs, runs in (("alone", 1, 2), ("shared", 2, number)):
        recall(*words, f"seed=range(0,{runs})", f"hydra.launcher.n_jobs={jobs}", f"name={name}", folder=tmp_path)
        facts = [folders.status(path.parent) for path in tmp_path.glob(f"outputs/{name}/*/status.json")]
        spans[name] = [(datetime.fromisoformat(each["started"]).timestamp(), each["seconds"]) for each in facts]
    alone = sum(seconds for _, seconds in spans["alone"]) / 2
    begun = min(start for start, _ in spans["shared"])
    wall = max(start + seconds for start, seconds in spans["shared"]) - begun
    print(
        f"\n{number} runs of {alone:.1f} s: {wall / (number * alone):.2f} of their sum, load {os.getloadavg()[0]:.1f}"
    )
    assert wall < 0.55 * number * alone


def test_a_job_is_checked_quickly():
    """Building a run's parts without weights takes no longer than composing its settings."""
    names = [path.stem for path in sorted((CONF / "mixer").glob("*.yaml"))]
    composing = checking = 0.0
    for number, name in enumerate([names[0], *names]):
        begun = time.process_time()
        settings = resolved(compose([f"mixer={name}"]), {"task": "mqar", "mixer": name})
        composed = time.process_time()
        building.check(settings)
        composing, checking = composing + composed - begun, checking + time.process_time() - composed
        if number == 0:  # it has imported what the others share
            composing = checking = 0.0
    milliseconds = [f"{seconds / len(names) * 1000:.0f} ms" for seconds in (checking, composing)]
    print("\n{} to check a job, {} to compose it".format(*milliseconds))
    assert checking < composing


def test_a_thousand_finished_runs_are_skipped_quickly(thousand, unit):
    """Hydra composes the settings of each job once, in about 45 ms; the rest is little."""
    seconds = recall("run", "-m", *SMALL, f"seed=range(0,{RUNS})", folder=thousand)
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
    print(f"\n{seconds:.1f} s: {seconds / unit:.0f} × import torch; at most {memory:.2f} GiB in any process so far")
    assert len(list(thousand.glob("outputs/main/*/status.json"))) == RUNS
    assert seconds < 90 * unit
    assert memory < 1


def test_a_report_of_a_thousand_runs_is_made_quickly(thousand, unit):
    seconds = recall("report", "outputs/main", folder=thousand)
    print(f"\n{seconds:.1f} s: {seconds / unit:.1f} × import torch")
    assert files.read_json(next(thousand.glob("outputs/main/*/status.json")))["state"] == "finished"
    assert seconds < 8 * unit
