"""Logs for TensorBoard: `tensorboard --logdir outputs/NAME` shows every run of a sweep."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import yaml

from recall_lab.folders import Config, Row, flatten
from recall_lab.logger.base import Logger, Point, grid


@dataclass
class TensorBoard(Logger):
    """Event files in the run's folder tensorboard/: the curve as scalars, the settings as text and as hyperparameters,
    the results as text.

    A resumed run writes its log anew, the earlier points included, at the times that they would have without a pause.
    """

    package: ClassVar[str] = "tensorboard"
    install: ClassVar[str] = "pip install 'recall_lab[tensorboard]'"

    def start(self, config: Config, run: Path, curve: Sequence[Point]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        shutil.rmtree(run / "tensorboard", ignore_errors=True)
        # purge_step: a TensorBoard that shows the removed log forgets it.
        self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=0)
        self.began = time.time() - (curve[-1]["seconds"] if curve else 0)
        self.writer.add_text("settings", f"```yaml\n{yaml.safe_dump(config, sort_keys=False)}```")
        values = {name: "null" if value is None else value for name, value in flatten(config).items()}
        for part in hparams(values, {"accuracy": None, "loss": None}):
            self.writer._get_file_writer().add_summary(part)
        for point in curve:
            self.point(point)

    def point(self, point: Point) -> None:
        for name, value in point.items():
            if name != "step":
                self.writer.add_scalar(name, value, int(point["step"]), self.began + point["seconds"])
        self.writer.flush()

    def table(self, rows: Sequence[Row]) -> None:
        names, cells = grid(rows)
        lines = [names, ["---"] * len(names), *([("" if x is None else str(x)) for x in line] for line in cells)]
        self.writer.add_text("results", "\n".join(f"| {' | '.join(line)} |" for line in lines))

    def close(self, finished: bool) -> None:
        self.writer.close()
