"""Training and evaluation: scores, learning rate, weight decay, early stopping, options."""

import itertools
import subprocess
import sys
from functools import partial

import hydra
import numpy as np
import pytest
import torch
from conftest import CPU, TASK, config, names, small_model, small_training
from torch import nn

import recall_lab.train
from recall_lab.checkpoint import NotFinite
from recall_lab.data import arrays, stream, to_device, training_cells
from recall_lab.metrics import loss
from recall_lab.mixer.softmax import Softmax
from recall_lab.model import Model
from recall_lab.optimization import ADAMW, Cosine, Stepper
from recall_lab.task.base import IGNORE
from recall_lab.task.mqar import MQAR
from recall_lab.train import Training, evaluate, train


class Solver(nn.Module):
    """A model that answers by the definition of the task (`solve`)."""

    def __init__(self, task, shift=0):
        super().__init__()
        self.task, self.shift = task, shift

    def forward(self, tokens, scored):
        answer = np.roll(self.task.solve(tokens.numpy()), self.shift, axis=1).ravel()[scored.numpy()]
        answer = np.where(answer == IGNORE, 0, answer)
        return 20 * torch.nn.functional.one_hot(torch.from_numpy(answer).long(), self.task.vocab).float()


def test_a_perfect_model_scores_one():
    scores = evaluate(Solver(TASK), TASK, {}, 0, "test", 50, CPU)
    assert scores["accuracy"] == scores["sequence_accuracy"] == 1
    assert scores["loss_bits"] < 1e-5
    assert (scores["scored_tokens"], scores["sequences"]) == (200, 50)
    assert evaluate(Solver(TASK, 1), TASK, {}, 0, "test", 50, CPU)["accuracy"] < 0.05


def test_scores_equal_counts_by_hand(monkeypatch):
    """Accuracy per token and per sequence, and loss, computed over several batches from all logits."""
    monkeypatch.setattr("recall_lab.train.EVALUATION_TOKENS", 4 * 32)
    net, cell = small_model(), {"length": 32, "pairs": 4}
    scores = evaluate(net, TASK, cell, 0, "test", 9, CPU)
    right, complete, bits = [], [], []
    for number, count in enumerate((4, 4, 1)):
        batch = TASK.at(**cell).sample(count, stream(0, "test", cell, number))
        logits = net(torch.from_numpy(batch.tokens)).detach().double().log_softmax(-1).numpy()
        for row, targets in zip(logits, batch.targets, strict=True):
            hits = [row[t].argmax() == y for t, y in enumerate(targets) if y != IGNORE]
            bits += [-row[t, y] / np.log(2) for t, y in enumerate(targets) if y != IGNORE]
            right += hits
            complete.append(all(hits))
    assert scores["accuracy"] == pytest.approx(np.mean(right))
    assert scores["sequence_accuracy"] == pytest.approx(np.mean(complete))
    assert scores["loss_bits"] == pytest.approx(np.mean(bits), rel=1e-5)


def test_standard_error_treats_sequences_as_clusters(monkeypatch):
    """A model that fails on even keys, in three batches; equal numbers of queries, so that it is s/√n of the means."""
    monkeypatch.setattr("recall_lab.train.EVALUATION_TOKENS", 4 * 32)

    class OddKeys(Solver):
        def forward(self, tokens, scored):
            return super().forward(tokens, scored) * (tokens.flatten()[scored] % 2)[:, None]

    cell = {"length": 32, "pairs": 4}
    at = TASK.at(**cell)
    scores = evaluate(OddKeys(at), TASK, cell, 0, "test", 9, CPU)
    batches = [at.sample(count, stream(0, "test", cell, number)) for number, count in enumerate((4, 4, 1))]
    odd = np.concatenate([(batch.tokens[batch.scored] % 2).reshape(-1, 4).mean(1) for batch in batches])
    assert scores["accuracy"] == pytest.approx(odd.mean())
    assert scores["standard_error"] == pytest.approx(odd.std(ddof=1) / 3)
    assert "standard_error" not in evaluate(OddKeys(at), TASK, cell, 0, "test", 1, CPU)


def test_r2_of_a_continuous_task():
    task = hydra.utils.instantiate(config("task=subset_average").task)

    class Mean(nn.Module):
        def forward(self, tokens, scored):
            targets = task.solve(tokens.numpy())
            return torch.from_numpy(targets.reshape(-1, targets.shape[-1])[scored.numpy()]) * 0.5

    batch = task.sample(32, stream(0, "test", {}, 0))
    targets = batch.targets[batch.scored].astype(float)
    expected = (0.25 * targets**2).sum() / ((targets - targets.mean(0)) ** 2).sum()
    scores = evaluate(Mean(), task, {}, 0, "test", 32, CPU)
    assert scores["normalised_error"] == pytest.approx(expected, rel=1e-4)
    assert scores["r2"] == pytest.approx(1 - expected, rel=1e-4)
    squared = (0.25 * targets**2).mean(1).reshape(32, -1).mean(1) / targets.var(0).mean()
    assert scores["standard_error"] == pytest.approx(squared.std(ddof=1) / 32**0.5, rel=1e-4)
    assert "accuracy" not in scores


def test_a_model_is_trained_and_tested_without_hydra():
    task = MQAR(vocab=8, length=8, pairs=1)
    model = Model(task.vocab, partial(Softmax), d_model=16)
    curve = train(model, task, Training(steps=40, validate_every=20, solved=None), 0, CPU)
    assert [point["step"] for point in curve] == [20, 40]
    scores = evaluate(model, task, {}, 0, "test", recall_lab.train.Testing(tokens=256).sequences_of(task), CPU)
    assert scores["sequences"] == 64
    assert scores["accuracy"] > task.chance


