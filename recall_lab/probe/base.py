"""What probes share: rows, intervals, and one place asked many questions at the same history.

A probe is a function whose first argument says what it looks at, `trace` (one mixer on one batch, from a model or from
the oracle) or `model` (with the batch behind it), whose last one before its options is the generator it draws from,
and whose answer is a list of rows. conf/probe/NAME.yaml binds its options.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from recall_lab.mixer.base import Trace
from recall_lab.results import Row
from recall_lab.shapes import State, Value
from recall_lab.task.base import IGNORE, Batch

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def run(probes: Iterable[Callable[..., list[Row]]], model, batch: Batch, rng: np.random.Generator) -> list[Row]:
    """Every probe on a model and a batch: those of a trace on each layer's, those of a model on the whole.

    Each row names its probe. The model is left as it was found.
    """
    device = next(model.parameters()).device
    tokens = torch.from_numpy(batch.tokens).to(device)
    source = batch.factors.get("source", np.full(batch.targets.shape[:2], IGNORE))
    source = torch.from_numpy(np.asarray(source, dtype=np.int64)).to(device)
    training = model.training
    model.eval()
    with torch.no_grad():
        traces = model.trace(tokens, source)
    rows = []
    for probe in probes:
        if looks_at(probe) == "trace":
            found = [row for trace in traces for row in probe(trace, rng)]
        else:
            found = probe(model, batch, rng)
        rows += [{"probe": name(probe), **row} for row in found]
    model.train(training)
    return rows


def run_trace(probes: Iterable[Callable[..., list[Row]]], trace: Trace, rng: np.random.Generator) -> list[Row]:
    """Every probe on one trace. Raises ValueError for a probe that looks at a model."""
    rows = []
    for probe in probes:
        if looks_at(probe) != "trace":
            raise ValueError(f"the probe {name(probe)} looks at a trained model: the oracle has none")
        rows += [{"probe": name(probe), **row} for row in probe(trace, rng)]
    return rows


def looks_at(probe: Callable[..., list[Row]]) -> str:
    """ "trace" or "model": the name of the probe's first argument."""
    return next(iter(inspect.signature(probe).parameters))


def name(probe: Callable[..., list[Row]]) -> str:
    """The function's own name, whatever options are bound to it."""
    while isinstance(probe, partial):
        probe = probe.func
    return probe.__name__


