"""Logs for Weights & Biases."""

import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from recall_lab.checks import choice
from recall_lab.folders import Config, Row, title
from recall_lab.logger.base import Logger, Point, grid


@dataclass
class Wandb(Logger):
    """A run of Weights & Biases: the curve as history, the settings as its configuration, the results as a table.

    Offline, its files are in the run's folder wandb/, and `wandb sync FOLDER/wandb/offline-run-*` uploads them later. A
    resumed run has the same id. Offline its log is then written anew, the earlier points included; online it goes on.

    Raises ValueError for an unknown mode.
    """

    project: str = "recall_lab"
    entity: str | None = None
    """User or team; None: the user's default."""
    mode: str = "offline"

    package: ClassVar[str] = "wandb"
    install: ClassVar[str] = "pip install 'recall_lab[wandb]'"

    def __post_init__(self) -> None:
        choice("logger.wandb.mode", self.mode, ("offline", "online"))

    def start(self, config: Config, run: Path, curve: Sequence[Point]) -> None:
        import wandb

        kept = run / "wandb" / "id.txt"
        kept.parent.mkdir(exist_ok=True)
        if not curve or not kept.exists():
            kept.write_text(secrets.token_hex(4), encoding="utf-8")
        if self.mode == "offline":
            for old in kept.parent.glob("offline-run-*"):
                shutil.rmtree(old)
        self.run = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,
            dir=run,
            id=kept.read_text(encoding="utf-8"),
            resume="allow" if self.mode == "online" else None,
            name=title(run.name, config),
            group=run.parent.name,
            config=config,
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        for point in curve:
            self.point(point)

    def point(self, point: Point) -> None:
        step = int(point["step"])
        if step >= self.run.step:  # otherwise it is there from before an interruption
            self.run.log({name: value for name, value in point.items() if name != "step"}, step=step, commit=True)

    def table(self, rows: Sequence[Row]) -> None:
        import wandb

        names, cells = grid(rows)
        self.run.log({"results": wandb.Table(columns=names, data=cells, allow_mixed_types=True)})

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)
