"""Time of a training step relative to plain torch.nn, of a batch relative to a step, and of a sweep on two cores.

Ratios are measured in one process on one thread. The compared functions alternate; the fastest round of each counts.
"""

import os
import subprocess
import sys
import time

import hydra
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import config
from torch import nn

from recall_lab.data import arrays, stream
from recall_lab.metrics import loss
from recall_lab.model import Model
from recall_lab.task.mqar import MQAR
from recall_lab.train import Training, train

TASK = MQAR(vocab=256, length=64, pairs=8)
BATCH, WIDTH, LAYERS = 64, 64, 2


class Plain(nn.Module):
    """Embedding, two layers of softmax attention with a short convolution, read-out, without recall_lab."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(LAYERS + 1))
        self.q, self.k, self.v, self.o = (
            nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)) for _ in range(4)
        )
        conv = [nn.Conv1d(3 * WIDTH, 3 * WIDTH, 4, groups=3 * WIDTH, padding=3, bias=False) for _ in range(LAYERS)]
        self.conv = nn.ModuleList(conv)
        self.read_out = nn.Linear(WIDTH, 256)

    def forward(self, tokens, scored):
        x = self.embed(tokens)
        for i in range(LAYERS):
            z = self.norms[i](x)
            qkv = torch.cat([self.q[i](z), self.k[i](z), self.v[i](z)], dim=-1)
            qkv = self.conv[i](qkv.transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2)
            q, k, v = (part.unsqueeze(1) for part in qkv.split(WIDTH, dim=-1))
            x = x + self.o[i](F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return self.read_out(self.norms[-1](x.flatten(0, 1)[scored]))


def fastest(*jobs, rounds: int = 30) -> list[float]:
    """Time of the fastest round of each job in seconds; the jobs alternate."""
    best = [np.inf] * len(jobs)
    for round_ in range(rounds + 3):
        for i, job in enumerate(jobs):
            start = time.perf_counter()
            job()
            if round_ >= 3:
                best[i] = min(best[i], time.perf_counter() - start)
    return best


def step_of(net: nn.Module, ours: bool):
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    tokens, scored, targets = arrays(TASK.sample(BATCH, stream(0, "train", {}, 0)))
    score = loss if ours else F.cross_entropy

    def step():
        value = score(net(tokens, scored), targets)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        if ours:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    return step


def ours() -> Model:
    return Model(256, hydra.utils.instantiate(config("mixer=softmax").mixer), d_model=WIDTH, layers=LAYERS)


def test_a_training_step_costs_little_more_than_plain_torch():
    mine, plain = fastest(step_of(ours(), True), step_of(Plain(), False))
    print(f"\nstep {mine * 1e3:.2f} ms, plain torch.nn {plain * 1e3:.2f} ms: {mine / plain:.2f} ×")
    assert mine < 1.3 * plain


def test_a_batch_takes_less_than_five_percent_of_a_step():
    number = iter(range(10**9))
    sample, step = fastest(lambda: TASK.sample(BATCH, stream(0, "train", {}, next(number))), step_of(ours(), True))
    print(f"\nbatch {sample * 1e3:.3f} ms of a step of {step * 1e3:.2f} ms: {100 * sample / step:.1f} %")
    assert sample < 0.05 * step


@pytest.mark.parametrize("seed", range(5))
def test_softmax_learns_the_mixture_within_six_seconds_of_one_core(seed):
    """Two layers, to an accuracy of .99 in each of four cells of up to 32 pairs; validations included."""
    cells = [{"length": 4 * pairs, "pairs": pairs} for pairs in (4, 8, 16, 32)]
    torch.manual_seed(seed)
    start = time.process_time()
    curve = train(ours(), TASK, Training(solved=0.99, validate_every=25, cells=cells), 0, torch.device("cpu"))
    seconds = time.process_time() - start
    print(f"\n{curve[-1]['step']} steps, {seconds:.1f} s")
    assert curve[-1]["worst_accuracy"] >= 0.99
    assert seconds < 6


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_two_cores_do_eight_runs_in_little_more_than_half_the_time(tmp_path):
    """The same command with two launchers: one run after the other, and two at a time."""
    seconds = {}
    for name, launcher in (
        ("one", ["hydra/launcher=basic"]),
        ("two", ["hydra.launcher.n_jobs=2"]),
    ):
        command = [sys.executable, "-m", "recall_lab", "run", "-m", f"name={name}", "seed=range(8)", "train.steps=400",
                   "train.solved=null", "test.tokens=4096", "report=false", *launcher]  # fmt: skip
        start = time.perf_counter()
        subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
        seconds[name] = time.perf_counter() - start
    print(f"\n{seconds['two']:.1f} s against {seconds['one']:.1f} s: {seconds['two'] / seconds['one']:.2f} ×")
    assert seconds["two"] < 0.6 * seconds["one"]
