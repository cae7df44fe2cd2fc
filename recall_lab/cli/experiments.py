"""Used by the commands that run experiments: settings that have an effect, the runs, and their results."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from recall_lab import folders, results
from recall_lab.checks import require
from recall_lab.cli.base import compose, launch, no_effect, parse, quoted
from recall_lab.messages import print_line


@dataclass(frozen=True)
class Job:
    """One `recall-lab run` of an experiment."""

    name: str
    """The name of its folder."""
    experiment: str
    words: Sequence[str]
    """Its settings."""


def run(jobs: Sequence[Job], folder: Path, config_dir: str | None) -> list[str]:
    """Runs the jobs one after another, each in FOLDER/NAME. Returns one line for each job that failed."""
    failed = []
    for number, job in enumerate(jobs, 1):
        print_line(f"experiment {number} of {len(jobs)}: {job.name}")
        failed += run_one(job, folder, config_dir)
    return failed


def run_one(job: Job, folder: Path, config_dir: str | None) -> list[str]:
    """Runs a job in FOLDER/NAME; runs that are finished are not repeated. Returns a line if it failed."""
    target = [f"root={quoted(str(folder))}", f"name={job.name}", "report=false"]
    code = launch([*options(config_dir), f"experiment={job.experiment}", *target, *job.words])
    return [f"experiment {job.name}: exit status {code}"] if code else []


def options(config_dir: str | None) -> list[str]:
    """The option of the command line that names a folder of configuration."""
    return ["--config-dir", config_dir] if config_dir else []


def effective(
    experiments: Iterable[str], settings: Sequence[str], config_dir: str | None, choices: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Experiment → those of the settings that have an effect in its kind of run.

    choices  what is chosen besides the experiment (mixer=linear)

    Raises ValueError for a setting that has none in any of the experiments.
    """
    configs = {name: compose([f"experiment={name}", *choices], config_dir) for name in experiments}
    found: dict[str, list[str]] = {name: [] for name in configs}
    for word in settings:
        (override,) = parse([word])
        reasons = {name: no_effect(config, override.key_or_group) for name, config in configs.items()}
        require(not all(reasons.values()), next(iter(reasons.values()), ""))
        for name, reason in reasons.items():
            found[name] += [] if reason else [word]
    return found


@dataclass(frozen=True)
class Measured:
    """The results of one experiment."""

    folder: Path
    every: pd.DataFrame
    """The rows of all runs."""
    chosen: pd.DataFrame
    """Those selected on validation."""
    over: tuple[str, ...]
    """The settings that were selected."""


def measured(folder: Path, failed: list[str]) -> Measured | None:
    """The results of the runs in a folder, if it has any; damaged files are added to `failed`."""
    every = rows_of(folder, failed)
    if every is None:
        return None
    over = results.selected_settings(folder)
    return Measured(folder, every, results.select(every, over), over)


def rows_of(folder: Path, failed: list[str]) -> pd.DataFrame | None:
    """The rows of all runs in a folder; None where there are none."""
    runs = folders.runs(folder) if (folder / folders.MARK).exists() else []
    if not any(one.has_rows for one in runs):
        return None
    every, _, damaged = results.gather([folder], runs)
    failed += damaged
    return every


def collect(found: dict[str, Measured]) -> pd.DataFrame:
    """The selected rows of all experiments, with the experiment's name as a column."""
    parts = [own.chosen.assign(experiment=name) for name, own in found.items()]
    return pd.concat(parts, ignore_index=True).copy()  # one block of memory: many columns are slow in several
