"""The sweeper of `recall-lab run -m`, found by Hydra in this folder, where it looks for plugins.

Whatever Hydra app is started in this environment imports this file; what only a sweep needs is imported by its methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf.errors import OmegaConfBaseException


class Unfinished(BasicSweeper):
    """Hydra's own sweeper: every combination of values. It does not launch the jobs whose runs are finished.

    Like Hydra's, it composes the configuration of every job before the first one is launched.
    """

    def is_done(self) -> bool:
        """Whether no batch with unfinished runs is left."""
        while not super().is_done():
            self.unfinished = self._unfinished(super().get_job_batch())
            if self.unfinished:
                return False
        return True

    def get_job_batch(self) -> Sequence[Sequence[str]]:
        """The unfinished jobs of the batch that `is_done` found."""
        return self.unfinished

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: `is_done` has composed the configurations, which raises the errors that Hydra looks for here."""

    def _unfinished(self, batch: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
        from recall_lab.cli.base import job

        assert self.hydra_context is not None
        assert self.config is not None
        found = []
        try:
            for overrides in batch:
                composed = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
                HydraConfig.instance().set_config(composed)  # so that ${hydra:…} can be resolved
                settings, sweep = job(composed)
                found.append(sweep.found(settings) is not None)
        except OmegaConfBaseException:
            return batch  # settings that depend on ${hydra:job.num}, which only the launcher knows
        finally:
            HydraConfig.instance().set_config(self.config)
        return [overrides for overrides, known in zip(batch, found, strict=True) if not known]


@dataclass
class UnfinishedConf(BasicSweeperConf):
    """The options are those of Hydra's own sweeper."""

    _target_: str = f"{__name__}.{Unfinished.__name__}"


ConfigStore.instance().store(group="hydra/sweeper", name="unfinished", node=UnfinishedConf, provider="recall_lab")
