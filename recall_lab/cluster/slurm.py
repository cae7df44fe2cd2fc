"""Slurm, by submitit."""

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recall_lab.checks import choice, require, whole_number
from recall_lab.cluster.base import Answer, Options, Run, Work, environment, extra
from recall_lab.sweep import current

PATIENCE = 30.0
"""Seconds in which jobs on this machine save their runs and end."""

QUEUE_PERIOD = 30.0
"""Seconds between two questions to Slurm about its queue."""


class Slurm:
    """Jobs of Slurm, by submitit: every call of `start` submits one array. options: see conf/hydra/launcher/slurm.yaml.

    Raises ValueError for impossible options, and where submitit or Slurm are not installed.
    """

    def __init__(self, folder: Path, options: Options) -> None:
        submitit = self.submitit = extra("submitit", "slurm")
        limit, delay = options["timeout_min"], options["signal_delay_s"]
        choice("hydra.launcher.cluster", options["cluster"], ("slurm", "local"))
        for name, least in (("n_jobs", 1), ("timeout_min", 1), ("signal_delay_s", 1), ("gpus", 0), ("requeues", 0)):
            whole_number(f"hydra.launcher.{name}", options[name], least)
        require(
            delay < 60 * limit,
            f"hydra.launcher.signal_delay_s={delay}: must be less than hydra.launcher.timeout_min={limit} in seconds",
        )
        self.files = (folder / ".slurm" / current(folder).name).resolve()
        self.cpus = options["cpus"]
        if options["cluster"] == "local":
            self.at_a_time: int | None = options["n_jobs"]
            self.queue: Queue | None = None
            self.executor = submitit.LocalExecutor(self.files, max_num_timeout=options["requeues"])
            own = {"timeout_min": limit}
        else:
            missing = [program for program in ("sbatch", "srun", "squeue", "scancel") if shutil.which(program) is None]
            require(
                not missing,
                f"hydra/launcher=slurm: there is no {''.join(missing[:1])} here; give the command on the cluster",
            )
            self.at_a_time, self.queue = None, Queue()
            self.executor = submitit.SlurmExecutor(self.files, max_num_timeout=options["requeues"])
            own = {
                "job_name": folder.name,
                "time": limit,
                "cpus_per_task": self.cpus,
                "srun_args": [f"--cpus-per-task={self.cpus}"],  # since Slurm 22.05, srun does not take it from sbatch
                "mem": options["mem_gb"] and f"{round(1024 * options['mem_gb'])}MB",
                "partition": options["partition"],
                "array_parallelism": options["n_jobs"],
                "setup": options["setup"],
                "additional_parameters": options["options"],
            }
        own |= {"gpus_per_node": options["gpus"], "signal_delay_s": delay}
        self.executor.update_parameters(**{name: value for name, value in own.items() if value})

    def start(self, runs: Sequence[Run]) -> list[Any]:
        """Submits the jobs. Raises ValueError with what Slurm says where it refuses them."""
        work = Work()
        try:
            with environment(self.cpus), self._without_interrupt(), self.executor.batch():
                jobs = [self.executor.submit(work, *run) for run in runs]
        except self.submitit.core.utils.FailedJobError as error:
            said = "; ".join(line.removeprefix("sbatch: error: ") for line in str(error).splitlines())
            raise ValueError(f"hydra/launcher=slurm: {said}") from error
        return jobs

    @contextlib.contextmanager
    def _without_interrupt(self) -> Iterator[None]:
        """While the block runs, processes start that do not get Ctrl-C: on this machine, the command stops its jobs."""
        if self.queue is not None:
            yield
            return
        old = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, old)

    def ended(self, job: Any) -> bool:
        """Whether the job has a result, or Slurm no longer knows it."""
        if job.paths.result_pickle.exists():
            return True
        return job.done() if self.queue is None else self.queue.lost(job.job_id)

    def answer(self, job: Any) -> Answer | str:
        """What the job returned; or the end of its log, where there is why it did not."""
        log = job.paths.stderr
        said = log.read_text("utf-8", errors="replace") if log.exists() else ""
        if job.paths.result_pickle.exists():
            error = job.exception()
            if error is None:
                return dict(job.result())
            said = str(error).split("-" * 22)[1]  # a traceback, between two rules
        lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it ended without a result"]
        # What Slurm's daemon says of the time or the memory comes before what srun says of the process.
        named = [line for sign in ("Error: ", "error: ", "slurmstepd: error: ") for line in lines if sign in line]
        reason = (named or lines)[-1].rpartition("UncompletedJobError: ")[2].rstrip(".")
        return f"job {job.job_id}: {reason}; see {log}"

    def cancel(self, jobs: Sequence[Any]) -> None:
        """Takes jobs from the queue, or ends them as SIGTERM does."""
        if self.queue is None:
            for job in jobs:
                job._process.send_signal(signal.SIGTERM)
            for job in jobs:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job._process.wait(PATIENCE)
        elif jobs:
            subprocess.run(["scancel", *(job.job_id for job in jobs)], check=False, capture_output=True)

    def close(self, clean: bool) -> None:
        """Deletes submitit's files, unless a log says why a job failed."""
        if clean:
            shutil.rmtree(self.files, ignore_errors=True)
            with contextlib.suppress(OSError):  # another command's are there
                self.files.parent.rmdir()


class Queue:
    """Slurm's queue, which is asked every QUEUE_PERIOD. (sacct needs a database that not every cluster has.)"""

    def __init__(self) -> None:
        self.asked = time.monotonic()
        self.absent: dict[str, int] = {}
        """Job → how many times in a row it was not in the queue."""

    def lost(self, job: str) -> bool:
        """Whether the job was not in the queue two times in a row: over a network, its result may be seen late."""
        self.absent.setdefault(job, 0)
        if time.monotonic() - self.asked >= QUEUE_PERIOD:
            self.asked = time.monotonic()
            asked = ["squeue", "--me", "--array", "--noheader", "--format=%i"]
            done = subprocess.run(asked, check=False, capture_output=True, text=True)
            if done.returncode == 0:  # otherwise Slurm is busy
                present = set(done.stdout.split())
                self.absent = {each: 0 if each in present else times + 1 for each, times in self.absent.items()}
        return self.absent[job] >= 2
