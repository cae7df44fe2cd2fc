"""Helpers for tests of the command line: tiny settings, running a command, and the folders that it leaves."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recall_lab import folders, messages
from recall_lab.cli import probe, run

TINY = ["model.d_model=16", "model.layers=1", "train.steps=6", "train.validate_every=3", "train.tokens=256",
        "train.validation_sequences=8", "test.tokens=256", "test.sequences=4", "task.length=16", "task.pairs=2",
        "task.vocab=32", "report=false"]  # fmt: skip
"""Settings of a run of less than a second."""

UNTRAINED = ["train.steps=2", "train.validate_every=2", "train.tokens=128", "train.validation_sequences=4",
             "test.tokens=1", "test.sequences=4", "hydra/launcher=basic"]  # fmt: skip
"""Settings that make every training of an experiment short, whatever its task."""

SERIAL = "hydra/launcher=basic"
"""Options that execute the runs of a sweep one after the other, in this process."""

LONG = ["train.steps=100000", "train.validate_every=20", "train.solved=null", "name=long"]
"""Options of a run that does not end by itself."""


def recall(*arguments: str) -> int:
    """Calls `recall-lab run …` in this process and returns its exit status."""
    run.Preflight.sweep = None
    os.environ.pop("HYDRA_FULL_ERROR", None)
    return run.main([*arguments])


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "recall_lab", *arguments]


def shell(*arguments: str, **more) -> subprocess.CompletedProcess:
    """Calls `recall-lab …` in a separate process."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, **more)


def run_folders(name: str) -> list[Path]:
    return sorted(path.parent for path in Path("outputs", name).glob("*/status.json"))


def states(name: str) -> list[str]:
    return [folders.status(folder)["state"] for folder in run_folders(name)]


def rows(name: str) -> dict[str, str]:
    """Finished run → its rows as text: bit for bit."""
    return {run.name: (run / "rows.json").read_text() for run in run_folders(name)
            if folders.status(run)["state"] == "finished"}  # fmt: skip


def run_probe(*arguments: str) -> int:
    """Calls `recall-lab probe …` in this process and returns its exit status."""
    try:
        several = arguments[0] == "-m"
        folder, *words = arguments[several:]
        return probe.probe(folder, words, multirun=several)
    except messages.ERRORS as error:
        return messages.print_error(error)


SLOWED = """
import sys, time
from recall_lab.__main__ import main
from recall_lab.task.mqar import MQAR
sample = MQAR.sample
def slow(*arguments):
    time.sleep(0.05)
    return sample(*arguments)
MQAR.sample = slow
main()
"""
"""`recall-lab`, with 50 ms more for every batch: a run of few steps lasts until a signal arrives."""


def _heed_signals() -> None:
    """Tests that run in the background or under nohup ignore these signals, and a new process would inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def background(*arguments: str, slowed: bool = False) -> Iterator[subprocess.Popen]:
    """Runs `recall-lab …` in a separate process group, which is always killed in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWED, *arguments] if slowed else command(*arguments),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heed_signals,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def started(process: subprocess.Popen, name: str, runs: int = 1) -> None:
    """Waits until `count` runs have a checkpoint."""
    for _ in range(1800):
        if len(list(Path("outputs", name).glob("*/checkpoint.pt"))) >= runs:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError("no checkpoint in three minutes")


def workers_of(process: subprocess.Popen) -> list[int]:
    """The process ids of a command's workers."""
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "runner import serve"], capture_output=True, text=True, check=False
    )
    return [int(word) for word in found.stdout.split()]
