"""Whether a mechanism's parallel form and its recurrence are the same function, gradients included."""

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from recall_lab.checks import whole_number
from recall_lab.mixer.base import Trace
from recall_lab.probe.base import Row
from recall_lab.shapes import State, Value

Form = Callable[..., tuple[Value, State]]


def equivalence(trace: Trace, rng: np.random.Generator, *, length: int = 65) -> list[Row]:
    """Compares the parallel form with one recurrence per position, in float64, on the first two sequences of the trace.

    length  tokens of a sequence that are used; at most all of its tokens

    Rows: relative_error = rms(parallel − recurrent) / rms(recurrent), with the columns layer and part:
      output, state NAME         the outputs at all positions, and the parts of the state after the last
      gradient of NAME           with respect to q, k, v and each gate, of a random linear function of the outputs
      output in two segments     the parallel form on the first third, and on the rest from the state after it
    Raises ValueError for a length that is not a whole number of at least 2.
    """
    whole_number("length", length, least=2)
    mixer = copy.deepcopy(trace.mixer).double()
    given = {"q": trace.q, "k": trace.k, "v": trace.v, **trace.gates}
    inputs = {name: x[:2, :, :length].detach().double() for name, x in given.items()}
    weight = torch.from_numpy(rng.standard_normal(inputs["v"].shape)).to(inputs["v"])  # b h t v
    parallel = _computed(mixer.parallel, inputs, weight)
    recurrent = _computed(mixer.run_recurrence, inputs, weight)
    rows = {part: _relative_error(parallel[part], reference) for part, reference in recurrent.items()}
    rows["output in two segments"] = _relative_error(_in_two(mixer.parallel, inputs), recurrent["output"])
    return [
        {"metric": "relative_error", "layer": trace.layer, "part": part, "value": value} for part, value in rows.items()
    ]


def _computed(form: Form, inputs: dict[str, Tensor], weight: Value) -> dict[str, Tensor]:
    """The form's outputs, final state, and the gradients of Σ weight ⊙ output."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    with torch.enable_grad():
        o, state = _applied(form, leaves)
        gradients = torch.autograd.grad((o * weight).sum(), list(leaves.values()), allow_unused=True)
    found = {"output": o, **{f"state {name}": part.double() for name, part in state.items()}}
    return found | {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True) if g is not None}


def _applied(form: Form, inputs: dict[str, Tensor], state: State | None = None) -> tuple[Value, State]:
    gates = {name: x for name, x in inputs.items() if name not in ("q", "k", "v")}
    return form(inputs["q"], inputs["k"], inputs["v"], gates, state)


def _in_two(form: Form, inputs: dict[str, Tensor]) -> Value:
    """The outputs on the first third, and on the rest from the state after it."""
    cut = max(1, inputs["q"].shape[2] // 3)
    first, state = _applied(form, {name: x[:, :, :cut] for name, x in inputs.items()})
    second, _ = _applied(form, {name: x[:, :, cut:] for name, x in inputs.items()}, state)
    return torch.cat([first, second], dim=2)


def _relative_error(x: Tensor, reference: Tensor) -> float:
    """rms(x − reference) / rms(reference); the numerator alone where the reference is zero."""
    error, size = (
        (y.detach() ** 2).mean().sqrt() if y.numel() else torch.zeros(()) for y in (x - reference, reference)
    )
    return float(error) / (float(size) or 1.0)
