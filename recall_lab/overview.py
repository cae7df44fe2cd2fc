"""State, progress and time left of every run of a sweep, from the files in its folder: also while it is being run."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from recall_lab.files import read_json
from recall_lab.folders import Run, busy, runs, status
from recall_lab.sweep import ENDED, Sweep
from recall_lab.times import in_words

STATES = ("running", "done", "failed", "interrupted", "new")


@dataclass(frozen=True)
class Entry:
    """One run. What is not known is None."""

    name: str
    title: str
    """Mixer, task and seed."""
    state: str
    """One of STATES. interrupted: its process was stopped or killed, or its status cannot be read; failed: it failed,
    died or lacks results; new: it has not started yet."""
    phase: str = ""
    """training, validation, test or probes."""
    done: int = 0
    total: int = 0
    accuracy: float | None = None
    """At the last validation; R² in a continuous task."""
    left: float | None = None
    """Seconds left in the phase."""
    seconds: float = 0.0
    """How long the run has taken, without interruptions."""

    @property
    def kind(self) -> str:
        """Mixer and task."""
        return self.title.rpartition(", seed ")[0]

    @property
    def progress(self) -> str:
        """Phase and parts done, in words: "step 120 of 1000"."""
        if not self.total or self.state == "done":
            return ""
        return f"{'step' if self.phase == 'training' else f'{self.phase} cell'} {self.done} of {self.total}"


def entry(run: Run) -> Entry:
    """The entry of a run, read from its files."""
    facts = run.status
    known = {"finished": "done", "running": "running", "interrupted": "interrupted", "damaged": "interrupted"}
    state = known.get(facts["state"], "failed")
    if state == "running" and not busy(run.path):
        state = "interrupted"
    return Entry(
        run.name,
        run.describe().removeprefix(run.name).strip(),
        state,
        str(facts.get("phase", "")),
        int(facts.get("done", 0)),
        int(facts.get("total", 0)),
        facts.get("accuracy", _last_accuracy(run) if state == "done" else None),
        facts.get("left") if state == "running" else None,
        float(facts["seconds"]),
    )


def _last_accuracy(run: Run) -> float | None:
    try:
        curve: list[dict[str, Any]] = read_json(run.path / "curve.json", [])
        return float(curve[-1]["accuracy"]) if curve else None
    except (ValueError, OSError, LookupError, TypeError):
        return None


def entries(folder: Path) -> list[Entry]:
    """Every run of the sweep, in the order in which they were started, then those that commands are going to start.

    Raises folders.ForeignFolder where this is not a sweep's folder.
    """
    found = [entry(run) for run in runs(folder)]
    known = {each.name for each in found}
    planned = {name: title for private in sorted(folder.glob(".sweep-*"))
               for name, title in Sweep(folder, private.name.removeprefix(".sweep-")).planned().items()}  # fmt: skip
    return found + [Entry(name, title, "new") for name, title in planned.items() if name not in known]


def of_command(sweep: Sweep, ended: dict[str, Entry]) -> list[Entry]:
    """The runs of one command, from its journal. `ended` caches those that have ended, so each is read once."""
    titles, last = sweep.planned(), sweep.last()
    found = []
    for name in {**titles, **last}:
        event = last.get(name, {}).get("event", "new")
        each = ended.get(name)
        if event == "new":
            each = Entry(name, titles[name], "new")
        elif each is None or event not in ENDED:
            path = sweep.folder / name
            each = entry(Run(path, status(path)))
            if event in ENDED and event != "skipped":  # a skipped run is another process's
                ended[name] = each
        found.append(each)
    return found


def time_left(found: Sequence[Entry]) -> float | None:
    """Seconds until all runs are done, at the present number of parallel runs; None where too little is known.

    A new run is expected to take as long as the finished ones of its mixer and task, or else as all finished ones.
    """
    made: dict[str, list[float]] = {}
    for each in found:
        if each.state == "done":
            made.setdefault(each.kind, []).append(each.seconds)
    average = mean(seconds for own in made.values() for seconds in own) if made else None
    expected = []
    for each in found:
        if each.state in ("done", "failed"):
            continue
        left, whole = each.left, mean(made[each.kind]) if each.kind in made else average
        if left is None and whole is not None:
            left = max(0.0, whole - each.seconds)
        if left is None:
            return None
        expected.append(left)
    return sum(expected) / max(1, sum(each.state == "running" for each in found))


def totals(found: Sequence[Entry]) -> str:
    """How many runs are in which state, and the time left, in one line."""
    states = Counter(each.state for each in found)
    text = ", ".join(f"{states[state]} {state}" for state in STATES if states[state]) or "no runs yet"
    if states["running"]:
        text += f"; time left: {in_words(time_left(found))}"
    return text


def size(path: Path) -> int:
    """Bytes of the files in a folder, without those that are deleted meanwhile."""
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.lstat().st_size if not file.is_dir() else 0
        except OSError:
            continue
    return total


def bytes_in_words(number: float) -> str:
    """A number of bytes: "12 kB", "3.4 MB"."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if number >= 10 or unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """The rows as lines with aligned columns."""
    rows = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def line(each: Entry) -> list[str]:
    """A run's columns: name, title, state, progress, accuracy, time left."""
    accuracy = "" if each.accuracy is None else f"accuracy {each.accuracy:.3f}"
    left = f"{in_words(each.left)} left" if each.left is not None else ""
    return [each.name, each.title, each.state, each.progress, accuracy, left]
