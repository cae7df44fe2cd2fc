"""What a mechanism costs: operations, time and bytes, of a whole segment and of one decoded token, against length."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from recall_lab.theory import fits
from recall_lab.mixer.base import Trace
from recall_lab.probe.base import Row
from recall_lab.shapes import State


@torch.no_grad()
def cost(
    trace: Trace,
    rng: np.random.Generator,
    *,
    lengths: Sequence[int] = (256, 512, 1024, 2048),
    repeats: int = 5,
    timed: bool = True,
) -> list[Row]:
    """The mechanism alone (projections and norms left out) on one sequence of the trace, repeated to each length.

    lengths  n of the segments, at least two
    repeats  runs of which the fastest counts
    timed    whether time is measured at all; FLOPs and bytes are exact without

    Columns length, d_key, layer; all heads together:
      prefill_flops, decode_flops      two a multiply-add, of products and solves as torch counts them
      prefill_seconds, decode_seconds  of the segment, and of one token behind it
      state_bytes                      carried from the last token to the next
      exponent                         slope of log metric on log n (column of), with its 95 % interval
    """
    if len(set(lengths)) < 2:
        raise ValueError(f"lengths={list(lengths)}: at least two, or there is no exponent to fit")
    rows: list[Row] = []
    for length in lengths:
        q, k, v, gates = _repeated(trace, length + 1)
        head = [x[:, :, :length] for x in (q, k, v)], {key: gate[:, :, :length] for key, gate in gates.items()}
        tail = [x[:, :, length:] for x in (q, k, v)], {key: gate[:, :, length:] for key, gate in gates.items()}

        def prefill(head=head) -> State:
            return trace.mixer.parallel(*head[0], head[1])[1]

        flops, memory = _flops(prefill)

        def decode(tail=tail, memory=memory) -> State:
            return trace.mixer.recurrence(*tail[0], tail[1], memory)[1]

        step_flops, after = _flops(decode)
        found = {
            "prefill_flops": flops,
            "decode_flops": step_flops,
            "state_bytes": sum(part.numel() * part.element_size() for part in after.values()),
        }
        if timed:
            found["prefill_seconds"] = fastest(prefill, repeats, q.device)
            found["decode_seconds"] = fastest(decode, repeats, q.device)
        rows += [{"metric": name, "value": value, "length": length} for name, value in found.items()]
    for metric in dict.fromkeys(row["metric"] for row in rows):
        points = [(row["length"], row["value"]) for row in rows if row["metric"] == metric]
        if all(value > 0 for _, value in points):
            slope, low, high = fits.exponent(*zip(*points, strict=True))
            rows.append({"metric": "exponent", "of": metric, "value": slope, "low": low, "high": high})
    return [{"layer": trace.layer, "d_key": trace.k.shape[-1], **row} for row in rows]


def _repeated(trace: Trace, length: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """q, k, v and gates of the first sequence, over and over until they are that long."""
    index = torch.arange(length, device=trace.q.device) % trace.q.shape[2]
    q, k, v = (x[:1, :, index] for x in (trace.q, trace.k, trace.v))
    return q, k, v, {name: gate[:1, :, index] for name, gate in trace.gates.items()}


def _flops(run: Callable[[], State]) -> tuple[int, State]:
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        result = run()
    return counter.get_total_flops(), result


def _triangular(a: Sequence[int], b: Sequence[int], *args, **kwargs) -> int:
    """n² operations a right side: one multiply-add for each entry below the diagonal."""
    return int(np.prod(a)) * b[-1]


def _cholesky(a: Sequence[int], *args, **kwargs) -> int:
    return int(np.prod(a)) * a[-1] // 3


def _cholesky_solve(b: Sequence[int], a: Sequence[int], *args, **kwargs) -> int:
    return 2 * int(np.prod(a)) * b[-1]


def _solve(a: Sequence[int], b: Sequence[int], *args, **kwargs) -> int:
    return int(np.prod(a)) * (2 * a[-1] // 3 + 2 * b[-1])


def _attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *args, **kwargs) -> int:
    """The whole square of weights, causal or not, as torch counts it elsewhere."""
    return 2 * int(np.prod(q[:-1])) * k[-2] * (q[-1] + v[-1])


aten = torch.ops.aten
UNCOUNTED = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten.linalg_solve_triangular: _triangular,
    aten.linalg_cholesky_ex: _cholesky,
    aten.cholesky_solve: _cholesky_solve,
    aten._linalg_solve_ex: _solve,
}
"""What torch's counter does not know: solves at their textbook counts, and softmax attention on a CPU."""


def fastest(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of the fastest of some runs, each long enough for the clock."""
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
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
