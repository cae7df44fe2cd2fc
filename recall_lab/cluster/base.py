"""The runs of a sweep as jobs of a cluster, whatever cluster it is.

A job does one run, as a worker process on this machine does, in the sweep's folder, which must be on a file system that
the machines share. The command waits for the jobs, and prints what they say in the sweep's journal.
"""

import importlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from recall_lab.checks import require, whole_number
from recall_lab.files import CONFIG_DIR
from recall_lab.folders import Config, identity, title
from recall_lab.messages import print_line
from recall_lab.sweep import ENVIRONMENT, FAILED, UNWRITTEN, WORKER_OF, Sweep, current
from recall_lab.workers import THREADS, variables

PAUSE = 0.5
"""Seconds between two looks at the jobs."""

Run = tuple[Config, str, int]
"""What a job gets: the settings of its run, the sweep's folder, the run's number in the sweep."""

Options = Mapping[str, Any]
"""The options of a launcher."""

Answer = dict[str, Any]
"""What a job returns: the loss, and events that it could not write to the journal."""


class Work:
    """What a job does: a run. It is done in the folder in which the command was given."""

    def __init__(self) -> None:
        self.here = Path.cwd()

    def __call__(self, settings: Config, folder: str, number: int) -> Answer:
        from recall_lab.runner import Stopped, execute

        os.chdir(self.here)
        UNWRITTEN.clear()
        try:
            return {"loss": execute(settings, Path(folder), number), "unwritten": list(UNWRITTEN)}
        except Stopped as stopped:
            # The run is saved. To the signal that announces the end of its time submitit listens, and requeues the job.
            listener = signal.getsignal(stopped.args[0])
            if callable(listener):
                listener(stopped.args[0], None)
            raise

    def checkpoint(self, *run: Any) -> Any:
        """What submitit is to do in a requeued job: the same run again, which resumes from its checkpoint."""
        return extra("submitit", "slurm").helpers.DelayedSubmission(self, *run)


class Engine(Protocol):
    """Where jobs are done."""

    at_a_time: int | None
    """How many jobs it is to be given at a time; None: all, it has a queue."""

    def start(self, runs: Sequence[Run]) -> list[Any]:
        """Starts a job for each run, and returns them."""

    def ended(self, job: Any) -> bool:
        """Whether the job has ended."""

    def answer(self, job: Any) -> Answer | str:
        """What a job that has ended returned, or why it returned nothing."""

    def cancel(self, jobs: Sequence[Any]) -> None:
        """Ends jobs, also those that wait in a queue."""

    def close(self, clean: bool) -> None:
        """Called in the end. clean: no job has died."""


def run_all(
    make: Callable[[Path, Options], Engine], options: Options, runs: Sequence[tuple[Config, int]], folder: Path
) -> list[float]:
    """Does all runs, and returns their losses; prints a line for each when it ends.

    make, options  the engine, and the options of its launcher
    runs           settings and number of each

    Raises ValueError for impossible options, and where the engine cannot be used.
    """
    most = max((settings["threads"] for settings, _ in runs), default=1)
    whole_number("hydra.launcher.cpus", options["cpus"])
    require(options["cpus"] >= most, f"hydra.launcher.cpus={options['cpus']}: must be at least threads={most}")
    engine, sweep = make(folder, options), current(folder)
    losses, clean = [FAILED] * len(runs), True
    waiting = list(range(len(runs)))
    jobs: dict[int, Any] = {}
    printed = len(sweep.events())
    try:
        while waiting or jobs:
            free = len(waiting) if engine.at_a_time is None else engine.at_a_time - len(jobs)
            batch, waiting = waiting[:free], waiting[free:]
            if batch:
                made = engine.start([(runs[i][0], str(folder), runs[i][1]) for i in batch])
                jobs.update(zip(batch, made, strict=True))
            time.sleep(PAUSE)
            ended = [i for i, job in jobs.items() if engine.ended(job)]
            printed = _print_new(sweep, printed)
            for i in ended:
                answer = engine.answer(jobs.pop(i))
                if isinstance(answer, str):
                    clean = False
                    _note_death(sweep, runs[i][0], answer)
                else:
                    losses[i] = answer["loss"]
                    UNWRITTEN.extend(answer["unwritten"])
    finally:
        engine.cancel(list(jobs.values()))
        _print_new(sweep, printed)
        engine.close(clean)
    return losses


def _print_new(sweep: Sweep, printed: int) -> int:
    """Prints what jobs have said since there were `printed` events; returns the number of events now."""
    events = sweep.events()
    for event in events[printed:]:
        if event["line"]:
            print_line(event["line"])
    return len(events)


def _note_death(sweep: Sweep, settings: Config, reason: str) -> None:
    """Notes that a run's job has ended without a result. reason: what the engine says."""
    name = identity(settings)
    last = sweep.last().get(name, {}).get("event", "started")
    if last in ("started", "interrupted"):
        event, verb = ("died", "died") if last == "started" else (last, "was interrupted")
        sweep.note(name, event, f"{sweep.folder / name} {verb}: {reason}")
        print_line(f"{event:<9} {title(name, settings)}: {reason}")


def extra(module: str, name: str) -> Any:
    """A module that only one launcher needs. Raises ValueError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"hydra/launcher={name}: pip install 'recall_lab[{name}]'") from error


@contextmanager
def environment(threads: int) -> Iterator[dict[str, str]]:
    """While the block runs, this process has the environment variables of a worker. Yields those that a run needs."""
    before = dict(os.environ)
    os.environ.update(variables(threads))
    try:
        shared = (*THREADS, "PYTHONPATH", CONFIG_DIR, ENVIRONMENT, WORKER_OF)
        yield {name: os.environ[name] for name in shared if name in os.environ}
    finally:
        os.environ.clear()
        os.environ.update(before)
