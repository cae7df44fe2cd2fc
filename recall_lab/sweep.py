"""What the processes of one command know of each other: which runs have started and ended, and whether to stop.

All of it is in files of the sweep's folder, so that it works for workers on this machine and on others.
"""

import contextlib
import json
import os
import shutil
import time
from pathlib import Path

ENVIRONMENT = "RECALL_LAB_SWEEP"
"""Environment variable that tells worker processes which command they belong to."""

ENDED = ("finished", "found", "incomplete", "failed", "interrupted", "skipped", "died")
"""Events after which nobody works on a run."""

ATTEMPTS = 3
"""How often one command starts a run whose process is killed."""


class Sweep:
    """The journal and the stop sign of one command.

    folder  the sweep's folder
    name    tells the command from others that work in the same folder at the same time
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.private = folder / f".sweep-{name}"

    def begin(self) -> None:
        """Called once, before any worker."""
        self.private.mkdir(parents=True, exist_ok=True)

    def note(self, run: str, event: str, text: str = "") -> None:
        """Adds an event of a run to the journal: "started", or one of ENDED. Appending one line is atomic."""
        if self.private.is_dir():
            line = json.dumps({"run": run, "event": event, "text": text}, ensure_ascii=False)
            with (self.private / "journal.jsonl").open("a", encoding="utf-8") as journal:
                journal.write(line + "\n")

    def events(self) -> list[dict[str, str]]:
        """The journal so far."""
        path = self.private / "journal.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def last(self) -> dict[str, dict[str, str]]:
        """The last event of each run, in the order in which the runs were first mentioned."""
        return {event["run"]: event for event in self.events()}

    def attempts(self, run: str) -> int:
        """How often this command has started the run."""
        return sum(event["run"] == run and event["event"] == "started" for event in self.events())

    def ask_to_stop(self, patience: float = 30.0) -> None:
        """Asks all workers to save a checkpoint and stop, and waits until they have, at most `patience` seconds."""
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
        shutil.rmtree(self.private, ignore_errors=True)


def current(folder: Path) -> Sweep:
    """The sweep of the command that this process belongs to."""
    return Sweep(folder, os.environ.get(ENVIRONMENT, ""))
