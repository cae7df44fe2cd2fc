"""The launcher of `recall-lab run -m`, found by Hydra in this folder: worker processes on this machine.

Whatever Hydra app is started in this environment imports this file; what only a sweep needs is imported by its methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class Workers(Launcher):
    """Does the runs of a sweep in parallel processes; one that dies is replaced (see `recall_lab.workers`)."""

    def __init__(self, n_jobs: int) -> None:
        self.n_jobs = n_jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from recall_lab import workers
        from recall_lab.cli import plan
        from recall_lab.cli.base import sweep_folder

        loader = self.hydra_context.config_loader
        jobs = [
            (plan.settings(loader, self.config, words, number), number)
            for number, words in enumerate(job_overrides, initial_job_idx)
        ]
        losses = workers.run_all(
            jobs, sweep_folder(self.config), plan.at_a_time(self.config) or plan.cores(), plan.cores()
        )
        returned = []
        for words, loss in zip(job_overrides, losses, strict=True):
            one = JobReturn(overrides=list(words), status=JobStatus.COMPLETED)
            one.return_value = loss
            returned.append(one)
        return returned


@dataclass
class WorkersConf:
    """The options of the launcher."""

    _target_: str = f"{__name__}.{Workers.__name__}"
    n_jobs: int = -1
    """How many runs are done at a time; -1: as many as there are cores, -2: one less."""


ConfigStore.instance().store(group="hydra/launcher", name="workers", node=WorkersConf, provider="recall_lab")
