"""Scores and probes of a model in every cell, as rows; and what a run needs of its surroundings."""

import copy
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from recall_lab import data, train
from recall_lab.folders import Row
from recall_lab.messages import counted, one_line
from recall_lab.model import Model
from recall_lab.probe import base as probing
from recall_lab.probe.base import Probe
from recall_lab.task.base import Task
from recall_lab.train import Cell, Scores

log = logging.getLogger("recall_lab")


@dataclass(frozen=True)
class Workspace:
    """What a run needs besides its settings: folder, device, reports of progress, and whether to stop."""

    folder: Path
    device: torch.device
    advance: Callable[[Scores], None] = lambda point: None
    """Called with every new point of the training curve."""
    stop: Callable[[], bool] = lambda: False
    """Called before every training step and every cell that is tested or probed. If it returns True, train.Interrupted
    is raised; during training a checkpoint is saved first."""
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None
    """Called with phase, steps or cells done, and their total number: after every training step ("training") and before
    every cell ("validation", "test", "probes")."""

    def cells(self, phase: str, cells: Sequence[Cell]) -> Iterator[Cell]:
        """The cells in turn. Raises train.Interrupted before one if the run should stop."""
        for number, cell in enumerate(cells):
            if self.stop():
                raise train.Interrupted("stopped before all cells were tested")
            self.progress(phase, number, len(cells))
            yield cell


@dataclass(frozen=True)
class Scoring:
    """Scores of a model in every cell of one split."""

    task: Task
    cells: Sequence[Cell]
    data_seed: int
    split: str
    sequences: Callable[[Task], int]
    """How many sequences of a cell are scored."""

    def rows(self, model: Model, space: Workspace) -> list[Row]:
        """The metrics of `train.evaluate`, the chance level, and the size of the state at the end of a sequence."""
        rows: list[Row] = []
        for cell in space.cells(self.split, self.cells):
            at = self.task.at(**cell)
            count = self.sequences(at)
            scores = train.evaluate(model, self.task, cell, self.data_seed, self.split, count, space.device)
            scores["chance"] = at.chance
            if size := model.state_size(at.length):
                scores |= dict(zip(("state_elements", "state_bytes"), size, strict=True))
            columns = {**cell_columns(at), "split": self.split}
            rows += [{**columns, "metric": name, "value": value} for name, value in scores.items()]
            log.info("%s %s: %s", self.split, cell, scores)
        return rows


def probe_model(
    probes: dict[str, Probe] | None, model: Model, task: Task, cells: Iterable[Cell], data_seed: int, sequences: int
) -> tuple[list[Row], list[str]]:
    """The rows of every probe in every cell, and one line for each cause of a failure.

    Each cell has its own stream of data, and a probe's random numbers do not depend on the other probes.
    """
    rows: list[Row] = []
    missing = Missing()
    for cell in cells if probes else []:
        at, rng = task.at(**cell), data.stream(data_seed, "probe", cell)
        batch = at.sample(sequences, rng)
        columns = {**cell_columns(at), "split": "probe"}
        traces = probing.trace_model(model, batch, at.roles(batch.tokens))
        for probe in (probes or {}).values():
            draws = copy.deepcopy(rng)
            if probing.takes(probe) == "trace":
                calls = [partial(probing.run_on_trace, probe, trace, draws) for trace in traces]
            else:
                calls = [partial(probing.run_on_model, probe, model, batch, draws)]
            found = [row for call in calls for row in missing.rows_of(call, f" (cell {cell})")]
            rows += [{**columns, **row} for row in found]
    return rows, missing.lines()


class Missing:
    """Failures of probes. Those of one cause are counted: a probe often fails in every layer and cell alike."""

    def __init__(self) -> None:
        self.first: dict[str, str] = {}
        """Cause → the line of its first failure."""
        self.counts: Counter[str] = Counter()

    def rows_of(self, call: Callable[[], list[Row]], where: str = "") -> list[Row]:
        """The rows of one probe. If it fails, this is noted, and the rows it could measure are returned."""
        try:
            return call()
        except probing.ProbeError as error:
            self.counts[error.cause] += 1
            if error.cause not in self.first:
                self.first[error.cause] = one_line(error) + where
                log.exception("a probe failed%s", where)
            return error.rows

    def lines(self) -> list[str]:
        """One line for each cause."""
        more = {cause: f", and {counted(n - 1, 'more time')}" if n > 1 else "" for cause, n in self.counts.items()}
        return [line + more[cause] for cause, line in self.first.items()]


def cell_columns(task: Task) -> Row:
    """The parameters of the task in a cell, as columns of the table."""
    return {f"task.{name}": value for name, value in dataclasses.asdict(task).items()}
