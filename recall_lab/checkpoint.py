"""Checkpoints: everything from which training resumes exactly."""

import io
import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recall_lab.files import replacing
from recall_lab.optimization import Stepper

Scores = dict[str, float]
"""Metric → its value."""


class NotFinite(ArithmeticError):
    """The loss of a training step was infinite or NaN."""


@dataclass
class Progress:
    """How far training has come. With weights and optimiser state, this is all that determines its continuation."""

    step: int = 0
    """Steps done."""
    losses: list[Tensor] = field(default_factory=list)
    """Training losses since the last validation."""
    curve: list[Scores] = field(default_factory=list)
    """One point per validation."""
    seconds: float = 0.0
    """Time spent in training and validation, before and after interruptions."""

    def read(self) -> Tensor:
        """The losses since the last validation, on the CPU. Raises NotFinite, naming the first that is not finite."""
        losses = torch.stack(self.losses).cpu() if self.losses else torch.zeros(0)
        for back, value in zip(range(len(losses), 0, -1), losses.tolist(), strict=True):
            if not math.isfinite(value):
                raise NotFinite(
                    f"the loss of training step {self.step - back} is {value}: lower train.lr or train.clip"
                )
        return losses


class Unusable(ValueError):
    """Training cannot resume from a checkpoint: it is damaged, or another version of recall_lab wrote it."""


def load(path: Path, device: torch.device) -> dict[str, Any]:
    """A checkpoint's plain values and tensors. Raises Unusable where the file is damaged."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        if isinstance(error, torch.OutOfMemoryError) or getattr(error, "filename", None) is not None:
            raise  # the file is missing or cannot be read; a file cut short gives an error without a name
        raise Unusable(f"{path} is damaged; delete it to start the run from the beginning") from error


def save(path: Path, model: nn.Module, stepper: Stepper, progress: Progress) -> None:
    """Writes a checkpoint: weights, the states of optimiser and schedule, and progress."""
    losses = torch.stack(progress.losses) if progress.losses else torch.zeros(0)
    write(path, {"model": model.state_dict(), **stepper.state_dict(), **vars(progress), "losses": losses})


def write(path: Path, content: object) -> None:
    """Writes what `load` reads, completely or not at all. Raises OSError, naming the file, if it cannot be written."""
    # On a full disk torch.save raises an error that does not name the cause; Python's own files do.
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with replacing(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def resume(path: Path, model: nn.Module, stepper: Stepper, device: torch.device) -> Progress:
    """Restores weights, optimiser and schedule from a checkpoint, in place, and returns the progress saved with them.

    Raises Unusable where the file is damaged, or another version wrote it: other parts, or weights of other shapes.
    """
    saved = load(path, device)
    parts = {"model", *stepper.state_dict(), *vars(Progress())}
    if not isinstance(saved, dict) or set(saved) != parts or _shapes(saved["model"]) != _shapes(model.state_dict()):
        raise Unusable(f"{path}: another version wrote it; delete it to start the run from the beginning")
    model.load_state_dict(saved.pop("model"))
    stepper.load_state_dict({name: saved.pop(name) for name in stepper.state_dict()})
    return Progress(**{**saved, "losses": list(saved["losses"])})


def _shapes(weights: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in weights.items()}
