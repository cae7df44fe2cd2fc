"""The kinds of run. Each is a frozen dataclass that holds exactly the settings it uses, and turns them into rows.

conf/workload/NAME.yaml lists the settings of each kind; Hydra builds the object. A setting that is not a field cannot
affect the result. The hash that names a run is therefore computed from the fields (`recall_lab.runner`).
"""

import copy
import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import nn

from recall_lab import checkpoint, data, optimization, train
from recall_lab.checks import require, whole_number
from recall_lab.files import write_json
from recall_lab.folders import Row
from recall_lab.measuring import Missing, Scoring, Workspace, probe_model
from recall_lab.mixer.base import Mixer
from recall_lab.mixer.layer import Layer
from recall_lab.model import Model
from recall_lab.optimization import ADAMW, OptimizerFactory, ScheduleFactory
from recall_lab.oracle import Oracle
from recall_lab.probe import base as probing
from recall_lab.probe.base import Probe
from recall_lab.task.base import Task
from recall_lab.train import Cell, Scores, Testing, Training

MixerFactory = Callable[..., Layer] | list[Callable[..., Layer]]
"""A function that makes one layer's mixer from d_model, or a list of them, which the layers use in turn."""

Weights = dict[str, torch.Tensor]
"""A model's parameters and buffers by name."""

T = TypeVar("T")

log = logging.getLogger("recall_lab")


@dataclass(frozen=True)
class Outcome:
    """The results of a run."""

    rows: list[Row]
    summary: str
    """The result in a few words, for the terminal."""
    loss: float = 0.0
    """The last validation loss; 0 where nothing was trained."""
    missing: list[str] = field(default_factory=list)
    """One line for each reason why probes failed or metrics were not finite numbers."""


class Workload(ABC):
    """A kind of run."""

    @abstractmethod
    def check(self) -> None:
        """Raises an error if `run` would raise it before any work is done, without allocating weights."""

    @abstractmethod
    def run(self, space: Workspace) -> Outcome:
        """Does the work, on the space's device, and returns its rows."""


@dataclass(frozen=True, kw_only=True)
class TrainAndTest(Workload):
    """Trains a model, scores it on the validation and the test cells, and runs the probes in every test cell.

    Raises ValueError where a setting is impossible, before anything is trained.
    """

    task: Task
    mixer: MixerFactory
    model: Callable[..., Model]
    """Makes the model from vocab, width and mixer."""
    train: Training
    test: Testing
    optimizer: OptimizerFactory = ADAMW
    schedule: ScheduleFactory | None = None
    """None: a cosine over the steps after the warm-up."""
    probe: dict[str, Probe] | None = None
    seed: int = 0
    """Seed of the model's initial weights."""
    data_seed: int = 0
    """Seed of the streams of data, which are the same for every mixer."""

    def __post_init__(self) -> None:
        _check_seeds(self.seed, self.data_seed)
        optimization.check(self.optimizer, self.schedule, self.train.weight_decay)

    def check(self) -> None:
        trained = self._trained(warn=False)
        if self.test.cells is not None:  # derived cells are possible
            data.test_cells(self.task, self.test.cells, trained)
        _without_memory(lambda: self.model(vocab=self.task.vocab, width=self.task.width, mixer=self.mixer))

    def _trained(self, warn: bool = True) -> list[Cell]:
        return data.training_cells(self.task, self.train.cells, warn)

    def untrained(self) -> Model:
        """The model with the initial weights of `seed`, on the CPU."""
        torch.manual_seed(self.seed)
        return self.model(vocab=self.task.vocab, width=self.task.width, mixer=self.mixer)

    def run(self, space: Workspace) -> Outcome:
        trained = self._trained()
        tested = data.test_cells(self.task, self.test.cells, trained)
        model = self.untrained().to(space.device)
        log.info("%s: %d parameters", space.device, sum(p.numel() for p in model.parameters()))

        def report(point: Scores) -> None:
            log.info("step %d: accuracy %.4f, loss %.4f", point["step"], point["accuracy"], point["loss"])
            if self.train.keep:
                _keep(model, space.folder / "weights" / f"{point['step']:06d}.pt")
            space.advance(point)

        saved = space.folder / "checkpoint.pt"
        training = dataclasses.replace(self.train, cells=trained)
        how = (self.optimizer, self.schedule)
        trainer = partial(train.train, stepped=lambda step: space.progress("training", step, self.train.steps))
        curve = trainer(model, self.task, training, self.data_seed, space.device, saved, report, space.stop, *how)
        write_json(space.folder / "curve.json", curve)
        validation = Scoring(
            self.task, trained, self.data_seed, "validation", lambda at: self.train.validation_sequences
        )
        test = Scoring(self.task, tested, self.data_seed, "test", self.test.sequences_of)
        trained_for = {"split": "validation", "metric": "steps", "value": curve[-1]["step"]}  # fewer where solved early
        rows = [*validation.rows(model, space), *test.rows(model, space), trained_for]
        cells = space.cells("probes", tested)
        found, missing = probe_model(self.probe, model, self.task, cells, self.data_seed, self.test.probe_sequences)
        last = curve[-1]
        summary = f"validation accuracy {last['accuracy']:.3f} after {last['step']} steps"
        return Outcome(rows + found, summary, float(last["loss"]), missing)


