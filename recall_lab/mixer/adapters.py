"""Layers of torch.nn as layers of a model, with their state: for `mixer=module`."""

from collections.abc import Callable

import torch
from torch import nn

from recall_lab.checks import choice, require, whole_number
from recall_lab.mixer.layer import Layer, made_with
from recall_lab.shapes import Hidden, State

CELLS = ("RNN", "GRU", "LSTM")


class Recurrent(Layer):
    """torch.nn.GRU, LSTM or RNN of width d_model; state: h, and c of an LSTM, `layers`·d_model numbers each.

    Raises ValueError for options that are impossible, naming them.
    """

    def __init__(self, d_model: int, cell: str = "GRU", layers: int = 1) -> None:
        super().__init__()
        choice("cell", cell, CELLS)
        whole_number("layers", layers)
        self.d_model, self.layers = d_model, layers
        self.recurrence: nn.RNNBase = getattr(nn, cell)(d_model, d_model, num_layers=layers, batch_first=True)

    def forward(self, x: Hidden, state: State | None = None) -> tuple[Hidden, State]:
        state = self.initial_state(len(x)) if state is None else state
        if not x.shape[1]:
            return x, state
        before = [part.transpose(0, 1).contiguous() for part in state.values()]  # layers b m
        y, after = self.recurrence(x, tuple(before) if len(before) > 1 else before[0])
        parts = after if isinstance(after, tuple) else (after,)
        return y, {name: part.transpose(0, 1) for name, part in zip(state, parts, strict=True)}

    def initial_state(self, batch: int = 1) -> State:
        names = ("h", "c") if isinstance(self.recurrence, nn.LSTM) else ("h",)
        weight = next(self.parameters())
        return {name: weight.new_zeros(batch, self.layers, self.d_model) for name in names}


class Attention(Layer):
    """torch.nn.MultiheadAttention with a causal mask; state: the past inputs, d_model numbers per token, from which the
    keys and values are computed anew.

    Raises ValueError for heads that do not divide d_model.
    """

    def __init__(self, d_model: int, heads: int = 1) -> None:
        super().__init__()
        whole_number("heads", heads)
        require(d_model % heads == 0, f"heads={heads}: must divide d_model={d_model}")
        self.d_model = d_model
        self.attention = nn.MultiheadAttention(d_model, heads, batch_first=True)

    def forward(self, x: Hidden, state: State | None = None) -> tuple[Hidden, State]:
        past = x if state is None else torch.cat([state["x"], x], dim=1)  # b n m
        if not x.shape[1]:
            return x, {"x": past}
        later = torch.ones(x.shape[1], past.shape[1], dtype=torch.bool, device=x.device)
        mask = later.triu(past.shape[1] - x.shape[1] + 1)  # t n, true where a query must not attend
        return self.attention(x, past, past, attn_mask=mask, need_weights=False)[0], {"x": past}

    def initial_state(self, batch: int = 1) -> State:
        return {"x": next(self.parameters()).new_zeros(batch, 0, self.d_model)}


ADAPTED = {nn.MultiheadAttention: "mixer.layer._target_=recall_lab.mixer.adapters.Attention"} | {
    getattr(nn, cell): f"+mixer.layer.cell={cell} alone" for cell in CELLS
}
"""Layer of torch.nn → the option that gives it the right shapes, a mask and a state."""


def make_layer(make: Callable[..., nn.Module], d_model: int) -> nn.Module:
    """The module of `made_with`. An error about a layer of torch.nn names the option of its adapter."""
    made = getattr(make, "func", make)
    try:
        module = made_with(make, d_model)
        require(made is not nn.MultiheadAttention, "mixer.layer=MultiheadAttention: takes three inputs and no mask")
        return module
    except ValueError as error:
        hint = f"; use {ADAPTED[made]}, which also has its state" if made in ADAPTED else ""
        raise ValueError(f"{error}{hint}") from error
