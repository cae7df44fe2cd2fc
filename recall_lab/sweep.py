"""What the processes of one command share: which runs have started and ended, and whether to stop.

They share it through files in the sweep's folder, so workers may be on other machines.
"""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock, Timeout

from recall_lab import provenance
from recall_lab.files import read_json, remove_half_written, whole, write_json
from recall_lab.folders import Config, busy, identity, status, title
from recall_lab.messages import print_line

ENVIRONMENT = "RECALL_LAB_SWEEP"
"""Environment variable with the name of the command that a worker process belongs to."""

WORKER_OF = "RECALL_LAB_PID"
"""Environment variable with the process id of the command, by which its workers know that they are workers."""

ENDED = ("finished", "found", "incomplete", "failed", "interrupted", "skipped", "died")
"""Events that end a run, at least for this command."""

HOUR = 3600.0
"""Age in seconds from which a half-written file in a sweep's folder is that of a killed process: no lock tells."""

PAUSE = 0.5
"""Seconds between two looks at a run that another process works on."""

ATTEMPTS = 3
"""How many times one command starts a run whose process is killed each time."""

FAILED = 1e9
"""The value of a failed run for a sweeper that minimises the loss: finite, and larger than any loss."""

UNWRITTEN: list[dict[str, str]] = []
"""Events of this process that could not be written to the journal; a worker sends them to the command."""


def stopping() -> list[signal.Signals]:
    """The signals that stop a command, which then saves its runs: Ctrl-C, SIGTERM, and that of a terminal that is
    closed, unless it is ignored (nohup)."""
    hangup = [signal.SIGHUP] if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return [signal.SIGINT, signal.SIGTERM, *hangup]


class Sweep:
    """The journal and the stop request of one command.

    folder  the sweep's folder
    name    distinguishes the command from others that use the same folder at the same time
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.private = folder / f".sweep-{name}"
        self.alive = FileLock(self.private / "alive", blocking=False)

    def begin(self) -> None:
        """Creates the journal's folder, and removes what commands that were killed have left. Called once, before any
        worker starts, in the process of the command: that it lives is known by a lock."""
        # A file system without locks: nothing is removed. The outer lock keeps a command that starts at the same time
        # from removing this journal before it is locked.
        with contextlib.suppress(OSError, NotImplementedError), FileLock(self.folder / ".lock", timeout=60):
            for other in self.folder.glob(".sweep-*"):
                with contextlib.suppress(Timeout), FileLock(other / "alive", blocking=False):
                    shutil.rmtree(other, ignore_errors=True)
            remove_half_written(self.folder, self.folder / "figure", least=HOUR)
            self.private.mkdir(parents=True, exist_ok=True)
            self.alive.acquire()
        self.private.mkdir(parents=True, exist_ok=True)

    def plan(self, jobs: dict[str, str]) -> None:
        """Keeps the runs that this command is going to start or has found: name → title."""
        with contextlib.suppress(OSError):  # it is only shown
            write_json(self.private / "jobs.json", jobs)

    def planned(self) -> dict[str, str]:
        """The runs of `plan`."""
        with contextlib.suppress(ValueError, OSError):
            return dict(read_json(self.private / "jobs.json", {}))
        return {}

    def note(self, run: str, event: str, text: str = "", line: str = "") -> None:
        """Prints the line, and adds an event of a run to the journal: "started", or one of ENDED.

        text  what the command says of the run at its end
        line  what a process says when the event happens; a command prints the lines of processes on a cluster
        """
        if line:
            print_line(line)
        if self.name:
            noted = {"run": run, "event": event, "text": text, "line": line}
            lock = FileLock(self.private / "journal.lock", timeout=60)
            # On one machine appending is atomic. On a network file system two machines could write to the same place.
            with contextlib.suppress(OSError, NotImplementedError):  # a file system without locks
                if self.private.is_dir():  # otherwise the lock would create a folder that was removed
                    lock.acquire()
            try:
                with (self.private / "journal.jsonl").open("a", encoding="utf-8") as journal:
                    # Begins a line: a full disk may have cut the last one short.
                    journal.write("\n" + json.dumps(noted, ensure_ascii=False) + "\n")
            except OSError:  # a full disk, or a folder that was removed
                UNWRITTEN.append(noted)
            finally:
                lock.release()

    def found(self, config: Config) -> float | None:
        """The loss of the run with these settings if it is finished, which is noted and printed; None if it is not."""
        run = self.folder / identity(config)
        facts = status(run)
        if facts["state"] != "finished" or not whole(run / "rows.json"):
            return None
        other = "" if facts["git"] == provenance.revision() else f", made at another revision ({facts['git']})"
        self.note(run.name, "found", line=f"found     {title(run.name, config)}{other}")
        return float(facts["loss"])

    def elsewhere(self) -> list[str]:
        """Runs that this command has left to another process."""
        return [run for run, event in self.last().items() if event["event"] == "skipped"]

    def wait(self, runs: Iterable[str]) -> None:
        """Waits until no process works on any of the runs."""
        for run in runs:
            while busy(self.folder / run):
                time.sleep(PAUSE)

    def events(self) -> list[dict[str, str]]:
        """The journal so far."""
        path = self.private / "journal.jsonl"
        events = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):  # a full disk cut it short
                events.append(json.loads(line))
        return events + UNWRITTEN

    def last(self) -> dict[str, dict[str, str]]:
        """The last event of each run, in the order in which the runs were first mentioned."""
        return {event["run"]: event for event in self.events()}

    def attempts(self, run: str) -> int:
        """How many times this command has started the run, without those that were interrupted: a run whose time on a
        cluster is up goes on from its checkpoint."""
        own = [event["event"] for event in self.events() if event["run"] == run]
        return own.count("started") - own.count("interrupted")

    def ask_to_stop(self, patience: float = 30.0) -> None:
        """Requests all workers to save a checkpoint and stop; waits until they have, for at most `patience` seconds."""
        with contextlib.suppress(OSError):
            (self.private / "stop").touch()
        limit = time.monotonic() + patience
        while self.unfinished() and time.monotonic() < limit:
            time.sleep(0.1)

    def asked_to_stop(self) -> bool:
        """Whether `ask_to_stop` was called, in whichever process."""
        return (self.private / "stop").exists()

    def unfinished(self) -> list[str]:
        """Runs that were started and have not ended."""
        return [run for run, event in self.last().items() if event["event"] not in ENDED]

    def end(self) -> None:
        """Removes the journal."""
        self.alive.release()
        UNWRITTEN.clear()
        shutil.rmtree(self.private, ignore_errors=True)


def current(folder: Path) -> Sweep:
    """The sweep of the command that this process belongs to."""
    return Sweep(folder, os.environ.get(ENVIRONMENT, ""))
