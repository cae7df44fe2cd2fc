"""`recall-lab clean`: deletes checkpoints and failed runs; without a flag it only prints their number and size."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from recall_lab import folders
from recall_lab.folders import Busy, Run, locked
from recall_lab.overview import bytes_in_words, size

FAILED = ("failed", "died")
"""States of runs that the flag --failed deletes."""


def clean(folder: str, checkpoints: bool = False, failed: bool = False) -> str:
    """Describes what can be deleted in a sweep's folder, and deletes what the flags name.

    checkpoints  the weights of finished runs, which `recall-lab probe` needs; their results stay
    failed       the folders of failed runs

    A run that a process is working on is kept. Raises folders.ForeignFolder where this is not a sweep's folder.
    """
    runs = folders.runs(Path(folder))
    finished = [run for run in runs if run.status["state"] == "finished" and any(map(size_of, weights(run)))]
    broken = [run for run in runs if run.status["state"] in FAILED]
    return "\n".join(
        [
            _part("checkpoints of finished runs", "--checkpoints", finished, weights, checkpoints),
            _part("failed runs", "--failed", broken, lambda run: [run.path], failed),
        ]
    )


def weights(run: Run) -> list[Path]:
    """Where a run keeps weights: its checkpoint, and those of every validation."""
    return [run.path / "checkpoint.pt", run.path / "weights"]


def size_of(path: Path) -> int:
    """Bytes of a file or folder; 0 where there is none."""
    return size(path) if path.is_dir() else path.stat().st_size if path.exists() else 0


def _part(what: str, flag: str, runs: Sequence[Run], paths: Callable[[Run], list[Path]], wanted: bool) -> str:
    """The line of one kind of files. wanted: delete them."""
    found = bytes_in_words(sum(size_of(path) for run in runs for path in paths(run)))
    if not runs or not wanted:
        return f"{what}: {len(runs)}, {found}" + (f"; {flag} deletes them" if runs else "")
    kept = 0
    for run in runs:
        try:
            with locked(run.path):
                for path in paths(run):
                    if path.is_dir():
                        shutil.rmtree(path)
                    else:
                        path.unlink(missing_ok=True)
        except Busy:
            kept += 1
    left = f"; kept, because another process is working on them: {kept}" if kept else ""
    return f"{what}: {len(runs) - kept} of {len(runs)} deleted, of {found}{left}"
