"""One run, from its settings to its folder: lock, status, resuming, failure, interruption."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from recall_lab import machine, workers
from recall_lab.building import build, loggers
from recall_lab.checkpoint import Unusable, load
from recall_lab.files import remove_half_written, write_json
from recall_lab.folders import FORMAT, Busy, Config, identity, locked, status, title, write_config
from recall_lab.logger.base import Point, recording
from recall_lab.messages import one_line
from recall_lab.provenance import provenance
from recall_lab.run_log import log, logging_to
from recall_lab.sweep import ATTEMPTS, FAILED, WORKER_OF, Sweep, current, stopping
from recall_lab.train import Interrupted, Scores
from recall_lab.workload import Outcome, Workspace

PARENT = os.getppid()
"""The process that started this one. Once it is gone, getppid gives another number."""

PERIOD = 1.0
"""Seconds between two notes of a run's progress."""


class Stopped(KeyboardInterrupt):
    """A signal stopped this process; the run has been saved."""


def execute(config: Config, parent: Path, job: int | None = None) -> float:
    """Does one run in parent/IDENTITY and returns the validation loss (0 for a run that trains nothing).

    A finished run is left as it is, one that was cut off is resumed from its checkpoint, a failed one is started again.
    An error is written to the folder (status.json, run.log) and to the sweep's journal, and FAILED is
    returned. Raises Stopped if a signal stopped this process.

    job  number of the run in a sweep, by which runs are dealt to the GPUs; None: it is alone on the machine
    """
    sweep = current(parent)
    run = parent / identity(config)
    name = title(run.name, config)
    if sweep.asked_to_stop() or orphaned():
        return FAILED
    try:
        run.mkdir(exist_ok=True)
        with locked(run):
            loss = sweep.found(config)  # by now: another process may have finished it
            return _take(Attempt(config, run, name, sweep, job)) if loss is None else loss
    except Busy:
        line = f"skipped   {name}: another process is working on it"
        sweep.note(run.name, "skipped", f"{run} is being worked on by another process", line)
    except OSError as error:
        sweep.note(run.name, "failed", f"{run} failed: {one_line(error)}", f"failed    {name}")
    return FAILED


def serve() -> None:
    """Does the runs that the command sends to this worker process."""
    global PARENT
    PARENT = int(os.environ[WORKER_OF])  # it may have ended while this process started
    workers.serve(execute)


class Attempt:
    """One process's attempt at one run.

    Keeps status.json up to date. `legs` lists start and seconds of every attempt, since a run may be interrupted and
    resumed; `seconds` is their sum.
    """

    def __init__(self, config: Config, run: Path, name: str, sweep: Sweep, job: int | None) -> None:
        self.config, self.run, self.name, self.sweep, self.job = config, run, name, sweep, job
        self.alone = job is None
        self.before = status(run)
        self.began = time.perf_counter()
        resumed = self.before["state"] != "failed"
        self.earlier: list[dict[str, Any]] = list(self.before.get("legs", [])) if resumed else []
        self.leg = {"started": now(), "seconds": 0.0}
        self.progress = Progress()
        self.facts: dict[str, Any] = {
            "started": self.earlier[0]["started"] if self.earlier else self.leg["started"],
            "sweep": sweep.name,
            **provenance(),
            "threads": config["threads"],
            "device": "",
        }

    def note(self, state: str, least: float = 0.0, **more: Any) -> None:
        """Writes status.json, with the progress so far. least: a lower bound of the run's seconds."""
        self.leg["seconds"] = round(time.perf_counter() - self.began, 3)
        legs = [*self.earlier, self.leg]
        seconds = max(round(sum(float(leg["seconds"]) for leg in legs), 3), round(least, 3))
        content = {"format": FORMAT, "state": state, **self.facts, "seconds": seconds, "legs": legs}
        write_json(self.run / "status.json", content | self.progress.facts | more)


class Progress:
    """How far a run has come: the phase (see Workspace.progress), the parts of it that are done, all of them, and the
    seconds left in it; the training step, and the accuracy at the last validation. In `facts`, as far as it is known.
    """

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.first = (0, 0.0)
        """Parts done, and the time, at the first report of the phase."""
        self.shown = -math.inf

    def __call__(self, phase: str, done: int, total: int) -> bool:
        """Takes a report; returns whether it is to be shown: once a second, and at the start of a phase."""
        now = time.monotonic()
        if self.facts.get("phase") != phase:
            self.first, self.shown = (done, now), -math.inf
            self.facts.pop("left", None)
        elif done > self.first[0]:
            self.facts["left"] = round((now - self.first[1]) / (done - self.first[0]) * (total - done), 1)
        self.facts |= {"phase": phase, "done": done, "total": total}
        if phase == "training":
            self.facts["step"] = done
        if now - self.shown < PERIOD:
            return False
        self.shown = now
        return True


