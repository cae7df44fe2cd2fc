"""Training and evaluation of a model on a task, with checkpoints from which training resumes exactly."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from recall_lab import metrics
from recall_lab.checkpoint import Progress, Scores, resume, save
from recall_lab.checks import flag, number, require, share, whole_number
from recall_lab.data import Arrays, Cell, Grid, ahead, arrays, stream, to_device, training_cells
from recall_lab.metrics import loss
from recall_lab.optimization import ADAMW, Cosine, OptimizerFactory, ScheduleFactory, Stepper
from recall_lab.task.base import Task

EVALUATION_TOKENS = 16384
"""Number of tokens evaluated in one forward pass."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained, whatever the optimiser and the schedule of its learning rate.

    Raises ValueError, naming the setting, where a value is impossible.
    """

    steps: int = 1000
    """Largest number of training steps."""
    tokens: int = 4096
    """Tokens per batch, at any sequence length; a batch has at least one sequence."""
    lr: float = 1e-2
    """Largest learning rate, reached after the warm-up."""
    weight_decay: float = 0.0
    """Weight decay of the optimiser, for the parameters that `optimization.parameter_groups` does not exempt."""
    no_weight_decay: Sequence[str] = ()
    """Patterns of the names of further parameters without weight decay: ["embed.*", "read_out.*"]."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises linearly, under any schedule."""
    clip: float = 1.0
    """Largest norm of the gradient of all parameters together."""
    validate_every: int = 100
    """Steps between two validations."""
    validation_sequences: int = 256
    """Sequences per cell in a validation."""
    solved: float | None = 0.999
    """Training stops when the validation accuracy per token (R² of a continuous task) reaches this in every cell;
    None: never."""
    keep: bool = False
    """Whether the run keeps its weights at every validation."""
    bf16: bool = False
    """Whether the forward pass runs under bfloat16 autocast."""
    compile: bool = False
    """Whether training uses torch.compile."""
    cells: Grid | None = None
    """The cells that training goes through in turn; None: the cells that `training_cells` derives from the task."""

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "validate_every", "validation_sequences"):
            whole_number(f"train.{name}", getattr(self, name))
        for name in ("lr", "clip"):
            number(f"train.{name}", getattr(self, name), above=0)
        number("train.weight_decay", self.weight_decay, least=0)
        require(
            self.weight_decay > 0 or not self.no_weight_decay,
            f"train.no_weight_decay={list(self.no_weight_decay)} has no effect with train.weight_decay=0",
        )
        share("train.warmup", self.warmup)
        if self.solved is not None:
            number("train.solved", self.solved, least=0)
        for name in ("keep", "bf16", "compile"):
            flag(f"train.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Testing:
    """How much of the test split a trained model is scored on.

    Raises ValueError, naming the setting, where a value is impossible.
    """

    tokens: int = 32768
    """Tokens per cell."""
    sequences: int = 64
    """Smallest number of sequences per cell, used where `tokens` amounts to fewer."""
    probe_sequences: int = 16
    """Sequences per cell that the probes are computed on."""
    cells: Grid | None = None
    """The cells that are tested; None: the training cells, and the task at 2 and 4 times its size."""

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "probe_sequences"):
            whole_number(f"test.{name}", getattr(self, name))

    def sequences_of(self, task: Task) -> int:
        """Number of sequences scored in a cell; `task` is the task at that cell."""
        return max(self.sequences, self.tokens // task.length)


class Interrupted(Exception):
    """Training was stopped on request after a completed step; its checkpoint, if any, was written."""


def train(
    model: nn.Module,
    task: Task,
    training: Training,
    data_seed: int,
    device: torch.device,
    checkpoint: Path | None = None,
    report: Callable[[Scores], None] = lambda point: None,
    stop: Callable[[], bool] = lambda: False,
    optimizer: OptimizerFactory = ADAMW,
    schedule: ScheduleFactory | None = None,
    stepped: Callable[[int], None] = lambda step: None,
) -> list[Scores]:
    """Trains the model in place and returns the training curve, one point per validation.

    checkpoint  written at every validation; where it exists, training resumes from it, with the same result as
                without the interruption
    report      called with every new point of the curve, before the checkpoint is written
    stop        called before every step; when it returns True, the checkpoint is written and Interrupted raised
    optimizer, schedule  see `optimization`; schedule=None: a cosine over the steps after the warm-up
    stepped     called after every step with the number of steps done

    Raises NotFinite, naming the step, when a loss is not finite. The losses are read at each validation, because to
    read one makes the host wait for the device; a state after such a loss is never saved.
    """
    cells = training_cells(task, training.cells, warn=False)  # impossible cells are logged with the test cells
    schedule = schedule or partial(Cosine, total_iters=training.steps, begin=training.warmup)
    warmup = training.warmup * training.steps
    stepper = Stepper(
        model, optimizer, schedule, training.lr, training.weight_decay, warmup, training.clip, training.no_weight_decay
    )
    progress = Progress()
    if checkpoint is not None and checkpoint.exists():
        progress = resume(checkpoint, model, stepper, device)
    forward = compiled(model) if training.compile else model
    started = time.perf_counter() - progress.seconds

    def draw(step: int) -> Arrays:
        cell = cells[step % len(cells)]
        at = task.at(**cell)
        batch = at.sample(max(1, training.tokens // at.length), stream(data_seed, "train", cell, step))
        return arrays(batch, pinned=device.type == "cuda")

    steps = range(progress.step, training.steps)
    with closing(ahead(draw, steps, 2 if device.type == "cuda" else 0)) as batches:
        while not _done(progress, training):
            if stop():
                progress.read()
                progress.seconds = time.perf_counter() - started
                if checkpoint is not None:
                    save(checkpoint, model, stepper, progress)
                raise Interrupted(f"training stopped after step {progress.step} of {training.steps}")
            tokens, scored, targets = to_device(next(batches), device)
            model.train()
            with torch.autocast(device.type, torch.bfloat16) if training.bf16 else nullcontext():
                value = loss(forward(tokens, scored), targets)
            stepper.step(value, progress.step)
            progress.losses.append(value.detach())
            progress.step += 1
            stepped(progress.step)
            if progress.step % training.validate_every == 0 or progress.step == training.steps:
                point = {"step": progress.step, "train_loss": float(progress.read().mean())}
                point |= _validate(model, task, training, data_seed, device, cells)
                stepper.validated(point["loss"])
                progress.seconds = point["seconds"] = time.perf_counter() - started
                progress.losses = []
                progress.curve.append(point)
                report(point)
                if checkpoint is not None:
                    save(checkpoint, model, stepper, progress)
    return progress.curve


def compiled(model: nn.Module) -> Callable[..., Tensor]:
    """The model under torch.compile. Raises ValueError, naming the mixers, where compilation would take minutes."""
    slow = sorted({type(module).__name__ for module in model.modules() if not getattr(module, "compiles", True)})
    require(not slow, f"train.compile=true is not possible with {', '.join(slow)}: torch.compile would take minutes")
    return torch.compile(model)


def _done(progress: Progress, training: Training) -> bool:
    """Whether all steps are done, or the last validation reached `training.solved` in every cell."""
    lowest = progress.curve[-1]["worst_accuracy"] if progress.curve else -math.inf
    return progress.step >= training.steps or (training.solved is not None and lowest >= training.solved)


def evaluate(
    model: nn.Module, task: Task, cell: Cell, data_seed: int, split: str, sequences: int, device: torch.device
) -> Scores:
    """Scores of the model on `sequences` sequences of one cell of a split.

    accuracy           share of the scored tokens predicted correctly
    sequence_accuracy  share of the sequences with every scored token correct
    loss_bits          mean −log₂ p of the target
    standard_error     of the accuracy, with sequences as clusters; left out where a single sequence is scored
    scored_tokens, sequences  their numbers
    For a continuous task, two others replace the first three:
    normalised_error   Σ‖output − target‖² / Σ‖target − mean target‖²
    r2                 1 − normalised_error; standard_error is that of r2, with the variance of the targets as given
    """
    at = task.at(**cell)
    size = max(1, min(sequences, EVALUATION_TOKENS // at.length))
    parts: list[tuple[Tensor, Tensor]] = []
    masks: list[np.ndarray] = []
    model.eval()
    with torch.no_grad():
        for number in range(math.ceil(sequences / size)):
            count = min(size, sequences - number * size)
            batch = at.sample(count, stream(data_seed, split, cell, number))
            tokens, scored, targets = to_device(arrays(batch), device)
            outputs = model(tokens, scored).float()
            if task.continuous:
                parts.append((metrics.squared_error(outputs, targets), targets))
            else:
                parts.append((metrics.correct(outputs, targets), metrics.loss_bits(outputs, targets)))
            masks.append(batch.scored)
    first, second = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
    scored_positions = np.concatenate(masks)
    sequence = np.nonzero(scored_positions)[0]
    deviation = metrics.standard_error(first.double().numpy(), sequence)
    scores: Scores
    if task.continuous:
        error = metrics.normalised_error(first, second)
        deviation /= metrics.variance(second)
        scores = {"normalised_error": error, "r2": 1 - error}
    else:
        complete = metrics.correct_sequences(first, torch.from_numpy(scored_positions))
        names = ("accuracy", "sequence_accuracy", "loss_bits")
        columns = (first, complete, second)
        scores = {name: float(column.double().mean()) for name, column in zip(names, columns, strict=True)}
    if not math.isnan(deviation):
        scores["standard_error"] = deviation
    return scores | {"scored_tokens": len(first), "sequences": sequences}


def _validate(
    model: nn.Module, task: Task, training: Training, data_seed: int, device: torch.device, cells: list[Cell]
) -> Scores:
    """Mean accuracy and loss in bits over the cells, and the lowest accuracy; R² and error in a continuous task."""
    accuracy, lost = ("r2", "normalised_error") if task.continuous else ("accuracy", "loss_bits")
    sequences = training.validation_sequences
    scores = [evaluate(model, task, cell, data_seed, "validation", sequences, device) for cell in cells]
    return {
        "accuracy": float(np.mean([score[accuracy] for score in scores])),
        "worst_accuracy": min(score[accuracy] for score in scores),
        "loss": float(np.mean([score[lost] for score in scores])),
    }
