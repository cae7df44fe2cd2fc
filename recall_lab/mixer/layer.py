"""The interface of a layer that passes information from a token to later ones, and the trace of one on a batch."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from recall_lab.checks import require
from recall_lab.shapes import Hidden, State

WIDTHS = ("d_model", "hidden_size", "embed_dim", "dim")
"""Names under which the constructors of layers take d_model."""


CHECK_SEED = 1 << 20
"""Seed of the inputs with which a layer is checked to be causal."""


class AnyTrace:
    """What one layer of a model, or a mechanism in the oracle, computed on one batch: a Trace or a LayerTrace."""

    layer: int
    source: Int[Tensor, "b t"]
    """For each query the position of its answer; task.base.IGNORE at positions without a scored query."""


class Layer(nn.Module, ABC):
    """A causal map from x to y, both b t m, that continues from a state."""

    d_model: int

    compiles: ClassVar[bool] = True
    """Whether torch.compile takes less than about a minute for it; train.compile=true is refused otherwise.

    Its time grows with the number of operations, which for a loop over positions or blocks grows with the length."""
    no_weight_decay: ClassVar[tuple[str, ...]] = ()
    """Names of the layer's own parameters with two or more axes that are exempt from weight decay.

    Parameters with fewer axes (biases, norms, learned lengths, decays) are always exempt."""

    @abstractmethod
    def forward(self, x: Hidden, state: State | None = None) -> tuple[Hidden, State]:
        """The outputs (b t m) for a segment x that continues from `state` (None: from the start), and the state after
        it. An empty segment (t = 0) has empty outputs and leaves the state unchanged."""

    @abstractmethod
    def initial_state(self, batch: int = 1) -> State:
        """The state before the first token, with the device and dtype of the weights."""

    def step(self, x: Hidden, state: State) -> tuple[Hidden, State]:
        """One step of decoding: the output (b 1 m) for a token that continues from `state`, and the state after it."""
        return self(x, state)

    @torch.no_grad()
    def state_size(self, length: int) -> tuple[int, int] | None:
        """(elements, bytes) of the state after `length` tokens of one sequence; None where they are not known.

        They are counted on the state that `step` returns.
        """
        x = next(self.parameters()).new_zeros(1, length, self.d_model)
        _, state = self(x[:, 1:], self.initial_state())
        _, state = self.step(x[:, :1], state)
        return state_elements(state), state_bytes(state)

    def trace(self, x: Hidden, source: Int[Tensor, "b t"], layer: int) -> tuple[AnyTrace, Hidden]:
        """The trace of one forward pass, for the probes, and its outputs (b t m)."""
        y = self(x)[0]
        return LayerTrace(self, x, y, source, layer), y


@dataclass(frozen=True)
class LayerTrace(AnyTrace):
    """What a layer without queries, keys and values computed on one batch."""

    mixer: Layer
    x: Hidden
    y: Hidden
    source: Int[Tensor, "b t"]
    layer: int = 0
    roles: Shaped[np.ndarray, "b t"] | None = None
    """The role of each position as a word, as `Task.roles` gives it; None: not known."""


def state_elements(state: State) -> int:
    """Number of elements of a state, summed over the batch."""
    return sum(part.numel() for part in state.values())


def state_bytes(state: State) -> int:
    """Number of bytes of a state, summed over the batch."""
    return sum(part.numel() * part.element_size() for part in state.values())


def made_with(make: Callable[..., nn.Module], d_model: int) -> nn.Module:
    """The module that `make` returns, to which d_model is passed as the first of WIDTHS that it takes, unless given.

    Raises ValueError, naming it, where it cannot be made or is not a torch.nn.Module.
    """
    made = getattr(make, "func", make)
    name = getattr(made, "__name__", str(made))
    constructor = made.__init__ if inspect.isclass(made) else made
    known = inspect.signature(constructor).parameters if inspect.isfunction(constructor) else {}
    width = next((width for width in WIDTHS if width in known), "")
    given = {width: d_model} if width and width not in getattr(make, "keywords", {}) else {}
    try:
        module = make(**given)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"mixer.layer={name} cannot be made: {error}") from error
    require(isinstance(module, nn.Module), f"mixer.layer={name}: must make a torch.nn.Module")
    return module


@torch.no_grad()
def check_causal(name: str, apply: Callable[[Hidden], Hidden], x: Hidden, y: Tensor) -> None:
    """Raises ValueError where y = apply(x) is not b t m, or where the outputs of the first half of the positions depend
    on the inputs of the second half, or those of a sequence on other sequences.

    The tolerance is that of float32, or of half precision where y has it or autocast is on. Nothing is checked on the
    meta device, where there are no numbers.
    """
    shapes = f"{list(x.shape)}, not {list(y.shape)}"
    require(y.shape == x.shape, f"{name}: the output must have the shape of the input, {shapes}")
    half = x.shape[1] // 2
    if x.device.type == "meta":
        return
    other = torch.randn(x.shape, generator=torch.Generator().manual_seed(CHECK_SEED)).to(x)
    other[:, :half] = x[:, :half]
    low = y.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(x.device.type)
    limit = (5e-2 if low else 1e-3) * float(y.abs().max())
    moved = float((apply(other)[:, :half] - y[:, :half]).abs().max()) if half else 0.0
    require(moved <= limit, f"{name} is not causal: outputs before position {half} depend on inputs from there on")
    alone = float((apply(x[-1:]) - y[-1:]).abs().max())
    require(alone <= limit, f"{name} mixes the sequences of a batch: its input must be batch × time × d_model, so a "
            "layer of torch.nn needs batch_first=true")  # fmt: skip
