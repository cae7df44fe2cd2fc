"""Training and evaluation. Every batch is drawn from (data seed, split, cell, number) alone: the same for every
mixer, the same again after a restart, and never the same in two splits."""

import hashlib
import logging
import math
import pickle
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recall_lab.files import replacing
from recall_lab.model import loss
from recall_lab.task.base import Batch, Task

Cell = dict[str, Any]
"""A point of a task's grid: the parameters that differ from the task's own."""

Grid = list[Cell] | dict[str, list[Any]]
"""Cells one by one, or for each parameter its values, meaning every combination of them."""

Scores = dict[str, float | int]
"""Name of a metric → its value."""

log = logging.getLogger("recall_lab")

EVALUATION_TOKENS = 16384
"""Tokens evaluated at a time."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained; conf/config.yaml says what each key means."""

    steps: int
    tokens: int
    lr: float | int
    weight_decay: float | int
    warmup: float | int
    clip: float | int
    validate_every: int
    validation_sequences: int
    solved: float | int | None
    keep: bool
    bf16: bool
    compile: bool
    cells: Grid | None

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "validate_every", "validation_sequences"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"train.{name}={value}: a whole number of at least 1")
        for name, least in (("weight_decay", 0), ("solved", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or value < least):
                raise ValueError(f"train.{name}={value}: a number of at least {least}")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"train.{name}={value}: a number above 0")
        if not isinstance(self.warmup, int | float) or not 0 <= self.warmup <= 1:
            raise ValueError(f"train.warmup={self.warmup}: a share of the steps, 0 to 1")

    def rate(self, step: int) -> float:
        """Learning rate of a step (0 the first): linear warm-up, then a cosine to nought."""
        warm = self.warmup * self.steps
        if step < warm:
            return self.lr * (step + 1) / (warm + 1)
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))


@dataclass(frozen=True, kw_only=True)
class Testing:
    """How a trained model is tested; conf/config.yaml says what each key means."""

    tokens: int
    sequences: int
    probe_sequences: int
    cells: Grid | None

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "probe_sequences"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"test.{name}={value}: a whole number of at least 1")

    def sequences_of(self, task: Task) -> int:
        """How many sequences of a cell are scored: `tokens` of them, but at least `sequences`."""
        return max(self.sequences, self.tokens // task.length)


class NotFinite(ArithmeticError):
    """The loss of a training step was not a finite number."""


def stream(seed: int, split: str, cell: Cell, number: int = 0) -> np.random.Generator:
    """The generator of batch `number` of a cell: independent for every seed, split, cell and number."""
    digest = hashlib.sha256(repr((split, sorted(cell.items()))).encode()).digest()
    return np.random.default_rng([seed, number, *np.frombuffer(digest, dtype=np.uint32)])


def load(path: Path, device: torch.device) -> dict[str, Any]:
    """What a checkpoint holds, plain values and tensors alone. Raises ValueError where the file is damaged."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is damaged; without it the run begins again") from error


def training_cells(task: Task, cells: Grid | None, warn: bool = True) -> list[Cell]:
    """The mixture trained on: the given cells, or the task at its size and at 1/2, 1/4 and 1/8 of it.

    Sizes that the task does not allow are left out, with a warning in the log unless `warn` is False.
    """
    return _derived(task, (1 / 8, 1 / 4, 1 / 2, 1), warn) if cells is None else _checked(task, cells)


def test_cells(task: Task, cells: Grid | None, trained: list[Cell]) -> list[Cell]:
    """The grid tested on: the given cells, or those trained on and the task at 2 and 4 times its size.

    Each cell occurs once. Sizes that the task does not allow are left out, with a warning in the log.
    """
    if cells is not None:
        return _checked(task, cells)
    return trained + [cell for cell in _derived(task, (2, 4)) if cell not in trained]


def _derived(task: Task, factors: tuple[float | int, ...], warn: bool = True) -> list[Cell]:
    """The possible cells of a derived grid; the others are logged with the reason."""
    scaled = task.scaled(factors)
    for reason in scaled.impossible if warn else ():
        log.warning("a cell of the derived grid is left out: %s", reason)
    return scaled.cells


def _checked(task: Task, cells: Grid) -> list[Cell]:
    """The grid's cells, each one possible for the task; raises ValueError, naming the cell, where one is not."""
    if isinstance(cells, dict):
        for name, values in cells.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"cells: {name}={values!r}: a list of values, of which every combination is a cell")
        cells = [dict(zip(cells, values, strict=True)) for values in product(*cells.values())]
    if not isinstance(cells, list) or not cells:
        raise ValueError(f"cells={cells!r}: at least one cell, or null for those that follow from the task")
    for number, cell in enumerate(cells):
        if not isinstance(cell, dict) or cell in cells[:number]:
            raise ValueError(f"cell {cell!r}: parameters by name, {{length: 64, …}}, and each cell once")
        try:
            task.at(**cell)
        except ValueError as error:
            raise ValueError(f"cell {cell}: {error}") from error
    return cells


