"""The optimiser and the schedule: rates, warm-up, weight decay, other classes of torch, refused settings."""

import itertools
import math
from functools import partial
from typing import ClassVar

import pytest
import torch
from conftest import CPU, TASK, config, names, small_model, small_training
from hydra.utils import instantiate
from torch import nn
from torch.optim import lr_scheduler

from recall_lab.checkpoint import load
from recall_lab.mixer.base import ShortConv
from recall_lab.model import Model
from recall_lab.optimization import ADAMW, Cosine, Stepper, check, parameter_groups
from recall_lab.train import Interrupted, Training, train


def rates(schedule, steps: int = 100, warmup: float = 0.0, lr: float = 0.022) -> list[float]:
    """The learning rate that the optimiser sees in each step."""
    module, seen = nn.Linear(1, 1), []
    stepper = Stepper(module, torch.optim.SGD, schedule, lr, 0.0, warmup * steps, 1.0)
    stepper.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    for step in range(steps):
        stepper.step(module(torch.ones(1, 1)).sum(), step)
    return seen


def by_hand(step: int, steps: int, warmup: float, lr: float) -> float:
    """Linear warm-up, then a cosine down to zero."""
    warm = warmup * steps
    if step < warm:
        return lr * (step + 1) / (warm + 1)
    return lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def test_the_cosine_and_its_warm_up():
    found = rates(partial(Cosine, total_iters=100, begin=0.1), warmup=0.1)
    assert found[0] == pytest.approx(0.002)  # the first learning rate is one eleventh of the largest, not zero
    assert found[4] == pytest.approx(0.010)
    assert found[10] == max(found) == pytest.approx(0.022)
    assert found[55] == pytest.approx(0.011)  # halfway through the cosine
    for steps, warmup in ((57, 0.13), (100, 0.0), (10, 1.0), (1, 0.05)):
        expected = [by_hand(step, steps, warmup, 0.01) for step in range(steps)]
        assert rates(partial(Cosine, total_iters=steps, begin=warmup), steps, warmup, 0.01) == expected


def test_a_cosine_over_fewer_steps_stays_at_zero():
    assert rates(partial(Cosine, total_iters=5, begin=0.0), 9)[5:] == [0, 0, 0, 0]


