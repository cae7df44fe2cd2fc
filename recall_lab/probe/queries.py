"""Outputs and weights of a mixer if one position had other queries, with its key, value, gates and history unchanged.

Letters as in shapes.py; m counts the queries.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from recall_lab.mixer.base import Trace
from recall_lab.shapes import State, Value
from recall_lab.task.base import IGNORE

CHUNK = 1 << 20
"""Most numbers in the states and values that are copied at a time, so that they fit into a processor's cache."""


def state_before(trace: Trace, position: int, v: Value | None = None) -> State:
    """The state after positions 0 … position − 1. v: values to use instead of those of the trace."""
    v = trace.v if v is None else v
    if position == 0:
        return trace.mixer.empty_state(trace.q, v)
    seen = slice(position)
    gates = {name: gate[:, :, seen] for name, gate in trace.gates.items()}
    return trace.mixer.parallel(trace.q[:, :, seen], trace.k[:, :, seen], v[:, :, seen], gates)[1]


def answers(
    trace: Trace, queries: Float[Tensor, "b h m k"], position: int, state: State, v: Value | None = None
) -> Float[Tensor, "b h m v"]:
    """The mechanism's output at that position for each of m queries instead of its own.

    state  the state before that position, from `state_before`
    v      values to use instead of those of the trace
    Runs one step of the recurrence per query, with copies of the state along the batch axis, so it is exact for any
    mixer.
    """
    v = trace.v if v is None else v
    b = queries.shape[0]
    here = slice(position, position + 1)
    numbers = sum(part.numel() for part in state.values()) + v[:, :, here].numel()

    def copies(x: Tensor, count: int) -> Tensor:
        return x[None].expand(count, *x.shape).flatten(0, 1)

    outputs = []
    for some in queries.split(max(1, CHUNK // numbers), dim=2):
        count = some.shape[2]
        gates = {name: copies(gate[:, :, here], count) for name, gate in trace.gates.items()}
        states = {name: copies(part, count) for name, part in state.items()}
        q = some.permute(2, 0, 1, 3).flatten(0, 1)[:, :, None]  # (m b) h 1 k
        k = copies(trace.k[:, :, here], count)
        o, _ = trace.mixer.recurrence(q, k, copies(v[:, :, here], count), gates, states)
        outputs.append(o.squeeze(2).unflatten(0, (count, b)).permute(1, 2, 0, 3))
    return torch.cat(outputs, dim=2)


def weights(trace: Trace, queries: Float[Tensor, "b h m k"], position: int) -> Float[Tensor, "b h m s"]:
    """The effective attention A_s of each query at that position, over the positions s = 0 … position.

    Raises TypeError for a mechanism that is not linear in v.
    """
    if not trace.mixer.linear_in_v:
        raise TypeError(f"{type(trace.mixer).__name__} is not linear in v: it has no weights over the past")
    b, h, _, _ = trace.v.shape
    identity = torch.eye(position + 1, dtype=trace.v.dtype, device=trace.v.device).expand(b, h, -1, -1)
    return answers(trace, queries, position, state_before(trace, position, identity), identity)


def derivative(function: Callable[[Tensor], Tensor], x: Tensor, direction: Tensor) -> Tensor:
    """The directional derivative of the function at x, by forward-mode differentiation."""
    with warnings.catch_warnings():
        # On its first use, forward-mode differentiation loads a module that torch itself calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        change: Tensor = torch.func.jvp(function, (x,), (direction,))[1]
        return change


def query_scale(trace: Trace) -> float:
    """The factor c in q ≈ c k, for a query q and the key k at its source: Σ q·k / Σ ‖k‖² over queries with a source.

    Exact for the oracle, whose queries are multiples of keys. √d_key if no position has a source, or if Σ q·k is not
    positive.
    """
    has_answer = trace.source != IGNORE
    if has_answer.any():
        k = gather(trace.k, trace.source)
        mask = has_answer[:, None, :, None]
        scale = float((trace.q * k * mask).sum() / (k.square() * mask).sum().clamp(min=1e-30))
        if scale > 0:
            return scale
    return float(trace.k.shape[-1] ** 0.5)


def gather(x: Float[Tensor, "b h t d"], source: Int[Tensor, "b m"]) -> Float[Tensor, "b h m d"]:
    """x at the m positions per sequence in `source`, for every head; where source is IGNORE, x at position 0."""
    index = source.clamp(min=0)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return x.gather(2, index)


def exact(x: Tensor) -> Tensor:
    """x in float64; on the CPU where its device has no float64 (mps)."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def double(trace: Trace) -> Trace:
    """The trace in float64, with a copy of its mixer in float64."""
    q = exact(trace.q)
    return replace(
        trace,
        mixer=copy.deepcopy(trace.mixer).to(q),
        q=q,
        k=exact(trace.k),
        v=exact(trace.v),
        o=exact(trace.o),
        gates={name: exact(gate) for name, gate in trace.gates.items()},
        source=trace.source.to(q.device),
    )
