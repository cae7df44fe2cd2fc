"""Running a probe, and how probes choose positions and bins.

A probe is a function that returns rows. Its first argument is `trace` (one mixer on one batch, from a layer of a model
or from the oracle), followed by a generator; or `model`, followed by the batch and a generator. Its options are
keyword arguments, which conf/probe/NAME.yaml sets.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from recall_lab.checks import require
from recall_lab.mixer.base import Trace
from recall_lab.results import Row
from recall_lab.shapes import State
from recall_lab.task.base import IGNORE, Batch

Probe = Callable[..., list[Row]]


class ProbeError(ValueError):
    """A probe has no result, or a part of it is not finite. The message names the probe, the layer and the cause."""

    def __init__(self, message: str, rows: Sequence[Row] = ()) -> None:
        super().__init__(message)
        self.rows = list(rows)
        """The rows of the probe that are sound, where others hold numbers that are not finite."""


def run(probes: Iterable[Probe], model: nn.Module, batch: Batch, rng: np.random.Generator) -> list[Row]:
    """The rows of every probe: one that takes a trace runs on each layer, one that takes a model runs once.

    Raises ProbeError at the first probe that has no result.
    """
    traces = trace_model(model, batch)
    rows: list[Row] = []
    for probe in probes:
        if takes(probe) == "trace":
            rows += [row for trace in traces for row in run_on_trace(probe, trace, rng)]
        else:
            rows += run_on_model(probe, model, batch, rng)
    return rows


def run_trace(probes: Iterable[Probe], trace: Trace, rng: np.random.Generator) -> list[Row]:
    """The rows of every probe on one trace. Raises ProbeError at the first probe that has no result."""
    return [row for probe in probes for row in run_on_trace(probe, trace, rng)]


def run_on_trace(probe: Probe, trace: Trace, rng: np.random.Generator) -> list[Row]:
    """The rows of one probe on one trace, each with the probe's name in the column `probe`.

    Raises ProbeError where the probe takes a model, where the trace holds numbers that are not finite, where the probe
    raises an exception, and where a row holds a number that is not finite.
    """
    if takes(probe) != "trace":
        raise ProbeError(f"probe {name(probe)}: needs a trained model, and there is only a trace")
    title = f"probe {name(probe)}, layer {trace.layer}"
    for part in ("q", "k", "v", "o"):
        x = getattr(trace, part)
        bad = int((~x.isfinite()).sum())
        what = "outputs" if part == "o" else "inputs"
        if bad:
            raise ProbeError(
                f"{title}: the {what} {part} of {type(trace.mixer).__name__} hold {bad} numbers of {x.numel()} "
                "that are not finite"
            )
    return _rows(probe, title, trace, rng)


def run_on_model(probe: Probe, model: nn.Module, batch: Batch, rng: np.random.Generator) -> list[Row]:
    """The rows of one probe that takes a model, in evaluation mode, each with the probe's name in the column `probe`.

    Raises ProbeError where the probe takes a trace, where it raises an exception, and where a row holds a number that
    is not finite.
    """
    title = f"probe {name(probe)}"
    if takes(probe) != "model":
        raise ProbeError(f"{title}: needs a trace, not a model")
    training = model.training
    model.eval()
    try:
        return _rows(probe, title, model, batch, rng)
    finally:
        model.train(training)


def trace_model(model: nn.Module, batch: Batch) -> list[Trace]:
    """One trace per layer of the model in evaluation mode, without gradients, from one forward pass."""
    device = next(model.parameters()).device
    source = batch.factors.get("source", np.full(batch.targets.shape[:2], IGNORE))
    positions = torch.from_numpy(np.asarray(source, dtype=np.int64)).to(device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            trace = cast(Callable[..., list[Trace]], model.trace)
            return trace(torch.from_numpy(batch.tokens).to(device), positions)
    finally:
        model.train(training)


def _rows(probe: Probe, title: str, *arguments: object) -> list[Row]:
    try:
        rows = [{"probe": name(probe)} | {key: _plain(x) for key, x in row.items()} for row in probe(*arguments)]
        for row in rows:
            number = isinstance(row.get("value"), int | float)
            require(number and isinstance(row.get("metric"), str), f"{row}: must have a metric and a number as value")
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ProbeError(f"{title}: {kind}{error}") from error
    sound: list[Row] = []
    faults: dict[str, str] = {}
    for row in rows:
        infinite = [f"{column} is {x}" for column, x in row.items() if isinstance(x, float) and not math.isfinite(x)]
        if infinite:
            faults.setdefault(row["metric"], infinite[0])
        else:
            sound.append(row)
    if faults:
        listed = "; ".join(f"metric {metric}: {fault}" for metric, fault in faults.items())
        raise ProbeError(f"{title}: {listed}", sound)
    return rows


def _plain(x: Any) -> Any:
    """A number of numpy or torch as one of Python, which can be written to a file; anything else as it is."""
    return x.item() if isinstance(x, np.generic | Tensor) else x


def takes(probe: Probe) -> str:
    """What the probe measures: "trace" or "model", the name of its first argument."""
    return next(iter(inspect.signature(probe).parameters))


def name(probe: Probe) -> str:
    """The name of the probe's function, without the options that a partial binds."""
    while isinstance(probe, partial):
        probe = probe.func
    return probe.__name__


def positions(trace: Trace, at: Sequence[float | int]) -> list[int]:
    """The last position of each share of the sequence (1: the last position of all), ascending, each once.

    Raises ValueError for a share outside (0, 1].
    """
    length = trace.q.shape[2]
    require(
        all(0 < share <= 1 for share in at), f"at={list(at)}: must be shares of the sequence, above 0 and at most 1"
    )
    return sorted({max(1, round(share * length)) - 1 for share in at})


def bins(values: np.ndarray, count: int, weight: np.ndarray | None = None, least: int = 0) -> list[np.ndarray]:
    """Indices of the values (whole numbers of at least 0) in at most `count` bins of equal width in the logarithm.

    weight  number of reads of each value, 1 where None
    least   a bin with fewer reads is joined with the next one, and the last such bin with the one before it
    Every value is in one bin, and no bin is empty.
    """
    weight = np.ones(len(values)) if weight is None else weight
    edges = np.unique(np.round(np.geomspace(1, values.max(initial=0) + 2, count + 1)).astype(int)) - 1
    found: list[np.ndarray] = []
    for low, high in pairwise(edges):
        inside = np.flatnonzero((values >= low) & (values < high))
        if found and weight[found[-1]].sum() < max(least, 1):
            inside = np.concatenate([found.pop(), inside])
        if inside.size:
            found.append(inside)
    if len(found) > 1 and weight[found[-1]].sum() < max(least, 1):
        last = found.pop()
        found[-1] = np.concatenate([found[-1], last])
    return found


def state_vector(state: State) -> Float[Tensor, "b h x"]:
    """All numbers of a state, one vector per sequence and head."""
    return torch.cat([part.flatten(2) for part in state.values()], dim=-1)


def effective_rank(sigma: Float[Tensor, "... r"]) -> Float[Tensor, "..."]:
    """e^H of the singular values divided by their sum (Roy and Vetterli 2007); 0 where all are zero."""
    total = sigma.sum(-1, keepdim=True)
    share = sigma / total.clamp(min=1e-300)
    return torch.special.entr(share).sum(-1).exp() * (total[..., 0] > 0)