def test_warm_up_applies_to_any_schedule_of_torch():
    """Also to one that computes each rate from the one before, as StepLR and LinearLR do."""
    halves = partial(lr_scheduler.StepLR, step_size=3, gamma=0.5)
    expected = [4 * (step + 1) / 5 if step < 4 else 4 for step in range(10)]
    expected = [rate * 0.5 ** (step // 3) for step, rate in enumerate(expected)]
    assert rates(halves, 10, 0.4, 4.0) == pytest.approx(expected)
    line = partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.0, total_iters=10)
    assert rates(line, 10, 0.0, 1.0) == pytest.approx([1 - step / 10 for step in range(10)])


def test_a_plateau_is_judged_by_validations():
    """The rate falls only after a validation whose loss has not improved, at patience 0."""
    module = nn.Linear(1, 1)
    stepper = Stepper(module, torch.optim.SGD, partial(lr_scheduler.ReduceLROnPlateau, patience=0), 1.0, 0.0, 0.0, 1.0)
    seen = []
    for number, loss in enumerate((3.0, 2.0, 2.5)):
        stepper.step(module(torch.ones(1, 1)).sum(), number)
        stepper.validated(loss)
        seen.append(stepper.optimizer.param_groups[0]["lr"])
    assert seen == [1, 1, pytest.approx(0.1)]


def chosen(*overrides: str) -> dict:
    """The optimiser and the schedule that the command line would make."""
    composed = config(*overrides)
    return {part: instantiate(composed[part], _convert_="all") for part in ("optimizer", "schedule")}


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


SETTINGS = [
    [],
    ["optimizer.betas=[0.5,0.9]"],
    ["optimizer.eps=1"],
    ["+optimizer.amsgrad=true"],
    ["optimizer=sgd"],
    ["optimizer=sgd", "optimizer.momentum=0"],
    ["optimizer=sgd", "optimizer.nesterov=true"],
    ["schedule=linear"],
    ["schedule=constant"],
    ["schedule.total_iters=10"],
    ["schedule.begin=0.5"],
]


def test_every_setting_changes_the_result():
    found = []
    for overrides in SETTINGS:
        model = small_model()
        train(model, TASK, small_training(steps=12), 0, CPU, **chosen("train.steps=12", *overrides))
        found.append(weights(model))
    pairs = itertools.combinations(zip(SETTINGS, found, strict=True), 2)
    assert [(one, other) for (one, x), (other, y) in pairs if torch.equal(x, y)] == []


def test_the_defaults_of_the_configuration_are_those_of_the_code():
    one, other = small_model(), small_model()
    train(one, TASK, small_training(steps=12), 0, CPU)
    train(other, TASK, small_training(steps=12), 0, CPU, **chosen("train.steps=12"))
    assert torch.equal(weights(one), weights(other))
    optimizer, schedule = chosen().values()
    assert optimizer.func is ADAMW.func
    assert {name: list(x) if name == "betas" else x for name, x in ADAMW.keywords.items()} == optimizer.keywords
    assert (schedule.func, schedule.keywords) == (Cosine, {"total_iters": 1000, "begin": 0.05})


OTHERS = {
    "default": {},
    "momentum": {"optimizer": partial(torch.optim.SGD, momentum=0.9)},
    "no weight decay": {"optimizer": torch.optim.Rprop},
    "one cycle": {"schedule": partial(lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=30)},
    "cyclic": {"optimizer": partial(torch.optim.SGD, momentum=0.9),
               "schedule": partial(lr_scheduler.CyclicLR, base_lr=1e-3, max_lr=1e-2, step_size_up=4)},
    "plateau": {"schedule": partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=0.5)},
    "chainable": {"schedule": partial(lr_scheduler.ExponentialLR, gamma=0.9)},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_training_resumes_exactly_with_any_optimiser_and_schedule(name, tmp_path):
    """Stopped during the warm-up and after it; weights, curve and both states are equal bit for bit."""
    training, more = small_training(solved=None, warmup=0.4), OTHERS[name]
    whole = small_model()
    expected = train(whole, TASK, training, 0, CPU, tmp_path / "whole.pt", **more)
    path, calls, curve, legs = tmp_path / "parts.pt", itertools.count(1), None, 0
    while curve is None:
        model, legs = small_model(seed=legs), legs + 1
        try:
            curve = train(model, TASK, training, 0, CPU, path, stop=lambda: next(calls) % 9 == 0, **more)
        except Interrupted:
            continue
    assert legs == 4
    saved, wanted = load(path, CPU), load(tmp_path / "whole.pt", CPU)
    assert torch.equal(weights(model), weights(whole))
    torch.testing.assert_close(saved["optimizer"], wanted["optimizer"], rtol=0, atol=0)
    assert saved["schedule"] == wanted["schedule"]
    assert [point["loss"] for point in curve] == [point["loss"] for point in expected]


SGD, LINE = torch.optim.SGD, lr_scheduler.LinearLR


@pytest.mark.parametrize(
    ("optimizer", "schedule", "decay", "message"),
    [
        (partial(SGD, betas=[0.9, 0.99]), None, 0.0, "optimizer.betas has no effect: SGD has only dampening"),
        (partial(SGD, lr=1.0), None, 0.0, "optimizer.lr cannot be set: train.lr gives its value"),
        (partial(SGD, weight_decay=1.0), None, 0.0, "optimizer.weight_decay cannot be set: train.weight_decay gives"),
        (torch.optim.Rprop, None, 0.1, "train.weight_decay=0.1: has no effect with Rprop"),
        (torch.optim.LBFGS, None, 0.0, "LBFGS evaluates the loss several times per step"),
        (partial(torch.optim.AdamW, betas=[2, 0.9]), None, 0.0, "optimizer: AdamW: Invalid beta parameter"),
        (ADAMW, partial(lr_scheduler.StepLR, gamma=0.1), 0.0, "schedule: StepLR: .*step_size"),
        (ADAMW, partial(LINE, size=1), 0.0, "schedule.size has no effect: LinearLR has only end_factor"),
        (ADAMW, partial(LINE, optimizer=1), 0.0, "schedule.optimizer cannot be set: the optimiser gives its value"),
        (ADAMW, partial(LINE, start_factor=7.0), 0.0, "schedule: LinearLR: Starting multiplicative factor"),
        (ADAMW, partial(Cosine, total_iters=0), 0.0, "schedule.total_iters=0: must be a whole number"),
        (ADAMW, partial(Cosine, total_iters=9, begin=2), 0.0, "schedule.begin=2: must be a number from 0 to 1"),
    ],
)
def test_settings_that_are_impossible_or_without_effect_are_refused(optimizer, schedule, decay, message):
    with pytest.raises(ValueError, match=message):
        check(optimizer, schedule, decay)


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
    ends = ("input_weight", "hidden_weight", "weight_ih_l0", "weight_hh_l0")
    recurrent = {name for name, _ in model.named_parameters() if name.endswith(ends)}
    return weights | recurrent


def gated(mixer: str) -> Model:
    """A small model with every norm and gate that a mixer has as an option."""
    options = (
        []
        if mixer in ("hybrid", "module")
        else [f"mixer.{name}=true" for name in ("qk_norm", "output_norm", "output_gate")]
    )
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
    """Three steps with zero gradients: weights shrink by Π (1 − rate · weight_decay), nothing else moves.

    The rates are those of a cosine over three steps: .01 · ½ (1 + cos u) at u = 0, π/3 and 2π/3.
    """
    monkeypatch.setattr("recall_lab.train.loss", lambda logits, targets: logits.sum() * 0)
    training = small_training(steps=3, validate_every=3, validation_sequences=1, weight_decay=0.1, warmup=0)
    model = gated(mixer)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, TASK, training, 0, CPU)
    factor = math.prod(1 - rate * 0.1 for rate in (0.01, 0.0075, 0.0025))
    for name, parameter in model.named_parameters():
        if name in decayed(model):
            torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-6, atol=0, msg=name)
        else:
            assert torch.equal(parameter, before[name]), name
    exempt = before.keys() - decayed(model)
    assert {name.rpartition(".")[2] for name in exempt} >= {"A_log", "dt_bias", "q_length", "bias", "weight"}


def test_parameters_that_a_setting_names_are_exempt_from_weight_decay():
    model = small_model("linear")
    first, _ = parameter_groups(model, 0.1, ["embed.*", "blocks.*.o_proj.weight"])
    shrinks = {id(parameter) for parameter in first["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in shrinks}
    assert names == {n for n in decayed(model) if not n.startswith("embed") and not n.endswith("o_proj.weight")}
    with pytest.raises(
        ValueError, match=r"train.no_weight_decay: 'embedd\.\*' matches no parameter; there are embed\.w"
    ):
        parameter_groups(model, 0.1, ["embedd.*"])
    with pytest.raises(ValueError, match=r"has no effect with train\.weight_decay=0"):
        Training(no_weight_decay=["embed.*"])


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
