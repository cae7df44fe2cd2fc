"""Runs probes on traces and models, and holds what probes share: positions, bins and the effective rank.

A probe is a function that returns rows. The name of its first argument decides how it is called: probe(trace, rng),
where the trace holds what one mixer computed on one batch (a layer of a model, or a mechanism in the oracle), or
probe(model, batch, rng). A probe whose trace is annotated as AnyTrace also takes that of a layer without queries, keys
and values. rng is a numpy generator. Options are keyword arguments, set in conf/probe/NAME.yaml.
"""

import inspect
import math
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from recall_lab.checks import require
from recall_lab.folders import Row
from recall_lab.mixer.base import Trace
from recall_lab.mixer.layer import AnyTrace, LayerTrace
from recall_lab.shapes import State
from recall_lab.task.base import IGNORE, Batch

Probe = Callable[..., list[Row]]

OF_THE_RUN = (
    *("experiment", "run", "series", "mixer", "trained_as", "task", "seed", "data_seed", "split"),
    *("git", "torch", "numpy", "python", "version", "device", "threads", "seconds"),
)
"""Columns of the table on the run of a row: a probe's rows cannot have columns of these names."""


class ProbeError(ValueError):
    """A probe failed, or some of its rows are not finite. The message names the probe, the layer and the cause."""

    def __init__(self, message: str, rows: Sequence[Row] = (), cause: str = "") -> None:
        super().__init__(message)
        self.rows = list(rows)
        """The rows of the probe without the ones that hold a number that is not finite."""
        self.cause = cause or re.sub(r", layer \d+", "", message, count=1)
        """Equal where the same probe fails for the same reason, in whichever layer and cell."""


def run(probes: Iterable[Probe], model: nn.Module, batch: Batch, rng: np.random.Generator) -> list[Row]:
    """Runs every probe and returns their rows: a probe of a trace once per layer, a probe of a model once.

    Raises ProbeError at the first probe that fails (see `run_on_trace` and `run_on_model`).
    """
    traces = trace_model(model, batch)
    rows: list[Row] = []
    for probe in probes:
        if takes(probe) == "trace":
            rows += [row for trace in traces for row in run_on_trace(probe, trace, rng)]
        else:
            rows += run_on_model(probe, model, batch, rng)
    return rows


def run_on_trace(probe: Probe, trace: AnyTrace, rng: np.random.Generator) -> list[Row]:
    """Runs one probe on one trace and returns its rows, with the probe's name in the column `probe`.

    Raises ProbeError if the probe takes a model, if it needs queries, keys and values and the layer has none, if inputs
    or outputs in the trace are not finite, if the probe raises an exception, or if a row holds a number that is not.
    """
    if takes(probe) != "trace":
        raise ProbeError(f"probe {name(probe)}: needs a trained model, but only a trace is available")
    title = f"probe {name(probe)}, layer {trace.layer}"
    inputs, output = ("qkv", "o") if isinstance(trace, Trace) else ("x", "y")
    mixer = type(getattr(trace, "mixer", None)).__name__
    if isinstance(trace, LayerTrace) and not takes_any(probe):
        raise ProbeError(f"{title}: needs queries, keys and values, which {mixer} does not have")
    for part in (*inputs, output):
        x = getattr(trace, part)
        bad = int((~x.isfinite()).sum())
        what = "outputs" if part == output else "inputs"
        if bad:
            raise ProbeError(
                f"{title}: the {what} {part} of {mixer} hold {bad} numbers of {x.numel()} that are not finite",
                cause=f"{name(probe)}: {what} {part} of {mixer}",
            )
    return _rows(probe, title, trace, rng)


