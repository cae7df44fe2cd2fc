"""kill −9 at random moments: whatever is hit, the same command ends with the results of an undisturbed sweep.

RECALL_LAB_KILL_ROUNDS=50 does 50 rounds, RECALL_LAB_KILL_SEED=1 draws others.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from command_line import TINY, background, rows, shell, states, workers_of

import recall_lab
from recall_lab import files, folders, overview

pytestmark = [pytest.mark.usefixtures("empty_folder"), pytest.mark.slow]

ROUNDS = int(os.environ.get("RECALL_LAB_KILL_ROUNDS", "20"))
SEED = int(os.environ.get("RECALL_LAB_KILL_SEED", "0"))

CELLS = "[{distractors: 0}]"
SOME = ["train.steps=120", "train.validate_every=2", "train.solved=null", f"train.cells={CELLS}", f"test.cells={CELLS}"]
SWEEP = ["run", "-m", *TINY[:-1], *SOME, "probe=[retrieval]", "mixer=softmax,delta_rule"]
"""Two runs, with 60 validations and checkpoints each, a probe, and a report."""

SPANS = {"start": 0.5, "work": 0.08, "report": 0.3}
"""Where a moment is drawn from: the span after the start, after the first checkpoint, and after the last run has ended,
as a share of the time that an undisturbed sweep takes."""


def table(name: str) -> pd.DataFrame:
    """Every row of the sweep. The order of rows and columns is that in which the runs were started."""
    found = recall_lab.load(f"outputs/{name}").drop(columns=["git", "seconds", "started"], errors="ignore")
    found = found[sorted(found)]
    return found.sort_values(list(found), ignore_index=True, key=lambda column: column.astype(str))


def wait(process: subprocess.Popen, phase: str, seconds: float) -> bool:
    """Waits for a phase, and then for some seconds. Returns whether the process has not ended before."""
    while process.poll() is None and not reached(phase):
        time.sleep(0.005)
    limit = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < limit:
        time.sleep(0.005)
    return process.poll() is None


def reached(phase: str) -> bool:
    if phase == "report":
        return states("hit") == ["finished"] * 2
    return phase == "start" or bool(list(Path("outputs/hit").glob("*/checkpoint.pt")))


def hit(victim: str, process: subprocess.Popen, rng: random.Random) -> None:
    """Kills a worker, or the command, alone or with all workers; then nothing of the command may be left."""
    workers = workers_of(process)
    if victim == "worker":
        for pid in rng.sample(workers, min(1, len(workers))):
            os.kill(pid, signal.SIGKILL)
        return
    os.kill(process.pid, signal.SIGKILL)
    for pid in workers if victim == "both" else ():
        os.kill(pid, signal.SIGKILL)
    process.wait(timeout=60)
    limit = time.monotonic() + 60
    while subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, check=False).stdout:
        assert time.monotonic() < limit, "workers whose command is gone must end"
        time.sleep(0.02)


def left(name: str) -> str:
    """What the kill has left, in words. Everything that can be read is whole."""
    sweep = Path("outputs", name)
    if not (sweep / folders.MARK).exists():
        return "nothing"
    entries = overview.entries(sweep)
    assert "running" not in [entry.state for entry in entries]
    for path in sweep.glob("*/*.json"):
        files.read_json(path)
    half = sorted({path.name.rpartition(".")[0] for path in sweep.rglob(".*.[0-9]*")})
    states = Counter(f"{entry.state} {entry.phase}".strip() for entry in entries if entry.state != "done")
    if not states and not half:
        return "all finished"
    return ", ".join([*(f"{number} {state}" for state, number in sorted(states.items())), *half])


def command_hit(phase: str, victim: str, rng: random.Random, duration: float) -> list[str]:
    """One command, killed once, or up to twice its workers, by which it ends well. Returns a line for each round."""
    lines = []
    jobs = rng.choice([1, 2])
    words = [f"hydra.launcher.n_jobs={jobs}", f"report={str(phase == 'report').lower()}", "name=hit"]
    with background(*SWEEP, *words) as process:
        for _ in range(2 if victim == "worker" else 1):
            seconds = rng.uniform(0, SPANS[phase] * duration)
            if wait(process, phase, seconds):
                hit(victim, process, rng)
                lines.append(f"{victim} of {jobs}, {phase} + {seconds:.2f} s")
        if victim == "worker" or not lines:
            assert process.wait(timeout=600) == 0, process.stderr.read()
    if lines:
        lines[-1] += f": {left('hit')}"
    return lines


def test_killed_at_random_moments():
    begun = time.monotonic()
    done = shell(*SWEEP, "name=alone")
    duration = time.monotonic() - begun
    assert done.returncode == 0, done.stderr
    expected, expected_table = rows("alone"), table("alone")
    print(f"\nseed {SEED}; an undisturbed sweep takes {duration:.0f} s")
    rng = random.Random(SEED)
    rounds = 0
    while rounds < ROUNDS:
        phase, victim = rng.choice(["start", "work", "work", "report"]), rng.choice(["worker", "command", "both"])
        for line in command_hit(phase, victim, rng, duration):
            rounds += 1
            print(f"round {rounds}: {line}", flush=True)
        here = rows("hit")
        assert here == {name: expected[name] for name in here}
        if len(here) == 2 and rounds < ROUNDS:  # the next round is of another sweep
            pd.testing.assert_frame_equal(table("hit"), expected_table)
            shutil.rmtree("outputs/hit")
    done = shell(*SWEEP, "name=hit")
    assert (done.returncode, done.stderr) == (0, "")
    assert rows("hit") == expected
    pd.testing.assert_frame_equal(table("hit"), expected_table)
    assert Path("outputs/hit/report.html").exists()
    assert not list(Path("outputs/hit").glob(".sweep-*"))
    assert not list(Path("outputs/hit").glob("*/.*.[0-9]*"))
