"""Cost of a mechanism versus sequence length: FLOPs, time and state size, for prefill and for decoding one token."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from recall_lab.checks import flag, require, whole_number
from recall_lab.mixer.base import Trace
from recall_lab.mixer.layer import AnyTrace, LayerTrace, state_bytes
from recall_lab.probe.base import Row
from recall_lab.shapes import Gates, Query, State, Value
from recall_lab.theory import fits


@torch.no_grad()
def cost(
    trace: AnyTrace,
    rng: np.random.Generator,
    *,
    lengths: Sequence[int] = (256, 512, 1024, 2048),
    repeats: int = 5,
    timed: bool = True,
) -> list[Row]:
    """Measures the mechanism alone, without projections and norms, on the first sequence of the trace.

    The sequence is repeated up to the length that is measured. Costs are sums over all heads.

    lengths  lengths n of the prefilled segment in tokens, at least two different ones
    repeats  number of timings per length; the fastest is reported
    timed    whether time is measured; FLOPs and bytes are counted in any case

    Rows have the columns layer and d_key. These also have the column length:
      prefill_flops, decode_flops      FLOPs of the segment, and of one token after it: two per multiply-add of matrix
                                       products, softmax attention and linear solves; elementwise operations are free
      prefill_seconds, decode_seconds  time of the same two steps
      state_bytes                      size of the state after that token
    A layer without queries, keys and values is measured as a whole, with projections. It has no FLOPs, because those
    in kernels of other libraries are not counted; state_bytes and decode_seconds only where the layer has a state.
    exponent is the fitted slope of log(metric) over log(n), with its 95 % interval; the column `of` names the metric.
    Raises ValueError for an option outside its range, and for timed=false where nothing else is measured.
    """
    for length in lengths:
        whole_number("lengths", length)
    require(len(set(lengths)) > 1, f"lengths={list(lengths)}: must be at least two different lengths")
    whole_number("repeats", repeats)
    flag("timed", timed)
    rows: list[Row] = []
    points: dict[str, list[tuple[int, float]]] = {}
    for length in lengths:
        measured = measure(trace, length, repeats if timed else 0)
        require(bool(measured), "timed=False: of this layer, only times can be measured")
        for metric, value in measured.items():
            rows.append({"metric": metric, "value": value, "length": length})
            points.setdefault(metric, []).append((length, value))
    for metric, pairs in points.items():
        if all(value > 0 for _, value in pairs):
            slope, low, high = fits.exponent(tuple(n for n, _ in pairs), tuple(value for _, value in pairs))
            rows.append({"metric": "exponent", "of": metric, "value": slope, "low": low, "high": high})
    width = {"d_key": trace.k.shape[-1]} if isinstance(trace, Trace) else {}
    return [{"layer": trace.layer, **width, **row} for row in rows]


def measure(trace: AnyTrace, length: int, repeats: int) -> dict[str, float]:
    """Metric → value at one length. Times are left out if repeats is 0."""
    if isinstance(trace, LayerTrace):
        return _measure_layer(trace, length, repeats)
    assert isinstance(trace, Trace)
    q, k, v, gates = _repeated(trace, length + 1)
    segment, token = slice(length), slice(length, None)
    prefill = partial(_prefill, trace, q[:, :, segment], k[:, :, segment], v[:, :, segment], _cut(gates, segment))
    prefill_flops, state = _flops(prefill)
    decode = partial(_decode, trace, q[:, :, token], k[:, :, token], v[:, :, token], _cut(gates, token), state)
    decode_flops, after = _flops(decode)
    found: dict[str, float] = {
        "prefill_flops": prefill_flops,
        "decode_flops": decode_flops,
        "state_bytes": state_bytes(after),
    }
    if repeats:
        found["prefill_seconds"] = fastest(prefill, repeats, q.device)
        found["decode_seconds"] = fastest(decode, repeats, q.device)
    return found


def _measure_layer(trace: LayerTrace, length: int, repeats: int) -> dict[str, float]:
    x = trace.x[:1, torch.arange(length + 1, device=trace.x.device) % trace.x.shape[1]]
    segment, token = x[:, :length], x[:, length:]
    size = trace.mixer.state_size(length + 1)
    found: dict[str, float] = {"state_bytes": size[1]} if size else {}
    if repeats:
        found["prefill_seconds"] = fastest(partial(trace.mixer, segment), repeats, x.device)
        if size:
            state = trace.mixer(segment)[1]
            found["decode_seconds"] = fastest(partial(trace.mixer.step, token, state), repeats, x.device)
    return found


def _prefill(trace: Trace, q: Query, k: Query, v: Value, gates: Gates) -> State:
    return trace.mixer.parallel(q, k, v, gates)[1]


def _decode(trace: Trace, q: Query, k: Query, v: Value, gates: Gates, state: State) -> State:
    return trace.mixer.recurrence(q, k, v, gates, state)[1]


def _repeated(trace: Trace, length: int) -> tuple[Query, Query, Value, Gates]:
    """q, k, v and gates of the first sequence, repeated cyclically up to `length` positions."""
    index = torch.arange(length, device=trace.q.device) % trace.q.shape[2]
    q, k, v = (x[:1, :, index] for x in (trace.q, trace.k, trace.v))
    return q, k, v, {name: gate[:1, :, index] for name, gate in trace.gates.items()}


def _cut(gates: Gates, part: slice) -> Gates:
    return {name: gate[:, :, part] for name, gate in gates.items()}


def _flops(run: Callable[[], State]) -> tuple[int, State]:
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        result = run()
    return counter.get_total_flops(), result


Shape = Sequence[int]


def _triangular(a: Shape, b: Shape, *args: object, **kwargs: object) -> int:
    """n² FLOPs per right-hand side: one multiply-add for each entry below the diagonal."""
    return int(np.prod(a)) * b[-1]


def _cholesky(a: Shape, *args: object, **kwargs: object) -> int:
    return int(np.prod(a)) * a[-1] // 3


def _cholesky_solve(b: Shape, a: Shape, *args: object, **kwargs: object) -> int:
    return 2 * int(np.prod(a)) * b[-1]


def _solve(a: Shape, b: Shape, *args: object, **kwargs: object) -> int:
    return int(np.prod(a)) * (2 * a[-1] // 3 + 2 * b[-1])


def _attention(q: Shape, k: Shape, v: Shape, *args: object, **kwargs: object) -> int:
    """Counts all pairs of positions, even under a causal mask, as torch does on other devices."""
    return 2 * int(np.prod(q[:-1])) * k[-2] * (q[-1] + v[-1])


aten = torch.ops.aten
UNCOUNTED = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten.linalg_solve_triangular: _triangular,
    aten.linalg_cholesky_ex: _cholesky,
    aten.cholesky_solve: _cholesky_solve,
    aten._linalg_solve_ex: _solve,
}
"""FLOP formulas for what torch's counter leaves out: linear solves (textbook counts), softmax attention on a CPU."""


def fastest(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds per call in the fastest of `repeats` timings. Each timing lasts 1 ms or 1024 calls."""
    run()
    _finish(device)
    count, best = 1, float("inf")
    for _ in range(repeats):
        while True:
            begun = time.perf_counter()
            for _ in range(count):
                run()
            _finish(device)
            taken = time.perf_counter() - begun
            if taken > 1e-3 or count >= 1024:
                break
            count *= 4
        best = min(best, taken / count)
    return best


def _finish(device: torch.device) -> None:
    """Waits until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
