"""Limits on the time and memory of probes, on one core."""

import subprocess
import sys
import time
from functools import partial

import numpy as np
import torch

from recall_lab.mixer.delta_rule import DeltaRule
from recall_lab.mixer.linear import Linear
from recall_lab.mixer.softmax import Softmax
from recall_lab.oracle import Oracle
from recall_lab.probe.effective_attention import effective_attention
from recall_lab.probe.state_retention import state_retention

LONG = """
import resource, sys, time
import numpy as np, torch
torch.set_num_threads(1)
from recall_lab.mixer.delta_rule import DeltaRule
from recall_lab.oracle import Oracle
from recall_lab.probe.effective_attention import effective_attention
oracle = Oracle(pairs=2048, d_key=64, candidates=2048, reads=2048)
trace = oracle.trace(oracle.mixer(DeltaRule), np.random.default_rng(0))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
best = float("inf")
for _ in range(3):
    begun = time.perf_counter()
    A = trace.mixer.effective_attention(trace.q, trace.k, trace.gates)
    best = min(best, time.perf_counter() - begun)
assert A.shape[-2:] == (2048, 2048)
print(best, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_effective_attention_of_a_long_sequence():
    """delta_rule, n = 2048: less than 2 s, and less than 1 GiB in addition to the trace."""
    out = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, check=True).stdout.split()
    seconds, kibibytes = float(out[0]), int(out[1])
    print(f"effective attention, n=2048: {seconds:.2f} s, {kibibytes / 1024:.0f} MiB more than before")
    assert seconds < 2
    assert kibibytes < 1 << 20


def test_the_oracle_at_its_largest():
    """d = 128, n up to 8 d: answers to all keys, and weights, for softmax, linear attention and the delta rule."""
    torch.set_num_threads(1)
    begun = time.process_time()
    for make in (Softmax, Linear, partial(DeltaRule)):
        oracle = Oracle(d_key=128, candidates=4096)
        trace = oracle.trace(oracle.mixer(make), np.random.default_rng(0))
        at = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
        state_retention(trace, np.random.default_rng(0), at=at, read="all", lags=())
        effective_attention(trace, np.random.default_rng(0), token_bins=0, matrix=False)
    seconds = time.process_time() - begun
    print(f"three mechanisms at d=128, n=1024: {seconds:.1f} s")
    assert seconds < 30