def wilson(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share, right of total independent answers (Wilson 1927); it never leaves [0, 1]."""
    if total == 0:
        return 0.0, 1.0
    share, z2 = right / total, z**2
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = z / (1 + z2 / total) * (share * (1 - share) / total + z2 / (4 * total**2)) ** 0.5
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def share_row(metric: str, hits: Tensor | np.ndarray, **where: float | int | str) -> Row:
    """One row for a share of hits (booleans), with its Wilson interval and their number.

    The hits are taken as independent. Those of one sequence are not quite: between mechanisms, trust runs.
    """
    right, total = int(hits.sum()), int(np.prod(hits.shape))
    low, high = wilson(right, total)
    return {"metric": metric, "value": right / total, "low": low, "high": high, "count": total, **where}


def mean_row(metric: str, values: Tensor | np.ndarray, **where: float | int | str) -> Row:
    """One row for a mean, ± 1.96 standard errors, the values taken as independent (see share_row)."""
    values = _numbers(values)
    error = 1.96 * values.std(ddof=1) / values.size**0.5 if values.size > 1 else 0.0
    mean = float(values.mean())
    return {"metric": metric, "value": mean, "low": mean - error, "high": mean + error, "count": values.size, **where}


def spread_rows(metric: str, values: Tensor | np.ndarray, **where: float | int | str) -> list[Row]:
    """A distribution: its mean (statistic "mean") and its quantiles (statistic "q05" … "q95")."""
    values = _numbers(values)
    rows = [mean_row(metric, values, statistic="mean", **where)]
    for q, value in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True):
        rows.append(
            {"metric": metric, "value": float(value), "count": values.size, "statistic": f"q{round(100 * q):02d}"}
            | where
        )
    return rows


def _numbers(values: Tensor | np.ndarray) -> np.ndarray:
    values = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else np.asarray(values, float)
    if not values.size:
        raise ValueError("nothing to measure: no place of this trace asks for anything")
    return values.ravel()


def exact(x: Tensor) -> Tensor:
    """x in float64, on the CPU where its device has none (mps)."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def double(trace: Trace) -> Trace:
    """The same trace in float64, for ranks, with a copy of the mixer."""
    parts = {name: exact(getattr(trace, name)) for name in ("q", "k", "v", "o")}
    gates = {name: exact(gate) for name, gate in trace.gates.items()}
    source = trace.source.to(parts["q"].device)
    mixer = copy.deepcopy(trace.mixer).to(parts["q"])
    return replace(trace, mixer=mixer, gates=gates, source=source, **parts)


def memory_before(trace: Trace, place: int, v: Value | None = None) -> State:
    """What the mixer carries into that place, having seen the places before it; v: other values than the trace's."""
    v = trace.v if v is None else v
    if place == 0:
        return trace.mixer.empty_state(trace.q, v)
    gates = {key: gate[:, :, :place] for key, gate in trace.gates.items()}
    return trace.mixer.parallel(trace.q[:, :, :place], trace.k[:, :, :place], v[:, :, :place], gates)[1]


def answers(
    trace: Trace, queries: Float[Tensor, "b h m k"], place: int, memory: State, v: Value | None = None
) -> Float[Tensor, "b h m v"]:
    """What the mixer would have given at that place for each of m other queries, history and present token unchanged.

    memory: that of `memory_before`. The queries stand on the batch axis of the mechanism's own recurrence, so this
    holds for any mixer; as many at a time as keep the copies of its memory small.
    """
    v = trace.v if v is None else v
    b = queries.shape[0]
    here = slice(place, place + 1)
    carried = sum(part.numel() for part in memory.values()) + trace.v[:, :, :1].numel()
    chunk = max(1, CHUNK // carried)

    def copies(x: Tensor, count: int) -> Tensor:
        return x[None].expand(count, *x.shape).flatten(0, 1)

    outputs = []
    for part in queries.split(chunk, dim=2):
        count = part.shape[2]
        gates = {key: copies(gate[:, :, here], count) for key, gate in trace.gates.items()}
        held = {key: copies(x, count) for key, x in memory.items()}
        q = part.permute(2, 0, 1, 3).flatten(0, 1)[:, :, None]
        k = copies(trace.k[:, :, here], count)
        o, _ = trace.mixer.recurrence(q, k, copies(v[:, :, here], count), gates, held)
        outputs.append(o.squeeze(2).unflatten(0, (count, b)).permute(1, 2, 0, 3))
    return torch.cat(outputs, dim=2)


CHUNK = 1 << 20
"""Numbers of copied memory held at a time: few enough to stay in a processor's cache."""


def weights(trace: Trace, queries: Float[Tensor, "b h m k"], place: int) -> Float[Tensor, "b h m s"]:
    """The query → weights map at a fixed history: for each query its weights over the places 0 … place."""
    if not trace.mixer.linear_in_v:
        raise TypeError(f"{type(trace.mixer).__name__} is not linear in v: it has no weights over the past")
    b, h, _, _ = trace.v.shape
    eye = torch.eye(place + 1, dtype=trace.v.dtype, device=trace.v.device).expand(b, h, -1, -1)
    return answers(trace, queries, place, memory_before(trace, place, eye), eye)


def query_scale(trace: Trace) -> float:
    """What keys are multiplied by when this trace asks for them: Σ q_t·k_source / Σ ‖k_source‖² over asked places.

    Exact for the oracle, whose queries are multiples of keys; √d_key where it asks for nothing or against the keys.
    """
    asked = trace.source != IGNORE
    if asked.any():
        k = gather(trace.k, trace.source)
        there = asked[:, None, :, None]
        scale = float((trace.q * k * there).sum() / (k.square() * there).sum())
        if scale > 0:
            return scale
    return trace.k.shape[-1] ** 0.5


def gather(x: Float[Tensor, "b h t d"], source: Int[Tensor, "b m"]) -> Float[Tensor, "b h m d"]:
    """x at the places in `source` (of every head); what stands where source is IGNORE means nothing."""
    index = source.clamp(min=0)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return x.gather(2, index)


def places(trace: Trace, at: Sequence[float | int]) -> list[int]:
    """Places from shares of the sequence (1: the last), ascending and each once."""
    length = trace.q.shape[2]
    if not all(0 < share <= 1 for share in at):
        raise ValueError(f"at={list(at)}: shares of the sequence, in (0, 1]")
    return sorted({max(1, round(share * length)) - 1 for share in at})


def bins(values: np.ndarray, count: int) -> list[np.ndarray]:
    """Indices of the values (ages, at least 0) in about `count` bins of equal width in the logarithm, none empty."""
    edges = np.unique(np.round(np.geomspace(1, values.max(initial=0) + 2, count + 1)).astype(int)) - 1
    found = (np.flatnonzero((values >= low) & (values < high)) for low, high in pairwise(edges))
    return [indices for indices in found if indices.size]


def state_vector(memory: State) -> Float[Tensor, "b h x"]:
    """All numbers that a memory carries, one vector a sequence and head."""
    return torch.cat([part.flatten(2) for part in memory.values()], dim=-1)


def effective_rank(sigma: Float[Tensor, "... r"]) -> Float[Tensor, "..."]:
    """e^H of the singular values' shares; 0 where all are nought."""
    total = sigma.sum(-1, keepdim=True)
    share = sigma / total.clamp(min=1e-300)
    return torch.special.entr(share).sum(-1).exp() * (total[..., 0] > 0)