def _take(attempt: Attempt) -> float:
    """Gives up a run whose process was killed ATTEMPTS times, works on any other."""
    run = attempt.run
    if attempt.sweep.attempts(run.name) >= ATTEMPTS:
        attempt.note("died", error=f"its process was killed {ATTEMPTS} times")
        attempt.sweep.note(attempt.run.name, "died", f"{run} died: its process was killed {ATTEMPTS} times")
        return FAILED
    remove_half_written(run, run / "weights")
    if attempt.before["state"] == "failed":
        (run / "checkpoint.pt").unlink(missing_ok=True)
    write_config(run, attempt.config)
    attempt.sweep.note(run.name, "started")
    attempt.note("running")
    with logging_to(run / "run.log") as warnings, stop_signal(attempt.sweep) as stop:
        return _work(attempt, stop, warnings)


def _work(attempt: Attempt, stop: "StopSignal", warnings: list[str]) -> float:
    try:
        outcome = _outcome(attempt, stop)
    except (Interrupted, KeyboardInterrupt) as error:
        attempt.note("interrupted")
        attempt.sweep.note(attempt.run.name, "interrupted", f"{attempt.run} was interrupted")
        log.warning("interrupted")
        if stop.signal is None and isinstance(error, Interrupted):
            return FAILED  # the sweep was stopped: the process that got the signal reports it
        raise Stopped(stop.signal or signal.SIGINT) from error
    except Exception as error:
        log.exception("failed")
        attempt.note("failed", error=one_line(error))
        line = "" if attempt.alone else f"failed    {attempt.name}"
        attempt.sweep.note(attempt.run.name, "failed", f"{attempt.run} failed: {one_line(error)}", line)
        return FAILED
    state = "incomplete" if outcome.missing else "finished"
    attempt.note(state, least=stop.trained, loss=outcome.loss, missing=outcome.missing)
    log.info(state)
    reasons = "; ".join(outcome.missing)
    text = f"{attempt.run} is incomplete: {reasons}" if outcome.missing else "\n".join(warnings)
    seconds = time.perf_counter() - attempt.began
    attempt.sweep.note(attempt.run.name, state, text, f"{state:<9} {attempt.name}: {outcome.summary}, {seconds:.0f} s")
    return FAILED if outcome.missing else outcome.loss


def _outcome(attempt: Attempt, stop: "StopSignal") -> Outcome:
    """Builds the workload, runs it and writes its rows."""
    config = attempt.config
    device = machine.prepare(config["device"], config["threads"], config["deterministic"], attempt.job)
    attempt.facts["device"] = str(device)
    workload = build(config)
    checkpoint = attempt.run / "checkpoint.pt"

    def advance(point: Scores) -> None:
        stop.trained = float(point["seconds"])
        attempt.progress.facts["accuracy"] = point["accuracy"]
        attempt.note("running")
        logs.point(point)

    def progress(phase: str, done: int, total: int) -> None:
        if attempt.progress(phase, done, total):
            with contextlib.suppress(OSError):  # a full disk ends the run where it would lose something
                attempt.note("running")

    space = Workspace(attempt.run, device, advance, stop, progress)
    with recording(loggers(config.get("logger", [])), config, attempt.run, _saved_curve(checkpoint)) as logs:
        try:
            outcome = workload.run(space)
        except Unusable as error:
            log.warning("%s; it is deleted, and training starts from the beginning", str(error).partition(";")[0])
            checkpoint.unlink()
            outcome = workload.run(space)
        write_json(attempt.run / "rows.json", {"format": FORMAT, "rows": outcome.rows})
        logs.table(outcome.rows)
    return outcome


def _saved_curve(checkpoint: Path) -> list[Point]:
    """The points of the training curve in the checkpoint, if it can be read."""
    with contextlib.suppress(OSError, Unusable):
        return list(load(checkpoint, torch.device("cpu")).get("curve", []))
    return []


class StopSignal:
    """Whether the run should stop: this process got a signal, the sweep was stopped, or its parent ended."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.signal: int | None = None
        self.trained = 0.0
        """Seconds of training up to the last validation."""

    def __call__(self) -> bool:
        return self.signal is not None or orphaned() or self.sweep.asked_to_stop()

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: the first signal stops the run at its next step, the second one at once."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number


def orphaned() -> bool:
    """Whether this process is a worker and the command that started it is gone (kill −9): nobody waits for its runs."""
    worker = os.environ.get(WORKER_OF, str(os.getpid())) != str(os.getpid())
    return worker and os.getppid() != PARENT


@contextmanager
def stop_signal(sweep: Sweep) -> Iterator[StopSignal]:
    """While the block runs, the signals of `stopping` and of a cluster stop the run at its next step. Only a main
    thread gets signals."""
    stop = StopSignal(sweep)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    old = {number: signal.signal(number, stop.receive) for number in (*stopping(), *_announcing())}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _announcing() -> list[signal.Signals]:
    """The signals with which a cluster announces the end of a job's time: those that somebody listens to."""
    known = [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
    return [number for number in known if callable(signal.getsignal(number))]


def now() -> str:
    """The time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
