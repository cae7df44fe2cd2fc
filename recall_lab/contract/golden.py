"""A mechanism versus reference arrays of another implementation.

The file is an .npz of float32 or float64 arrays in the layout b h t d:

    q, k, v        as they enter the mechanism, after projection, convolution and norm
    GATE           every gate by its name: b h t, or b h t and one more axis
    o              the outputs, b h t v, from the empty state
    state_NAME     a part of the final state (optional)
    do             a gradient of o (optional), for which there may be
    dq, dk, dGATE  the gradients of the inputs
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from recall_lab.checks import require
from recall_lab.contract.base import Deviation, Finding, within_limits
from recall_lab.mixer.base import Mixer

LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest rms(x − reference) / rms(reference). A float32 reference is compared with results in float32 only."""


def load(path: str | Path) -> dict[str, Tensor]:
    """The arrays of an .npz. Raises ValueError for another file, missing q, k, v or o, and other types."""
    try:
        with np.load(path) as stored:
            arrays = {name: torch.from_numpy(stored[name]) for name in stored.files if name != "__meta__"}
    except (ValueError, TypeError, BadZipFile) as error:
        raise ValueError(f"{path}: must be an .npz of arrays of numbers; see `recall-lab check --help`") from error
    missing = [name for name in ("q", "k", "v", "o") if name not in arrays]
    require(not missing, f"{path} lacks {', '.join(missing)}; see `recall-lab check --help`")
    for name, array in arrays.items():
        fits = array.dtype in LIMITS and (name not in ("q", "k", "v", "o") or array.dim() == 4)
        kind = f"{str(array.dtype).removeprefix('torch.')} of shape {tuple(array.shape)}"
        require(fits, f"{path}: {name} is {kind}; it must be float32 or float64, in the layout b h t d")
    return arrays


def findings(make: Callable[..., Mixer], arrays: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Yields one finding per reference array: the largest `ratio` over both forms, in float64 and float32.

    make: makes the mixer from d_model, heads, d_key and d_value. Raises ValueError for an array that is neither an
    input nor a result of the mixer, and for a gate that is neither given nor fixed by the mixer's options.
    """
    heads, d_key, d_value = arrays["q"].shape[1], arrays["q"].shape[3], arrays["v"].shape[3]
    mixer = make(d_model=16, heads=heads, d_key=d_key, d_value=d_value)
    found: dict[str, list[Deviation]] = {}
    for dtype, limit in LIMITS.items():
        for form in ("parallel", "run_recurrence"):
            for name, result in _results(mixer.to(dtype), form, arrays, dtype).items():
                reference = arrays[name]
                if dtype == torch.float64 and reference.dtype == torch.float32:
                    continue
                require(
                    result.shape == reference.shape,
                    f"{name} has shape {tuple(reference.shape)}, not {tuple(result.shape)}",
                )
                where = f"rms of {form}, {str(dtype).removeprefix('torch.')}"
                found.setdefault(name, []).append(Deviation(ratio(result, reference), limit, where))
    for name, deviations in found.items():
        finding = within_limits(deviations)
        yield Finding(finding.holds, finding.detail, f"golden {name}")


def ratio(x: Tensor, reference: Tensor) -> float:
    """rms(x − reference) / rms(reference)."""
    x, reference = x.detach().double(), reference.double()
    return float((x - reference).square().mean().sqrt() / reference.square().mean().sqrt())


def _results(mixer: Mixer, form: str, arrays: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The mixer's results by the names of their references."""
    q = arrays["q"]
    computed = mixer.gates(torch.zeros(q.shape[0], q.shape[2], mixer.d_model, dtype=dtype))
    names = ["q", "k", "v", *(name for name in computed if name in arrays)]
    leaves = {name: arrays[name].to(dtype).requires_grad_() for name in names}
    absent = [name for name in computed if name not in leaves and name not in mixer.fixed_gates]
    require(not absent, f"the file lacks the gates {', '.join(absent)} of {type(mixer).__name__}")
    gates = {name: leaves.get(name, gate) for name, gate in computed.items()}
    o, state = getattr(mixer, form)(leaves["q"], leaves["k"], leaves["v"], gates)
    results = {"o": o} | {f"state_{name}": part for name, part in state.items()}
    if "do" in arrays:
        gradients = torch.autograd.grad(o, list(leaves.values()), arrays["do"].to(dtype), materialize_grads=True)
        results |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    unknown = sorted(arrays.keys() - leaves.keys() - results.keys() - {"do"})
    known = ", ".join([*computed, *results])
    require(not unknown, f"{', '.join(unknown)}: neither input nor result of {type(mixer).__name__}; those are {known}")
    return {name: result for name, result in results.items() if name in arrays}
