"""A layer of torch.nn or of another library as a mixer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recall_lab.checks import require, whole_number
from recall_lab.mixer.adapters import Recurrent, make_layer
from recall_lab.mixer.layer import Layer, check_causal
from recall_lab.shapes import Hidden, State


@dataclass(eq=False, repr=False, kw_only=True)
class Module(Layer):
    """A layer b t m → b t m, used as it is.

    y = layer(x), or the first part where it returns several;  no A: the layer's queries, keys and values are not
    accessible;  state: counted for a recall_lab.mixer.layer.Layer (for example those in recall_lab.mixer.adapters), not
    known for another layer, which continues a sequence by computing all past inputs again.
    d_model is passed to the constructor as d_model, hidden_size, embed_dim or dim, unless it is given.
    At its first use it is checked to be causal and to keep the sequences of a batch apart. Source: the layer's own.
    """

    d_model: int
    layer: Callable[..., nn.Module] = Recurrent
    """Makes the layer."""

    def __post_init__(self) -> None:
        super().__init__()
        whole_number("d_model", self.d_model)
        self.inner = make_layer(self.layer, self.d_model)
        self.checked = False

    def forward(self, x: Hidden, state: State | None = None) -> tuple[Hidden, State]:
        if x.shape[1] == 0:
            return x, self.initial_state(len(x)) if state is None else state
        if not self.checked and x.shape[1] > 1 and not torch.compiler.is_compiling():
            self._check(x.detach())
        if isinstance(self.inner, Layer):
            return self.inner(x, state)
        past = x if state is None else torch.cat([state["x"], x], dim=1)  # b n m
        return self._output(past)[:, -x.shape[1] :], {"x": past}

    def initial_state(self, batch: int = 1) -> State:
        if isinstance(self.inner, Layer):
            return self.inner.initial_state(batch)
        return {"x": next(self.parameters()).new_zeros(batch, 0, self.d_model)}

    def state_size(self, length: int) -> tuple[int, int] | None:
        return self.inner.state_size(length) if isinstance(self.inner, Layer) else None

    def _output(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        first = y[0] if isinstance(y, tuple) else y
        name = type(self.inner).__name__
        require(isinstance(first, Tensor), f"{name}: must return a tensor, or a tuple that begins with one")
        return first

    def _check(self, x: Hidden) -> None:
        training = self.inner.training
        self.inner.eval()
        with torch.no_grad():
            check_causal(type(self.inner).__name__, self._output, x, self._output(x))
        self.inner.train(training)
        self.checked = True
