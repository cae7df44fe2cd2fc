"""Everything that needs a CUDA device; `pytest -m gpu` takes a few minutes on one GPU.

Every mechanism and every probe, a training run that resumes, the oracle's capacity, and the time of a step.
"""

import itertools
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from command_line import SERIAL, TINY, recall, run_folders, run_probe
from conftest import CPU, TASK, names, small_model, small_training

from recall_lab import folders, results
from recall_lab.data import arrays, stream, to_device
from recall_lab.metrics import loss
from recall_lab.model import Model
from recall_lab.optimization import ADAMW, Cosine, Stepper
from recall_lab.task.mqar import MQAR
from recall_lab.train import Interrupted, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")


@pytest.mark.parametrize("mixer", names("mixer"))
def test_training_is_like_that_on_the_cpu(mixer):
    losses = []
    for device in (CPU, CUDA):
        curve = train(small_model(mixer).to(device), TASK, small_training(steps=10, validate_every=5), 0, device)
        losses.append([point["train_loss"] for point in curve])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def stepper_of(model: Model) -> Stepper:
    return Stepper(model, ADAMW, partial(Cosine, total_iters=100), 0.01, 0.1, 5.0, 1.0)


@pytest.mark.parametrize("mixer", [name for name in names("mixer") if name != "mesa"])
def test_the_host_does_not_wait_within_a_step(mixer):
    """After a first step, which makes the optimiser's state and loads the kernels. mesa waits: it reads whether its
    system of equations can be solved."""
    model = small_model(mixer).to(CUDA)
    stepper = stepper_of(model)
    for number in range(3):
        batch = arrays(TASK.sample(8, stream(0, "train", {}, number)), pinned=True)
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            tokens, scored, targets = to_device(batch, CUDA)
            stepper.step(loss(model(tokens, scored), targets), number)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_training_resumes_exactly(tmp_path):
    whole, training = small_model().to(CUDA), small_training(solved=None)
    train(whole, TASK, training, 0, CUDA)
    calls, path = itertools.count(), tmp_path / "checkpoint.pt"
    with pytest.raises(Interrupted):
        train(small_model().to(CUDA), TASK, training, 0, CUDA, path, stop=lambda: next(calls) == 13)
    resumed = small_model(seed=5).to(CUDA)
    train(resumed, TASK, training, 0, CUDA, path)
    assert all(torch.equal(x, y) for x, y in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.usefixtures("empty_folder")
def test_a_run_with_every_probe():
    assert recall(*TINY, "mixer=delta_rule", "device=cuda", "train.bf16=true", "report=true") == 0
    (run,) = run_folders("main")
    assert folders.status(run)["device"] == "cuda"
    for probe in names("probe"):
        assert run_probe(str(run), f"probe={probe}", "test.probe_sequences=8") == 0


@pytest.mark.usefixtures("empty_folder")
def test_capacity_is_that_of_the_cpu():
    """Top-1 recall of random pairs, from the oracle: the same keys and values on both devices."""
    words = ["-m", "experiment=capacity", "oracle.d_key=16", "report=false", SERIAL]
    tops = []
    for device in ("cpu", "cuda"):
        assert recall(*words, f"device={device}", f"name={device}") == 0
        table = results.collect(Path("outputs", device))
        rows = table[table["metric"] == "top1"]
        tops.append(rows.groupby(["mixer", "after"])["value"].mean())
    assert len(tops[0]) > 50
    assert (tops[0] - tops[1]).abs().max() < 0.02


@pytest.mark.parametrize("mixer", ["softmax", "linear", "delta_rule", "gla"])
def test_the_time_of_a_step(mixer):
    """Printed by -s; a batch of 65,536 tokens takes less time than on one core of the CPU."""
    task, seconds = MQAR(vocab=256, length=256, pairs=32), {}
    for device, steps in ((CPU, 1), (CUDA, 20)):
        model = small_model(mixer, d_model=128).to(device)
        model.embed, model.read_out = torch.nn.Embedding(256, 128).to(device), torch.nn.Linear(128, 256).to(device)
        stepper = stepper_of(model)
        batch = to_device(arrays(task.sample(256, stream(0, "train", {}, 0))), device)
        for number in range(steps + 1):
            if number == 1:
                torch.cuda.synchronize()
                start = time.perf_counter()
            stepper.step(loss(model(*batch[:2]), batch[2]), number)
        torch.cuda.synchronize()
        seconds[device.type] = (time.perf_counter() - start) / steps
    print(f"\n{mixer}: {1e3 * seconds['cuda']:.1f} ms on the GPU, {1e3 * seconds['cpu']:.0f} ms on one core")
    assert seconds["cuda"] < seconds["cpu"]