def test_training_learns_and_stops_when_solved():
    net = small_model()
    easy = MQAR(vocab=8, length=8, pairs=1)
    curve = train(net, easy, small_training(steps=2000, validate_every=25, solved=0.99), 0, CPU)
    assert curve[-1]["worst_accuracy"] >= 0.99
    assert curve[-1]["step"] < 2000
    assert all(point["worst_accuracy"] < 0.99 for point in curve[:-1])


def test_a_loss_that_is_not_finite_stops_training():
    net = small_model()
    with torch.no_grad():
        net.read_out.bias[0] = torch.nan
    with pytest.raises(NotFinite, match="step 0 is nan"):
        train(net, TASK, small_training(), 0, CPU)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "train.steps=0: must be a whole number of at least 1"),
        ({"lr": -1.0}, "train.lr=-1.0: must be a number above 0"),
        ({"clip": float("inf")}, "train.clip=inf: must be a number above 0"),
        ({"warmup": 2.0}, "train.warmup=2.0: must be a number from 0 to 1"),
        ({"weight_decay": -0.1}, "train.weight_decay=-0.1: must be a number of at least 0"),
        ({"solved": -0.5}, "train.solved=-0.5: must be a number of at least 0"),
    ],
)
def test_impossible_settings_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        small_training(**changed)


def test_the_first_loss_that_is_not_finite_is_named(monkeypatch):
    """Losses are read at validations only; the message names the step itself."""
    steps = itertools.count()
    monkeypatch.setattr(
        "recall_lab.train.loss", lambda out, targets: out.sum() * (1e-3 if next(steps) < 13 else np.nan)
    )
    with pytest.raises(NotFinite, match="training step 13 is nan"):
        train(small_model(), TASK, small_training(solved=None), 0, CPU)
    assert next(steps) == 20


@pytest.mark.parametrize("mixer", names("mixer"))
def test_a_training_step_and_a_trace_on_the_meta_device(mixer):
    """There a tensor made on another device, or a value that is read, is an error."""
    meta = torch.device("meta")
    model = small_model(mixer).to(meta)
    stepper = Stepper(model, ADAMW, partial(Cosine, total_iters=3), 0.01, 0.1, 1.5, 1.0)
    for number in range(2):
        tokens, scored, targets = to_device(arrays(TASK.sample(3, stream(0, "train", {}, number))), meta)
        value = loss(model(tokens, scored), targets)
        stepper.step(value, number)
        assert value.device.type == "meta"
    source = torch.zeros(3, 16, dtype=torch.long, device=meta)
    traces = model.trace(tokens, source)
    assert {(trace.y if mixer == "module" else trace.o).device.type for trace in traces} == {"meta"}


def test_bf16_and_compile_are_options():
    curve = train(small_model(), TASK, small_training(steps=10, bf16=True), 0, CPU)
    assert np.isfinite(curve[-1]["train_loss"])
    assert curve[-1]["train_loss"] != train(small_model(), TASK, small_training(steps=10), 0, CPU)[-1]["train_loss"]


def test_impossible_training_cells_are_logged_once_in_a_run(caplog):
    """The code that derives the cells of the run logs them; training does not log them again."""
    training_cells(TASK, None)
    assert [message.count("length=2, pairs=1: ") for message in caplog.messages] == [1]
    train(small_model(), TASK, small_training(steps=1), 0, CPU)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("mixer", ["kda", "gla", "rwkv7", "mesa", "lstm", "rnn", "heavy_hitter"])
def test_mechanisms_that_take_minutes_to_compile_are_refused(mixer):
    with pytest.raises(ValueError, match=r"^train.compile=true is not possible with \w+: torch.compile would take"):
        train(small_model(mixer), TASK, small_training(compile=True), 0, CPU)


COMPILED = """
import torch
from recall_lab.mixer.linear import Linear
from recall_lab.model import Model
from recall_lab.task.mqar import MQAR
from recall_lab.train import Training, train

losses = []
for compiled in (False, True):
    torch.manual_seed(0)
    model = Model(32, Linear, d_model=16, layers=1)
    training = Training(steps=10, tokens=256, validation_sequences=8, compile=compiled)
    curve = train(model, MQAR(vocab=32, length=32, pairs=4), training, 0, torch.device("cpu"))
    losses.append(curve[-1]["train_loss"])
assert abs(losses[1] / losses[0] - 1) < 1e-4, losses
"""


@pytest.mark.slow
def test_a_compiled_model_trains_like_an_uncompiled_one():
    """In a process of its own: the type checks of the tests do not work under torch.compile."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_softmax_learns_one_cell_within_200_steps(seed):
    """With default settings; with an initial embedding of standard deviation 1 it stays at chance for 250 steps."""
    defaults = config("mixer=softmax")
    mixer, model, task = (
        hydra.utils.instantiate(defaults[part], _convert_="all") for part in ("mixer", "model", "task")
    )
    torch.manual_seed(seed)
    net = model(vocab=task.vocab, mixer=mixer)
    training = Training(**{name: value for name, value in defaults.train.items() if name not in ("_target_", "cells")}
                        | {"solved": 0.99, "validate_every": 25, "cells": [{"length": 64, "pairs": 8}]})  # fmt: skip
    curve = train(net, task, training, 0, CPU)
    assert curve[-1]["worst_accuracy"] >= 0.99
    assert curve[-1]["step"] <= 200