def run_on_model(probe: Probe, model: nn.Module, batch: Batch, rng: np.random.Generator) -> list[Row]:
    """Runs one probe on a model in evaluation mode and returns its rows, with the probe's name in the column `probe`.

    Raises ProbeError if the probe takes a trace, if it raises an exception, or if a row holds a number that is not
    finite.
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


def trace_model(model: nn.Module, batch: Batch, roles: Shaped[np.ndarray, "b t *c"] | None = None) -> list[AnyTrace]:
    """One trace per layer, from one forward pass of the model in evaluation mode and without gradients.

    roles  the roles of the tokens (`Task.roles`), which the traces then hold; where a position has several tokens, that
           of the first
    """
    device = next(model.parameters()).device
    source = batch.factors.get("source", np.full(batch.targets.shape[:2], IGNORE))
    positions = torch.from_numpy(np.asarray(source, dtype=np.int64)).to(device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            trace = cast(Callable[..., list[AnyTrace]], model.trace)
            traces = trace(torch.from_numpy(batch.tokens).to(device), positions)
    finally:
        model.train(training)
    if roles is None:
        return traces
    words = roles if roles.ndim == 2 else roles[..., 0]
    return [replace(one, roles=words) if isinstance(one, Trace | LayerTrace) else one for one in traces]


def _rows(probe: Probe, title: str, *arguments: object) -> list[Row]:
    try:
        rows = [{"probe": name(probe)} | {key: _plain(x) for key, x in row.items()} for row in probe(*arguments)]
        for row in rows:
            number = isinstance(row.get("value"), int | float)
            require(number and isinstance(row.get("metric"), str), f"{row}: must have a metric and a number as value")
            taken = [column for column in row if "." in column or column in OF_THE_RUN]
            require(not taken, f"column {', '.join(taken)}: columns of the run have such names; choose another")
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        place = _place(probe, error)
        cause = f"{name(probe)}: {kind}{place}" if place else ""
        raise ProbeError(f"{title}: {kind}{error}{place}", cause=cause) from error
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


def _place(probe: Probe, error: Exception) -> str:
    """Where in its folder a user's own probe has raised the error: " (mine/overlap.py, line 17)"; "" for others."""
    folder = Path(inspect.unwrap(_function(probe)).__code__.co_filename).parent
    if folder == Path(__file__).parent:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if Path(frame.filename).is_relative_to(folder)]
    return f" ({inside[-1].filename}, line {inside[-1].lineno})" if inside else ""


def _plain(x: Any) -> Any:
    """A number of numpy or torch as one of Python, which can be written to a file; anything else as it is."""
    return x.item() if isinstance(x, np.generic | Tensor) else x


def takes(probe: Probe) -> str:
    """What the probe is called with: "trace" or "model". This is the name of its first argument."""
    return next(iter(inspect.signature(probe).parameters))


def takes_any(probe: Probe) -> bool:
    """Whether the probe also takes the trace of a layer without queries, keys and values."""
    return next(iter(inspect.signature(probe).parameters.values())).annotation is AnyTrace


def name(probe: Probe) -> str:
    """The name of the probe's function, also where functools.partial binds its options."""
    return _function(probe).__name__


def _function(probe: Probe) -> FunctionType:
    while isinstance(probe, partial):
        probe = probe.func
    return cast(FunctionType, probe)


def positions(trace: Trace, after: Sequence[float | int]) -> list[int]:
    """The index of the last position within each share `after` of the sequence, rounded: ascending, without repeats.

    A share of 1 gives n − 1 for a sequence of length n. Raises ValueError for a share outside (0, 1].
    """
    length = trace.q.shape[2]
    require(
        all(0 < share <= 1 for share in after),
        f"after={list(after)}: must be shares above 0 and at most 1",
    )
    return sorted({max(1, round(share * length)) - 1 for share in after})


def bins(values: np.ndarray, count: int, weight: np.ndarray | None = None, least: int = 0) -> list[np.ndarray]:
    """Sorts values into at most `count` bins, equally wide in log(value + 1): for each bin, the indices of its values.

    values  integers of at least 0
    weight  the number of measurements of each value; None: 1
    least   least number of measurements per bin: a bin with fewer is merged with the next, the last with the previous
    Every value is in exactly one bin, and no bin is empty.
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
    """All x numbers of a state per sequence and head, as one vector."""
    return torch.cat([part.flatten(2) for part in state.values()], dim=-1)


def effective_rank(sigma: Float[Tensor, "... r"]) -> Float[Tensor, "..."]:
    """e^H, with H the entropy of the r singular values divided by their sum (Roy and Vetterli 2007); 0 if all are 0."""
    total = sigma.sum(-1, keepdim=True)
    share = sigma / total.clamp(min=1e-300)
    return torch.special.entr(share).sum(-1).exp() * (total[..., 0] > 0)
