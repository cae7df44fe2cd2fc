"""Training and evaluation: scores, learning rate, weight decay, early stopping, options."""

import itertools
import math
from functools import partial
from typing import ClassVar

import hydra
import numpy as np
import pytest
import torch
from conftest import CPU, TASK, config, names, small_model, small_training
from torch import nn

import recall_lab.train
from recall_lab.data import stream, training_cells
from recall_lab.mixer.base import ShortConv
from recall_lab.mixer.softmax import Softmax
from recall_lab.model import Model
from recall_lab.task.base import IGNORE
from recall_lab.task.mqar import MQAR
from recall_lab.train import Interrupted, NotFinite, Training, evaluate, parameter_groups, train


class Solver(nn.Module):
    """A model that answers by the definition of the task (`solve`)."""

    def __init__(self, task, shift=0):
        super().__init__()
        self.task, self.shift = task, shift

    def forward(self, tokens, scored):
        answer = np.roll(self.task.solve(tokens.numpy()), self.shift, axis=1)[scored.numpy()]
        answer = np.where(answer == IGNORE, 0, answer)
        return 20 * torch.nn.functional.one_hot(torch.from_numpy(answer).long(), self.task.vocab).float()


def test_a_perfect_model_scores_one():
    scores = evaluate(Solver(TASK), TASK, {}, 0, "test", 50, CPU)
    assert scores["accuracy"] == scores["sequence_accuracy"] == 1
    assert scores["loss_bits"] < 1e-5
    assert (scores["tokens"], scores["sequences"]) == (200, 50)
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


def test_r2_of_a_continuous_task():
    task = hydra.utils.instantiate(config("task=subset_average").task)

    class Mean(nn.Module):
        def forward(self, tokens, scored):
            return torch.from_numpy(task.solve(tokens.numpy())[scored.numpy()]) * 0.5

    batch = task.sample(32, stream(0, "test", {}, 0))
    targets = batch.targets[batch.scored].astype(float)
    expected = (0.25 * targets**2).sum() / ((targets - targets.mean(0)) ** 2).sum()
    scores = evaluate(Mean(), task, {}, 0, "test", 32, CPU)
    assert scores["error"] == pytest.approx(expected, rel=1e-4)
    assert scores["r2"] == pytest.approx(1 - expected, rel=1e-4)
    assert "accuracy" not in scores


def test_schedule():
    training = small_training(steps=100, warmup=0.1, lr=0.022)
    rates = [training.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.002)  # the first learning rate is one eleventh of the largest, not zero
    assert rates[4] == pytest.approx(0.010)
    assert rates[10] == max(rates) == pytest.approx(0.022)
    assert rates[55] == pytest.approx(0.011)  # halfway through the cosine
    assert rates[99] == pytest.approx(0.022 * (1 - np.cos(np.pi / 90)) / 2)
    assert small_training(warmup=0.0).rate(0) == 0.01


def test_the_first_step_changes_the_weights_by_the_first_learning_rate():
    """Adam's first step moves every weight with a gradient by the learning rate: .01 / (1 + 10 × .5) here."""
    before, one = small_model(), small_model()
    calls = itertools.count()
    with pytest.raises(Interrupted):
        train(one, TASK, small_training(steps=10, warmup=0.5), 0, CPU, stop=lambda: next(calls) == 1)
    change = (one.read_out.bias - before.read_out.bias).detach().abs()
    assert float(change.max()) == pytest.approx(0.01 / 6, rel=1e-3)


def decayed(model: nn.Module) -> set[str]:
    """Names of the weights that weight decay applies to: of linear layers, embeddings, convolutions and recurrences."""
    kinds = (nn.Linear, nn.Embedding, ShortConv)
    weights = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kinds)}
    recurrent = {name for name, _ in model.named_parameters() if name.endswith(("input_weight", "hidden_weight"))}
    return weights | recurrent


def gated(mixer: str) -> Model:
    """A small model with every norm and gate that a mixer has as an option."""
    options = [] if mixer == "hybrid" else [f"mixer.{name}=true" for name in ("qk_norm", "output_norm", "output_gate")]
    return small_model(mixer, overrides=options, mlp=1)


@pytest.mark.parametrize("mixer", names("mixer"))
def test_weight_decay_applies_only_to_weights(mixer):
    """Norms, biases, decays, lengths and offsets are exempt."""
    model = gated(mixer)
    first, second = parameter_groups(model, 0.1)
    shrinks = {id(parameter) for parameter in first["params"]}
    assert {name for name, parameter in model.named_parameters() if id(parameter) in shrinks} == decayed(model)
    assert len(shrinks) + len(second["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("mixer", ["mamba2", "gated_delta"])
def test_weight_decay_without_a_gradient(mixer, monkeypatch):
    """Three steps with zero gradients: weights shrink by Π (1 − rate · weight_decay), nothing else moves."""
    monkeypatch.setattr("recall_lab.train.loss", lambda logits, targets: logits.sum() * 0)
    training = small_training(steps=3, validate_every=3, validation_sequences=1, weight_decay=0.1)
    model = gated(mixer)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, TASK, training, 0, CPU)
    factor = math.prod(1 - training.rate(step) * 0.1 for step in range(3))
    for name, parameter in model.named_parameters():
        if name in decayed(model):
            torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-6, atol=0, msg=name)
        else:
            assert torch.equal(parameter, before[name]), name
    exempt = before.keys() - decayed(model)
    assert {name.rpartition(".")[2] for name in exempt} >= {"A_log", "dt_bias", "q_length", "bias", "weight"}


def test_parameters_that_a_module_names_are_exempt_from_weight_decay():
    class Gate(nn.Module):
        no_weight_decay: ClassVar[tuple[str, ...]] = ("offset",)

        def __init__(self):
            super().__init__()
            self.offset, self.weight = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
            self.scale = nn.Parameter(torch.ones(3))

    module = nn.Sequential(Gate(), nn.Linear(2, 2))
    gate, linear = module
    first, second = parameter_groups(module, 0.1)
    assert [first["weight_decay"], second["weight_decay"]] == [0.1, 0]
    assert {id(p) for p in first["params"]} == {id(gate.weight), id(linear.weight)}
    assert {id(p) for p in second["params"]} == {id(gate.offset), id(gate.scale), id(linear.bias)}


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
