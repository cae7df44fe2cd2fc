"""The optimiser and the schedule of the learning rate: which parameters decay, the cosine, warm-up, and steps.

An optimiser is a function of (parameter groups, lr), a schedule is a function of the optimiser that returns a scheduler
of torch. conf/optimizer and conf/schedule name them; any class of torch.optim and torch.optim.lr_scheduler fits, except
those that need a closure.
"""

import fnmatch
import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from recall_lab.checks import require, share, whole_number

OptimizerFactory = Callable[..., torch.optim.Optimizer]
"""Makes an optimiser from parameter groups and lr."""

ScheduleFactory = Callable[[torch.optim.Optimizer], LRScheduler]
"""Makes the scheduler of an optimiser. It starts at the optimiser's rate, train.lr, and is stepped after each step; one
that waits for a plateau is stepped with the loss of each validation."""

ADAMW: OptimizerFactory = partial(torch.optim.AdamW, betas=(0.9, 0.999), eps=1e-8)

OWN = {"params": "the model", "lr": "train.lr", "weight_decay": "train.weight_decay"}
"""Argument of an optimiser → what gives it its value."""


class Cosine(LRScheduler):
    """lr during the warm-up; then lr · ½ (1 + cos π u), u rising from 0 to 1 over the remaining steps; then 0.

    total_iters  steps of the whole training
    begin        share of them before the cosine begins: the warm-up
    """

    def __init__(self, optimizer: torch.optim.Optimizer, total_iters: int, begin: float = 0.05) -> None:
        whole_number("schedule.total_iters", total_iters)
        share("schedule.begin", begin)
        self.total_iters, self.begin = total_iters, begin
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each parameter group at step `last_epoch`, counted from 0."""
        warm = self.begin * self.total_iters
        done = max(0.0, min(self.last_epoch, self.total_iters) - warm)
        factor = 0.5 * (1 + math.cos(math.pi * done / max(1, self.total_iters - warm)))
        return [lr * factor for lr in self.base_lrs]


def parameter_groups(model: nn.Module, weight_decay: float, exempted: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The optimiser's two parameter groups: parameters with weight decay, and parameters without.

    Exempt are parameters with fewer than two axes (norms, biases, decays, offsets and lengths per head or channel),
    those that a module lists in its class attribute `no_weight_decay`, and those whose names match one of the patterns
    in `exempted` ("embed.*"). Everything else decays: projections, convolutions, and the embedding too, as in nanoGPT
    and Megatron-LM. Raises ValueError for a pattern that matches no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in exempted:
        require(
            bool(fnmatch.filter(names, pattern)),
            f"train.no_weight_decay: {pattern!r} matches no parameter; there are {', '.join(names)}",
        )
    exempt = {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim < 2 or name in getattr(module, "no_weight_decay", ())
    } | {p for name, p in model.named_parameters() if any(fnmatch.fnmatchcase(name, one) for one in exempted)}
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p not in exempt], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p in exempt], "weight_decay": 0.0},
    ]


def check(optimizer: OptimizerFactory, schedule: ScheduleFactory | None, weight_decay: float) -> None:
    """Raises ValueError for a setting that is impossible, unknown to the chosen class, or without effect; names it."""
    accepted = _arguments("optimizer", optimizer, set(OWN))
    for name in ("lr", "params"):
        require(name in accepted, f"optimizer: {_name(optimizer)} takes no {name}, so it cannot be used")
    require(
        weight_decay == 0 or "weight_decay" in accepted,
        f"train.weight_decay={weight_decay}: has no effect with {_name(optimizer)}",
    )
    kind = optimizer.func if isinstance(optimizer, partial) else optimizer
    closure = inspect.signature(getattr(kind, "step", lambda: None)).parameters.get("closure")
    require(
        closure is None or closure.default is not closure.empty,
        f"optimizer: {_name(optimizer)} evaluates the loss several times per step (a closure), which is not supported",
    )
    made = _made("optimizer", optimizer, [nn.Parameter(torch.zeros(2, 2))], lr=1.0)
    if schedule is not None:
        _arguments("schedule", schedule, {"optimizer"})
        _made("schedule", schedule, made)


def _arguments(part: str, factory: Callable[..., Any], given: set[str]) -> set[str]:
    """Names of the factory's arguments. Raises ValueError for one that is set, but unknown or in `given`."""
    bound = factory.keywords if isinstance(factory, partial) else {}
    parameters = inspect.signature(factory.func if isinstance(factory, partial) else factory).parameters
    for name in bound:
        require(name not in given, f"{part}.{name} cannot be set: {OWN.get(name, 'the optimiser')} gives its value")
        require(
            name in parameters,
            f"{part}.{name} has no effect: {_name(factory)} has only {', '.join(sorted(set(parameters) - given))}",
        )
    return set(parameters)


def _made(part: str, factory: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    try:
        return factory(*arguments, **more)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{part}: {_name(factory)}: {error}") from error


def _name(factory: Callable[..., Any]) -> str:
    return getattr(factory.func if isinstance(factory, partial) else factory, "__name__", repr(factory))


class Stepper:
    """A model's optimiser with its schedule, warm-up and clipping: everything that turns a loss into a step.

    lr            largest learning rate
    weight_decay  see `parameter_groups`, also for `exempted`
    warmup        number of steps, possibly fractional, in which the scheduled rate is multiplied by
                  (step + 1) / (warmup + 1)
    clip          largest norm of the gradient of all parameters together
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        schedule: ScheduleFactory,
        lr: float,
        weight_decay: float,
        warmup: float,
        clip: float,
        exempted: Sequence[str] = (),
    ) -> None:
        self.parameters, self.warmup, self.clip = list(model.parameters()), warmup, clip
        groups: list[Any] = parameter_groups(model, weight_decay, exempted)
        if "weight_decay" not in _arguments("optimizer", optimizer, set(OWN)):
            groups = [{"params": self.parameters}]
        fused = {"fused": True} if _may_be_fused(optimizer, self.parameters[0].device) else {}
        self.optimizer: torch.optim.Optimizer = _made("optimizer", optimizer, groups, lr=lr, **fused)
        self.scheduler: LRScheduler = _made("schedule", schedule, self.optimizer)

    def step(self, value: Tensor, number: int) -> None:
        """Step `number`, counted from 0, down the clipped gradient of the loss `value`. Nothing is read back."""
        self.optimizer.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.clip)
        groups = self.optimizer.param_groups
        scheduled = [group["lr"] for group in groups]
        if number < self.warmup:
            for group in groups:
                group["lr"] = group["lr"] * (number + 1) / (self.warmup + 1)
        self.optimizer.step()
        for group, rate in zip(groups, scheduled, strict=True):
            group["lr"] = rate
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()

    def validated(self, loss: float) -> None:
        """Passes the loss of a validation to a scheduler that waits for it."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)

    def state_dict(self) -> dict[str, Any]:
        """The states of optimiser and scheduler."""
        return {"optimizer": self.optimizer.state_dict(), "schedule": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["schedule"])


def _may_be_fused(optimizer: OptimizerFactory, device: torch.device) -> bool:
    """Whether to use the form of Adam and AdamW that updates all parameters in one kernel, where it exists."""
    if not isinstance(optimizer, partial) or {"foreach", "fused"} & set(optimizer.keywords):
        return False
    return optimizer.func in (torch.optim.Adam, torch.optim.AdamW) and device.type in ("cpu", "cuda")
