"""What a mixer would have answered to other queries at one position, its history and that position's pair unchanged.

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
"""Numbers of copied states that are held at a time; few enough to stay in a processor's cache."""


def state_before(trace: Trace, position: int, v: Value | None = None) -> State:
    """The state after the positions 0 … position − 1. v: other values than those of the trace."""
    v = trace.v if v is None else v
    if position == 0:
        return trace.mixer.empty_state(trace.q, v)
    seen = slice(position)
    gates = {name: gate[:, :, seen] for name, gate in trace.gates.items()}
    return trace.mixer.parallel(trace.q[:, :, seen], trace.k[:, :, seen], v[:, :, seen], gates)[1]


def answers(
    trace: Trace, queries: Float[Tensor, "b h m k"], position: int, state: State, v: Value | None = None
) -> Float[Tensor, "b h m v"]:
    """The mixer's output at that position for each of m queries in place of its own.

    state  that of `state_before`
    v      other values than those of the trace
    One step of the mechanism's recurrence per query, with copies of the state on the batch axis: exact for any mixer.
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
    """The weights of each query at that position over the positions s = 0 … position.

    Raises TypeError for a mechanism that is not linear in v.
    """
    if not trace.mixer.linear_in_v:
        raise TypeError(f"{type(trace.mixer).__name__} is not linear in v: it has no weights over the past")
    b, h, _, _ = trace.v.shape
    identity = torch.eye(position + 1, dtype=trace.v.dtype, device=trace.v.device).expand(b, h, -1, -1)
    return answers(trace, queries, position, state_before(trace, position, identity), identity)


def derivative(function: Callable[[Tensor], Tensor], x: Tensor, direction: Tensor) -> Tensor:
    """The derivative of the function at x along the direction, by forward mode."""
    with warnings.catch_warnings():
        # torch's first use of forward mode loads a module that it calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        change: Tensor = torch.func.jvp(function, (x,), (direction,))[1]
        return change


def query_scale(trace: Trace) -> float:
    """The factor from a key to its query: Σ q_t·k_source / Σ ‖k_source‖² over the positions t with a source.

    Exact for the oracle, whose queries are multiples of keys. √d_key where no position has a source, or where the sum
    is not positive.
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
    """x at the positions in `source`, for every head; where source is IGNORE, x at position 0."""
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