@dataclass(frozen=True, kw_only=True)
class AskOracle(Workload):
    """Runs the probes on a mechanism that is fed with random keys and values; nothing is trained.

    Raises ValueError where there is no probe, and for a hybrid of several mechanisms.
    """

    oracle: Oracle
    mixer: MixerFactory
    probe: dict[str, Probe] | None = None
    seed: int = 0
    """Seed of the mechanism's initial weights, and of the keys and values."""
    data_seed: int = 0
    """Seed of the keys and values."""

    def __post_init__(self) -> None:
        _check_seeds(self.seed, self.data_seed)
        require(
            bool(self.probe), "an oracle without a probe measures nothing: add probe=[state_retention], or other probes"
        )

    def check(self) -> None:
        _without_memory(lambda: self.oracle.check(self._made()))

    def _made(self) -> Mixer:
        if isinstance(self.mixer, list):
            raise ValueError("the oracle runs one mechanism, not a hybrid of several")
        made = getattr(self.mixer, "func", self.mixer)
        if isinstance(made, type) and not issubclass(made, Mixer):
            raise ValueError(f"the oracle needs queries, keys and values, which {made.__name__} does not have")
        return self.oracle.mixer(cast("Callable[..., Mixer]", self.mixer))

    def run(self, space: Workspace) -> Outcome:
        torch.manual_seed(self.seed)
        rng = data.stream(self.data_seed, "oracle", {"seed": self.seed})
        mixer = self._made().to(space.device)
        trace = self.oracle.trace(mixer, rng)
        columns = {
            f"oracle.{name}": value for name, value in dataclasses.asdict(self.oracle).items() if name != "gates"
        }
        rows: list[Row] = []
        missing = Missing()
        for probe in (self.probe or {}).values():
            rows += missing.rows_of(partial(probing.run_on_trace, probe, trace, copy.deepcopy(rng)))
        require(bool(rows), "; ".join(missing.lines()) or "the probes returned no rows")
        rows = [{**columns, "split": "oracle", **row} for row in rows]
        return Outcome(rows, f"{len(rows)} rows", missing=missing.lines())


@dataclass(frozen=True, kw_only=True)
class ProbeRun(Workload):
    """Runs probes on the model of a finished run, or tests its weights with another mixer.

    Raises ValueError where the mixer does not fit the weights.
    """

    task: Task
    mixer: MixerFactory
    model: Callable[..., Model]
    train: Training
    test: Testing
    probe: dict[str, Probe] | None = None
    data_seed: int = 0
    swapped: str = ""
    """Name of the mixer if it is not the trained one; it is then also scored on the test cells."""

    def check(self) -> None:
        if self.test.cells is not None:  # derived cells are possible
            self._cells(warn=False)
        self.shapes()

    def shapes(self) -> dict[str, torch.Size]:
        """Name and shape of each weight of the model, which is not allocated."""
        return {name: x.shape for name, x in _without_memory(self._model).state_dict().items()}

    def check_weights(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raises ValueError unless weights of these names and shapes are those of the model."""
        require(self.shapes() == shapes, f"{self.swapped or 'this mixer'} has other weights than the trained mixer")

    def _cells(self, warn: bool = True) -> list[Cell]:
        return data.test_cells(self.task, self.test.cells, data.training_cells(self.task, self.train.cells, warn))

    def _model(self) -> Model:
        return self.model(vocab=self.task.vocab, width=self.task.width, mixer=self.mixer)

    def run(self, space: Workspace, last: Weights | None = None) -> Outcome:
        """Measures the model; last: its weights at the end of training, where they are loaded already."""
        cells = self._cells()
        model = self._model().to(space.device)
        rows: list[Row] = []
        missing: list[str] = []
        for step, weights in self._weights(space, last):
            self.check_weights({name: x.shape for name, x in weights.items()})
            model.load_state_dict(weights)
            at = space.cells("probes", cells)
            found, failed = probe_model(self.probe, model, self.task, at, self.data_seed, self.test.probe_sequences)
            rows += [row if step is None else {**row, "step": step} for row in found]
            missing += [line for line in failed if line not in missing]
        if self.swapped:
            rows += Scoring(self.task, cells, self.data_seed, "test", self.test.sequences_of).rows(model, space)
        return Outcome(rows, f"{len(rows)} rows", missing=missing)

    def _weights(self, space: Workspace, last: Weights | None) -> Iterator[tuple[int | None, Weights]]:
        """(step, weights) of every validation that was kept, and (None, weights) at the end of training."""
        for path in [] if self.swapped else sorted((space.folder / "weights").glob("*.pt")):
            yield int(path.stem), checkpoint.load(path, space.device)
        yield None, last or checkpoint.load(space.folder / "checkpoint.pt", space.device)["model"]


def _without_memory(make: Callable[[], T]) -> T:
    """The result of `make` on the meta device, or on the default device if it reads numbers from its tensors."""
    try:
        with torch.device("meta"):
            return make()
    except Exception:  # an error of the settings is raised again
        return make()


def _keep(model: nn.Module, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    checkpoint.write(path, model.state_dict())


def _check_seeds(seed: int, data_seed: int) -> None:
    whole_number("seed", seed, least=0)
    require(seed < 2**64, f"seed={seed}: must be below 2**64")
    whole_number("data_seed", data_seed, least=0)