def arrays(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, scored (b t) and the targets of the scored places, on the device."""
    scored = batch.scored
    targets = batch.targets[scored]
    if not targets.size:
        raise ValueError("a batch with nothing to score: no place of its sequences has a target")
    if targets.dtype.kind == "i":
        targets = targets.astype(np.int64)
    return tuple(torch.from_numpy(x).to(device, non_blocking=True) for x in (batch.tokens, scored, targets))


def train(
    model: nn.Module,
    task: Task,
    training: Training,
    data_seed: int,
    device: torch.device,
    checkpoint: Path | None = None,
    report: Callable[[Scores], None] = lambda point: None,
) -> list[Scores]:
    """Trains in place and returns the training curve, a point a validation.

    Goes on from `checkpoint` where that file exists, with the same result as without the interruption; writes it
    at every validation. report: called with every new point of the curve.
    Raises NotFinite, naming the step, when a loss is not finite.
    """
    cells = training_cells(task, training.cells, warn=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.lr, weight_decay=training.weight_decay, fused=device.type in ("cpu", "cuda")
    )
    curve: list[Scores] = []
    if checkpoint is not None and checkpoint.exists():
        saved = load(checkpoint, device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        curve = saved["curve"]
    compiled = torch.compile(model) if training.compile else model
    autocast = torch.autocast(device.type, torch.bfloat16) if training.bf16 else nullcontext()
    started = time.perf_counter() - (curve[-1]["seconds"] if curve else 0)
    losses: list[Tensor] = []
    solved = bool(curve) and _solved(curve[-1], training)
    step = curve[-1]["step"] if curve else 0
    while step < training.steps and not solved:
        cell = cells[step % len(cells)]
        at = task.at(**cell)
        batch = at.sample(max(1, training.tokens // at.length), stream(data_seed, "train", cell, step))
        tokens, scored, targets = arrays(batch, device)
        model.train()
        with autocast:
            value = loss(compiled(tokens, scored), targets)
        if losses:
            _finite(losses[-1], step - 1)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        for group in optimizer.param_groups:
            group["lr"] = training.rate(step)
        optimizer.step()
        losses.append(value.detach())
        step += 1
        if step % training.validate_every == 0 or step == training.steps:
            _finite(losses[-1], step - 1)
            point = {"step": step, "train_loss": float(torch.stack(losses).mean())}
            point |= _validate(model, task, training, data_seed, device, cells)
            point["seconds"] = time.perf_counter() - started
            losses = []
            curve.append(point)
            report(point)
            solved = _solved(point, training)
            if checkpoint is not None:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "curve": curve}
                with replacing(checkpoint) as temporary:
                    torch.save(state, temporary)
    return curve


def evaluate(
    model: nn.Module, task: Task, cell: Cell, data_seed: int, split: str, sequences: int, device: torch.device
) -> Scores:
    """Scores the model on that many sequences of one cell, in batches of at most EVALUATION_TOKENS tokens.

    accuracy           share of scored tokens answered right
    sequence_accuracy  share of sequences with every scored token right
    loss_bits          mean −log₂ p of the right answer
    tokens, sequences  how many of each were scored
    Of a continuous task, in place of the first three:
    error              Σ‖y − target‖² / Σ‖target − mean‖²
    r2                 1 − error
    """
    at = task.at(**cell)
    size = max(1, min(sequences, EVALUATION_TOKENS // at.length))
    sums: Counter[str] = Counter()
    total = 0.0
    model.eval()
    with torch.no_grad():
        for number in range(-(-sequences // size)):
            count = min(size, sequences - number * size)
            inputs, scored, targets = arrays(at.sample(count, stream(data_seed, split, cell, number)), device)
            answers = model(inputs, scored).float()
            sums["tokens"] += len(targets)
            sums["sequences"] += count
            if task.continuous:
                sums["squared"] += float((answers - targets).square().sum())
                sums["norm"] += float(targets.square().sum())
                total = total + targets.sum(dim=0)
                continue
            hit = torch.ones_like(scored)
            hit[scored] = answers.argmax(dim=-1) == targets
            sums["right"] += int(hit[scored].sum())
            sums["whole"] += int(hit.all(dim=1).sum())
            sums["nats"] += float(F.cross_entropy(answers, targets, reduction="sum"))
    counts = {name: sums[name] for name in ("tokens", "sequences")}
    if task.continuous:
        error = sums["squared"] / (sums["norm"] - float(total.square().sum()) / sums["tokens"])
        return {"error": error, "r2": 1 - error, **counts}
    return {
        "accuracy": sums["right"] / sums["tokens"],
        "sequence_accuracy": sums["whole"] / sums["sequences"],
        "loss_bits": sums["nats"] / sums["tokens"] / math.log(2),
        **counts,
    }


def _validate(
    model: nn.Module, task: Task, training: Training, data_seed: int, device: torch.device, cells: list[Cell]
) -> Scores:
    """Mean accuracy (R² of a continuous task) and loss (its error) over the cells, and the accuracy of the worst."""
    accuracy, loss = ("r2", "error") if task.continuous else ("accuracy", "loss_bits")
    sequences = training.validation_sequences
    scores = [evaluate(model, task, cell, data_seed, "validation", sequences, device) for cell in cells]
    return {
        "accuracy": float(np.mean([score[accuracy] for score in scores])),
        "worst_accuracy": min(score[accuracy] for score in scores),
        "loss": float(np.mean([score[loss] for score in scores])),
    }


def _solved(point: Scores, training: Training) -> bool:
    return training.solved is not None and point["worst_accuracy"] >= training.solved


def _finite(value: Tensor, step: int) -> None:
    """Looks at the loss one step late, so that the device is never waited for while it could compute."""
    if not math.isfinite(float(value)):
        raise NotFinite(f"the loss of training step {step} is {float(value)}: lower train.lr or train.clip")
