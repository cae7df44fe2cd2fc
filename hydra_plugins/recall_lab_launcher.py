"""The launchers of `recall-lab run -m`, found by Hydra in this folder: worker processes on this machine, Slurm, Ray.

Whatever Hydra app is started in this environment imports this file; what only a sweep needs is imported by its methods.
"""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class Runs(Launcher):
    """Does the runs of a sweep from their settings."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from recall_lab.cli import plan
        from recall_lab.cli.base import sweep_folder

        loader = self.hydra_context.config_loader
        jobs = [
            (plan.settings(loader, self.config, words, number), number)
            for number, words in enumerate(job_overrides, initial_job_idx)
        ]
        returned = []
        for words, loss in zip(job_overrides, self.losses(jobs, sweep_folder(self.config)), strict=True):
            one = JobReturn(overrides=list(words), status=JobStatus.COMPLETED)
            one.return_value = loss
            returned.append(one)
        return returned

    @abstractmethod
    def losses(self, jobs: list[tuple[dict[str, Any], int]], folder: Path) -> list[float]:
        """Does the runs with these settings and numbers in the sweep's folder, and returns their losses."""


class Workers(Runs):
    """Parallel processes on this machine; one that dies is replaced."""

    def __init__(self, n_jobs: int) -> None:
        self.n_jobs = n_jobs

    def losses(self, jobs: list[tuple[dict[str, Any], int]], folder: Path) -> list[float]:
        from recall_lab import workers
        from recall_lab.cli import plan

        return workers.run_all(jobs, folder, plan.at_a_time(self.config) or plan.cores(), plan.cores())


class Slurm(Runs):
    """Jobs of Slurm, by submitit: one array for a sweep; a job whose time is up is requeued and resumes its run."""

    def __init__(
        self,
        n_jobs: int,
        partition: str | None,
        timeout_min: int,
        mem_gb: float | None,
        cpus: int,
        gpus: int,
        requeues: int,
        signal_delay_s: int,
        setup: list[str],
        options: dict[str, Any],
        cluster: str,
    ) -> None:
        self.options = {
            "n_jobs": n_jobs,
            "partition": partition,
            "timeout_min": timeout_min,
            "mem_gb": mem_gb,
            "cpus": cpus,
            "gpus": gpus,
            "requeues": requeues,
            "signal_delay_s": signal_delay_s,
            "setup": list(setup),
            "options": dict(options),
            "cluster": cluster,
        }

    def losses(self, jobs: list[tuple[dict[str, Any], int]], folder: Path) -> list[float]:
        from recall_lab.cluster import base, slurm

        return base.run_all(slurm.Slurm, self.options, jobs, folder)


class Ray(Runs):
    """Tasks of a Ray cluster, or of one that is started on this machine for the sweep."""

    def __init__(self, n_jobs: int | None, address: str | None, cpus: int, gpus: float, mem_gb: float | None) -> None:
        self.options = {"n_jobs": n_jobs, "address": address, "cpus": cpus, "gpus": gpus, "mem_gb": mem_gb}

    def losses(self, jobs: list[tuple[dict[str, Any], int]], folder: Path) -> list[float]:
        from recall_lab.cluster import base, ray

        return base.run_all(ray.Ray, self.options, jobs, folder)
