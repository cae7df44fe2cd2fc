"""The worker processes of a sweep on one machine. Each does one run after another. A worker that dies is replaced, and
the other runs go on.

A worker reads jobs from its standard input and writes replies to its standard output, each a line of JSON.
"""

import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from recall_lab.folders import Config, identity, title
from recall_lab.messages import print_line
from recall_lab.sweep import ATTEMPTS, ENDED, FAILED, UNWRITTEN, current

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Environment variables with the number of threads of numerical libraries. torch's own number is set by each run."""

PATIENCE = 5.0
"""Seconds that a worker is given to end, before and after SIGTERM."""

PROGRAM = """import signal
for name in {"SIGINT", "SIGHUP"} & set(dir(signal)):  # of the terminal, to all; the command tells its workers to stop
    signal.signal(getattr(signal, name), signal.SIG_IGN)
from recall_lab.runner import serve
serve()"""
"""What a worker process runs."""


def variables(threads: int) -> dict[str, str]:
    """The environment variables of a process that does runs: those of this one, its Python path, and the number of
    threads of numerical libraries, unless it is given."""
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    return dict.fromkeys(THREADS, str(threads)) | os.environ | {"PYTHONPATH": paths}


class Worker:
    """A worker process. threads: of its numerical libraries."""

    def __init__(self, threads: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=variables(threads),
        )

    def do(self, job: dict[str, Any]) -> float | None:
        """Does a job and forwards its output. Returns its loss; None if the process died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # the pipe is closed, or the last line is cut short
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                reply = json.loads(line)
                if "loss" in reply:
                    UNWRITTEN.extend(reply["unwritten"])
                    return float(reply["loss"])
                if reply["stream"] == "stdout":
                    print_line(reply["text"])
                else:
                    sys.stderr.write(reply["text"] + "\n")
        return None

    def end(self) -> None:
        """Ends the process: at once if it is idle, otherwise after PATIENCE by SIGTERM, which saves a checkpoint."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        for stop in (self.process.terminate, self.process.kill):
            try:
                self.process.wait(PATIENCE)
                break
            except subprocess.TimeoutExpired:
                stop()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Pool:
    """One worker for each thread that calls `do`."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.folder, self.threads = folder, threads
        self.sweep = current(folder)
        self.mine = threading.local()
        self.numbers = itertools.count()
        self.workers: list[Worker] = []
        self.lock = threading.Lock()
        self.closed = False

    def do(self, job: tuple[Config, int]) -> float:
        """The loss of a run. If a worker dies, another one resumes the run, at most sweep.ATTEMPTS times."""
        settings, _ = job
        name = identity(settings)
        if not hasattr(self.mine, "number"):
            self.mine.number = next(self.numbers)  # of the worker: each keeps its GPU, so that no GPU is idle
        for _ in range(ATTEMPTS + 1):  # the last attempt gives the run up
            worker = self._worker()
            if worker is None:
                return FAILED
            loss = worker.do({"settings": settings, "folder": str(self.folder), "number": self.mine.number})
            if loss is not None:
                return loss
            self.mine.worker = None
            if not self.sweep.asked_to_stop():
                print_line(f"killed    {title(name, settings)}: its process ended; another one resumes the run")
        if self.sweep.last().get(name, {}).get("event") not in ENDED:
            self.sweep.note(name, "died", f"{self.folder / name} died: no process for it could be started")
        return FAILED

    def _worker(self) -> Worker | None:
        """The worker of this thread, a new one if it has none; None if the sweep is to stop."""
        with self.lock:
            if self.closed or self.sweep.asked_to_stop():
                return None
            if getattr(self.mine, "worker", None) is None:
                self.mine.worker = Worker(self.threads)
                self.workers.append(self.mine.worker)
            return self.mine.worker

    def close(self) -> None:
        """Ends all workers."""
        with self.lock:
            self.closed = True
        with ThreadPoolExecutor(max(1, len(self.workers))) as threads:
            list(threads.map(Worker.end, self.workers))


def run_all(jobs: Sequence[tuple[Config, int]], folder: Path, parallel: int, cores: int) -> list[float]:
    """Does all jobs, `parallel` of them at a time, and returns their losses.

    jobs   settings and number of each run
    cores  number of cores, divided among the workers
    """
    parallel = max(1, min(parallel, len(jobs)))
    pool = Pool(folder, max(1, cores // parallel))
    threads = ThreadPoolExecutor(parallel)
    try:
        return list(threads.map(pool.do, jobs))
    finally:
        pool.close()
        threads.shutdown(cancel_futures=True)


class Lines:
    """A text stream whose lines are sent to the command as replies."""

    def __init__(self, name: str, replies: io.TextIOBase) -> None:
        self.name, self.replies, self.begun = name, replies, ""

    def write(self, text: str) -> int:
        *lines, self.begun = (self.begun + text).split("\n")
        for line in lines:
            self.replies.write(json.dumps({"stream": self.name, "text": line}) + "\n")
        return len(text)

    def flush(self) -> None:
        """Nothing: every line is sent when it is complete."""


def serve(execute: Callable[[Config, Path, int], float]) -> None:
    """The work of a worker process, until its standard input ends. execute: does a run and returns its loss."""
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # libraries may write to stdout, which is for replies only
    sys.stdout, sys.stderr = Lines("stdout", replies), Lines("stderr", replies)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            loss = execute(job["settings"], Path(job["folder"]), job["number"])
            replies.write(json.dumps({"loss": loss, "unwritten": UNWRITTEN}) + "\n")
            UNWRITTEN.clear()
        except (KeyboardInterrupt, BrokenPipeError):
            return
