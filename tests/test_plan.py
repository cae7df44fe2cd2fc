"""What is known and refused before a sweep starts: the list of `--dry-run`, and jobs that are impossible."""

from pathlib import Path

import pytest
import torch
from command_line import SERIAL, TINY, recall, run_folders, states
from hydra.errors import InstantiationException
from torch import nn

from recall_lab import building, files, folders, times, workload
from recall_lab.cli import plan
from recall_lab.cli.base import compose, resolved

pytestmark = pytest.mark.usefixtures("empty_folder")

PAIRS = [word for word in TINY if not word.startswith("task.pairs")]


def settings(*overrides: str, task: str = "mqar", mixer: str = "softmax") -> dict:
    return resolved(compose([*TINY, *overrides]), {"task": task, "mixer": mixer})


def change(seed: int, **facts: object) -> None:
    """Changes the status of the run with this seed."""
    (run,) = (run for run in run_folders("main") if folders.read_config(run)["seed"] == seed)
    files.write_json(run / "status.json", files.read_json(run / "status.json") | facts)


def test_a_dry_run_lists_the_jobs_and_writes_nothing(capsys):
    assert recall("-m", *TINY, SERIAL, "seed=0,1,2") == 0
    change(0, seconds=100)
    change(1, state="failed", seconds=7)
    change(2, state="interrupted", step=2)
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    capsys.readouterr()
    assert recall("--dry-run", "-m", *TINY, "hydra.launcher.n_jobs=2", "seed=0,1,2,3") == 0
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
    *jobs, summary = capsys.readouterr().out.splitlines()
    listed = [(line[:10].strip(), *line[24:].split("  ")) for line in jobs]
    assert listed == [
        ("finished", "seed=0"),
        ("failed", "seed=1", "2 min"),
        ("to resume", "seed=2", "67 s"),
        ("new", "seed=3", "2 min"),
    ]
    assert summary == "4 jobs: 1 failed, 1 finished, 1 new, 1 to resume; 4 min of work, 2 min with 2 at a time"


def test_a_dry_run_of_a_single_run(capsys):
    assert recall("--dry-run", *TINY) == 0
    assert not Path("outputs").exists()
    printed = capsys.readouterr().out
    assert printed.startswith("new ")
    assert printed.endswith("softmax on mqar, seed 0  unknown\n1 job: 1 new; time unknown\n")
    assert recall(*TINY) == 0
    assert recall("--dry-run", *TINY) == 0
    assert "1 finished" in capsys.readouterr().out
    Path("outputs/mine").mkdir()
    Path("outputs/mine/thesis.txt").write_text("years of work")
    assert recall("--dry-run", *TINY, "name=mine") == 2
    assert "outputs/mine holds other files" in capsys.readouterr().err


def test_impossible_jobs_are_named_at_once_and_nothing_is_started(capsys):
    words = ["-m", *PAIRS, SERIAL, "task.pairs=9,2,10", "hydra.sweeper.max_batch_size=1"]
    for dry in (["--dry-run"], []):
        assert recall(*dry, *words) == 2
        printed = capsys.readouterr()
        first, second, last = printed.err.splitlines()
        assert first.startswith("recall-lab: task.pairs=9: ")
        assert "a length of at least 36 (2 positions each), not 16" in first
        assert second.startswith("recall-lab: task.pairs=10: ")
        assert last == "recall-lab: nothing was started; impossible jobs: 2 of 3; skip_invalid=true runs the others"
        assert len(printed.out.splitlines()) == (4 if dry else 0)
        assert run_folders("main") == []
    assert recall(*words, "skip_invalid=true") == 0
    assert states("main") == ["finished"]
    assert "nothing was started" not in capsys.readouterr().err
    assert recall(*words, "skip_invalid=perhaps") == 2


IMPOSSIBLE = [
    ["mixer.heads=0"],
    ["model.layers=0"],
    ["train.steps=0"],
    ["train.cells=[{length: 8, pairs: 8}]"],
    ["test.cells=[{length: 8, pairs: 8}]"],
    ["optimizer=sgd", "optimizer.momentum=-1"],
    ["threads=0"],
    ["seed=-1"],
    ["mixer=hybrid", "model.layers=1"],
    ["oracle=random", "mixer=linear"],
    ["oracle=random", "probe=[cost]", "mixer=hybrid"],
    ["oracle=random", "probe=[state_retention]", "mixer=delta_rule/neg_eigval"],
]


@pytest.mark.parametrize("overrides", IMPOSSIBLE, ids=lambda words: " ".join(words))
def test_what_is_checked_before_a_start(overrides):
    """Settings of task, mixer, model, optimiser, cells and probes."""
    given = overrides if "oracle=random" in overrides else [*TINY, *overrides]
    config = resolved(compose(given), {"task": "mqar", "mixer": "softmax"})
    with pytest.raises((ValueError, InstantiationException)):
        building.check(config)


def test_a_check_needs_no_memory_for_weights():
    """This model would have 40 TB of weights."""
    building.check(settings("model.d_model=1000000", "model.mlp=4", "mixer.heads=1000"))


def test_a_constructor_that_reads_a_number_from_a_tensor_is_possible():
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = int(torch.ones(3).sum().item())

    assert workload._without_memory(Reading).count == 3
    assert workload._without_memory(lambda: nn.Linear(2, 2)).weight.is_meta


def test_times_are_estimated_from_the_same_settings_or_the_same_task_and_mixer():
    other = settings("mixer=linear", mixer="linear")
    known = times.Times([(settings("seed=1"), 10.0), (settings("seed=2", "threads=2"), 20.0)])
    assert known.estimate(settings("seed=3", "name=x")) == 15
    assert known.estimate(settings("train.lr=0.5", "train.steps=12")) == 30
    assert known.estimate(other) is None
    known.add(other, 3.0)
    assert known.estimate(other) == 3
    words = [times.in_words(seconds) for seconds in (None, -1.0, 8.2, 200.0, 7500.0)]
    assert words == ["unknown", "0 s", "8 s", "3 min", "2 h 05 min"]


def test_how_many_jobs_run_at_a_time(monkeypatch):
    monkeypatch.setattr(plan, "cores", lambda: 4)
    for given, expected in ((2, 2), (-1, 4), (-2, 3), (-9, 1)):
        config = compose(["-m", f"hydra.launcher.n_jobs={given}"][1:], with_hydra=True)
        assert plan.at_a_time(config) == expected
    assert plan.at_a_time(compose([SERIAL], with_hydra=True)) == 1
