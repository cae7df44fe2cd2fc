"""Time to sample a batch of every task, relative to the training step that uses it, and time of one large sample.

Processor time is measured, because load on the machine changes it little. Run with `pytest tests/benchmarks`.
"""

import subprocess
import sys
import time
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch import nn

CONF = Path(__file__).parents[2] / "conf"
TASKS = sorted(path.stem for path in (CONF / "task").glob("*.yaml"))
SHARE = 0.05
"""Largest time to sample a batch, as a share of the training step."""


class Step:
    """A training step in plain torch.nn: two layers of softmax attention of width 64, the loss at scored positions."""

    def __init__(self, task, batch):
        width = 64
        self.tokens, self.scored = torch.from_numpy(batch.tokens), torch.from_numpy(batch.scored)
        self.targets = torch.from_numpy(batch.targets)[self.scored]
        self.targets = self.targets if task.continuous else self.targets.long()
        self.embed = nn.Linear(task.width, width) if task.continuous else nn.Embedding(task.vocab, width)
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(width, 3 * width), nn.Linear(width, width)]) for _ in "12")
        self.read = nn.Linear(width, task.vocab)
        modules = nn.ModuleList([self.embed, self.layers, self.read])
        self.optimizer = torch.optim.AdamW(modules.parameters(), fused=True)

    def __call__(self):
        x = self.embed(self.tokens)
        x = x.sum(dim=2) if x.dim() == 4 else x
        for into, out in self.layers:
            q, k, v = into(x).unflatten(-1, (3, 1, -1)).permute(2, 0, 3, 1, 4)
            x = x + out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        y = self.read(x[self.scored])
        (F.mse_loss if self.targets.is_floating_point() else F.cross_entropy)(y, self.targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def fastest(*calls, rounds=30):
    """The shortest processor time of each call in seconds; calls alternate."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            start = time.process_time()
            call()
            best[i] = min(best[i], time.process_time() - start)
    return best


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    """Turns off the type and shape checks of the tests, with which users do not run."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("name", TASKS)
def test_sampling_takes_a_small_share_of_a_step(name, factor):
    torch.set_num_threads(1)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        task = instantiate(compose("config", [f"task={name}"]).task)
    task = task.at(**task.scaled((factor,)).cells[0])
    rng = np.random.default_rng(0)
    sample, step = fastest(lambda: task.sample(64, rng), Step(task, task.sample(64, rng)))
    print(f"{name} n={task.length}: {1e3 * sample:.2f} ms of {1e3 * step:.1f} ms, {sample / step:.1%}")
    assert sample < SHARE * step


def test_many_long_sequences():
    """100,000 of mqar, n = 512, V = 8192, at the fewest and the most pairs: less than 3 s and 1 GiB."""
    code = """
import re, time
from pathlib import Path
import numpy as np
from recall_lab.task.mqar import MQAR
for pairs in (8, 64, 128):
    start = time.process_time()
    batch = MQAR(vocab=8192, length=512, pairs=pairs).sample(100_000, np.random.default_rng(0))
    # Not getrusage: its maximum is inherited from the parent process.
    peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
    print(pairs, time.process_time() - start, peak / 2**20)
    del batch
"""
    lines = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()
    for line in lines:
        pairs, seconds, gib = map(float, line.split())
        print(f"pairs={pairs:.0f}: {seconds:.2f} s, {gib:.2f} GiB at the most")
        assert seconds < 3
        assert gib < 1
