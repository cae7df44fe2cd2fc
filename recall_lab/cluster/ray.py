"""Ray."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recall_lab.checks import number, whole_number
from recall_lab.cluster.base import Answer, Options, Run, Work, environment, extra
from recall_lab.messages import one_line
from recall_lab.sweep import ATTEMPTS


class Ray:
    """Tasks of Ray. options: see conf/hydra/launcher/ray.yaml. Raises ValueError where Ray is not installed, cannot be
    reached, or gets impossible options."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.ray = extra("ray", "ray")
        self.at_a_time, cpus, memory = options["n_jobs"], options["cpus"], options["mem_gb"]
        if self.at_a_time is not None:
            whole_number("hydra.launcher.n_jobs", self.at_a_time)
        number("hydra.launcher.gpus", options["gpus"], least=0)
        if options["address"] is None:
            # Otherwise Ray writes a token into the home folder. The cluster belongs to this command, on this machine.
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        with environment(cpus) as own:
            try:
                _answers(options["address"])
                self.ray.init(
                    options["address"] or "local",
                    include_dashboard=False if options["address"] is None else None,
                    log_to_driver=False,
                    logging_level="ERROR",
                    runtime_env={"env_vars": own},
                )
            except (OSError, RuntimeError) as error:
                raise ValueError(f"hydra.launcher.address={options['address']}: {one_line(error)}") from error
        wanted = {"num_cpus": cpus, "num_gpus": options["gpus"], "memory": memory and int(memory * 2**30)}
        # What dies is started again, and resumes from its checkpoint.
        self.do = self.ray.remote(max_retries=ATTEMPTS - 1, **wanted)(do)

    def start(self, runs: Sequence[Run]) -> list[Any]:
        """Starts the tasks."""
        work = Work()
        return [self.do.remote(work, *run) for run in runs]

    def ended(self, job: Any) -> bool:
        """Whether the task has ended."""
        return bool(self.ray.wait([job], timeout=0)[0])

    def answer(self, job: Any) -> Answer | str:
        """What the task returned, or Ray's error."""
        try:
            return dict(self.ray.get(job))
        except self.ray.exceptions.RayError as error:
            return one_line(error)

    def cancel(self, jobs: Sequence[Any]) -> None:
        """Ends tasks, as Ctrl-C does."""
        for job in jobs:
            self.ray.cancel(job)

    def close(self, clean: bool) -> None:
        """Leaves the cluster; ends one that this command has started."""
        self.ray.shutdown()


def _answers(address: str | None) -> None:
    """Raises OSError where nobody listens at HOST:PORT: Ray itself tries for minutes."""
    host, _, port = (address or "").rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()


def do(work: Work, *run: Any) -> Answer:
    """The work, as a function: Ray takes no other callable."""
    return work(*run)
