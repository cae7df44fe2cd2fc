"""Probe cost: FLOPs and bytes equal formulas, and so do the fitted exponents."""

import time

import pytest
import torch
import torch.nn.functional as F
from conftest import CPU
from probes import traced, value

from recall_lab.mixer.delta_rule import DeltaRule
from recall_lab.mixer.linear import Linear
from recall_lab.mixer.softmax import Softmax
from recall_lab.probe.cost import _flops, cost, fastest


def test_cost_exponents(rng):
    def slope(make, of, **fields):
        trace = traced(make, pairs=32, d_key=16, reads=32, **fields)
        return value(cost(trace, rng, lengths=(128, 256, 512), timed=False), "exponent", of=of)

    assert slope(Softmax, "prefill_flops") == pytest.approx(2, abs=0.01)
    assert slope(Softmax, "decode_flops") == pytest.approx(1, abs=0.02)
    assert slope(Softmax, "state_bytes") == pytest.approx(1, abs=0.02)
    for make in (Linear, DeltaRule):
        assert slope(make, "prefill_flops") == pytest.approx(1, abs=0.01)
        assert slope(make, "decode_flops") == pytest.approx(0, abs=1e-9)
        assert slope(make, "state_bytes") == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match="must be at least two different lengths"):
        cost(traced(pairs=4, d_key=4, reads=4), rng, lengths=(8,))


def test_flops_and_bytes_equal_formulas(rng):
    """Of one sequence, although the trace has two."""
    rows = cost(traced(Softmax, pairs=8, d_key=16, reads=16), rng, lengths=(64, 128), timed=False)
    assert value(rows, "prefill_flops", length=64) == 2 * 2 * 64 * 64 * 16
    assert value(rows, "decode_flops", length=64) == 2 * 2 * 65 * 16
    assert value(rows, "state_bytes", length=64) == 65 * 2 * 16 * 4
    rows = cost(traced(Linear, pairs=8, d_key=16, reads=16), rng, lengths=(64, 128), timed=False)
    assert value(rows, "decode_flops", length=64) == 2 * 2 * 16 * 16
    assert value(rows, "state_bytes", length=64) == 16 * 16 * 4


def test_times_are_positive(rng):
    rows = cost(traced(pairs=8, d_key=8, reads=8), rng, lengths=(32, 64), repeats=1)
    assert value(rows, "prefill_seconds", length=32) > 0
    assert value(rows, "decode_seconds", length=64) > 0


def test_flops_of_linear_solves_and_of_attention():
    """Triangular: n² per right-hand side. Cholesky: n³/3 and 2n². LU: 2n³/3 and 2n²."""
    a, b = torch.eye(4).expand(3, -1, -1), torch.ones(3, 4, 5)
    q, k = torch.ones(2, 3, 7, 4), torch.ones(2, 3, 9, 4)

    def flops(run):
        return _flops(lambda: {"S": run()})[0]

    assert flops(lambda: torch.linalg.solve_triangular(a, b, upper=False)) == 3 * 4**2 * 5
    assert flops(lambda: torch.linalg.cholesky_ex(a)[0]) == 3 * 4**3 // 3
    assert flops(lambda: torch.cholesky_solve(b, a)) == 3 * 2 * 4**2 * 5
    assert flops(lambda: torch.linalg.solve(a, b)) == 3 * 4**2 * (2 * 4 // 3 + 2 * 5)
    assert flops(lambda: F.scaled_dot_product_attention(q, k, k)) == 2 * 3 * 7 * 9 * 2 * (4 + 4)


def test_time_is_per_call():
    """The shortest of three timings; a call of two milliseconds is timed alone, one of nothing with many others."""
    assert 0.002 <= fastest(lambda: time.sleep(0.002), 3, CPU) < 0.1
    assert fastest(lambda: None, 3, CPU) < 1e-4
