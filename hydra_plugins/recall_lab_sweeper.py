"""The sweeper of `recall-lab run -m`, found by Hydra in this folder, where it looks for plugins.

Whatever Hydra app is started in this environment imports this file; what only a sweep needs is imported by its methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override


class Unfinished(BasicSweeper):
    """Hydra's own sweeper: every combination of values.

    Before the first job is launched it composes and checks them all (see `recall_lab.cli.plan`). It launches only those
    whose runs are not finished.
    """

    def split_arguments(self, overrides: list[Override], max_batch_size: int | None) -> list[list[list[str]]]:  # type: ignore[override]
        """The batches of jobs that are to be launched. Exits with `--dry-run`, and where a job is impossible."""
        from recall_lab.cli import plan
        from recall_lab.cli.run import Preflight

        assert self.hydra_context is not None
        assert self.config is not None
        for override in overrides:
            if override.is_interval_sweep():
                raise ValueError(
                    f"{override.input_line}: give a list of values, or search it with hydra/sweeper=optuna"
                )
        (every,) = super().split_arguments(overrides, None)
        found = plan.jobs(self.hydra_context.config_loader, self.config, every)
        if Preflight.dry:
            raise SystemExit(plan.show(found, self.config))
        code = plan.refuse_impossible(found, bool(self.config.skip_invalid))
        if code:
            raise SystemExit(code)
        wanted = [list(words) for words in plan.start(found, Preflight.begin(self.config))]
        return list(self.split_overrides_to_chunks(wanted, max_batch_size)) if wanted else []

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: the configurations have been composed, which raises the errors that Hydra looks for here."""


@dataclass
class UnfinishedConf(BasicSweeperConf):
    """The options are those of Hydra's own sweeper."""

    _target_: str = f"{__name__}.{Unfinished.__name__}"


ConfigStore.instance().store(group="hydra/sweeper", name="unfinished", node=UnfinishedConf, provider="recall_lab")
