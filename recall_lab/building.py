"""From a run's settings to the objects they describe.

Each part of the settings may only name objects of its own kind. A run's folder from somebody else therefore cannot make
this process call anything but tasks, mixers, models and the like.
"""

import dataclasses
import inspect
import logging
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import hydra
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recall_lab import machine
from recall_lab.checks import require, whole_number
from recall_lab.folders import Config
from recall_lab.logger.base import Logger
from recall_lab.messages import ERRORS, one_line
from recall_lab.mixer.base import Mixer
from recall_lab.mixer.layer import Layer
from recall_lab.oracle import Oracle, ineffective_options
from recall_lab.task.base import Task
from recall_lab.train import Testing, Training
from recall_lab.workload import Workload

logging.getLogger("hydra.utils").addHandler(logging.NullHandler())  # it would print errors that `_located` raises

KINDS: dict[str, type] = {
    "task": Task,
    "mixer": Layer,
    "model": nn.Module,
    "train": Training,
    "test": Testing,
    "oracle": Oracle,
    "optimizer": Optimizer,
    "schedule": LRScheduler,
    "logger": Logger,
}
"""The class that each part's `_target_` must be, or return; for a probe: a function of trace or model."""


def build(config: Config) -> Workload:
    """The workload that the settings describe, of the class that `_target_` names.

    Raises ValueError where a `_target_` cannot be imported, or is not of the kind that belongs there, and any error
    that a part raises for impossible settings.
    """
    kind = _located("_target_", config["_target_"])
    require(inspect.isclass(kind) and issubclass(kind, Workload), f"_target_={config['_target_']}: must be a Workload")
    given = {item.name: config[item.name] for item in dataclasses.fields(kind) if item.name in config}
    for name, part in given.items():
        check_targets(name, part)
        if name in KINDS:
            require(
                "_target_" in part, f"{name}: its configuration has no _target_, so it is no {KINDS[name].__name__}"
            )
    return hydra.utils.instantiate({"_target_": config["_target_"], **given}, _convert_="all")


def check(config: Config) -> None:
    """Raises the error of the faulty part if a run with these settings could not start.

    All parts are built, the model on the meta device. Whether the run's device exists is not checked: another machine
    may do the run.
    """
    machine.kind(config["device"])
    whole_number("threads", config["threads"])
    build(config).check()


def loggers(configs: Iterable[Any]) -> list[Logger]:
    """The loggers that the setting `logger` of a run describes. Raises what `build` raises."""
    configs = list(configs)
    for config in configs:
        require(
            isinstance(config, dict) and "_target_" in config, f"logger: {config} has no _target_, so it is no Logger"
        )
        check_targets("logger", config)
    return [hydra.utils.instantiate(config, _convert_="all") for config in configs]


def problem(settings: Config) -> str:
    """Why a run with these settings cannot start, on whichever machine; "" if it can."""
    try:
        check(settings)
    except OmegaConfBaseException:
        raise
    except (*ERRORS, RuntimeError, TypeError, ArithmeticError, LookupError) as error:
        return one_line(error)
    return ""


def check_targets(part: str, config: Any) -> None:
    """Raises ValueError unless every `_target_` in this part is of its kind (see KINDS).

    part  path of the configuration: "mixer", or "mixer.first" within it, where any torch.nn.Module is allowed
    """
    for name, value in config.items() if isinstance(config, dict) else ():
        if name == "_target_":
            kind, _, within = part.partition(".")
            found = _located(f"{part}._target_", value)
            wanted = nn.Module if kind == "mixer" and within else KINDS.get(kind)
            require(_belongs(found, kind, wanted), f"{part}._target_={value}: must be {_wanted(kind, wanted)}")
        elif isinstance(value, dict):
            check_targets(f"{part}.{name}", value)


def _located(name: str, target: object) -> Any:
    try:
        return hydra.utils.get_object(str(target))
    except Exception as error:
        cause = one_line(error.__cause__ or error)
        raise ValueError(f"{name}={target} cannot be imported: {cause}") from error


def _belongs(found: object, kind: str, wanted: type | None) -> bool:
    if kind == "probe":
        return inspect.isfunction(found) and next(iter(inspect.signature(found).parameters), "") in ("trace", "model")
    if inspect.isclass(found):
        return wanted is not None and issubclass(found, wanted)
    # A factory is recognised by its annotation: def hybrid(…) -> list[Callable[..., Layer]].
    returned = typing.get_type_hints(found).get("return") if inspect.isfunction(found) else None
    return wanted is not None and any(issubclass(part, wanted) for part in _classes(returned))


def _classes(annotation: Any) -> Iterator[type]:
    """Every class that an annotation names: list and Layer of list[Callable[..., Layer]]."""
    origin = typing.get_origin(annotation) or annotation
    if inspect.isclass(origin):
        yield origin
    for part in typing.get_args(annotation):
        yield from _classes(part)


def _wanted(kind: str, wanted: type | None) -> str:
    if kind == "probe":
        return "a function whose first argument is named trace or model"
    return f"a {wanted.__name__}, or a function that is annotated to return one" if wanted else "left out"


def ineffective_mixer_options(mixer: Config) -> dict[str, str]:
    """Options of this mixer that have no effect when the oracle runs it, each with the reason."""
    found = _located("mixer._target_", mixer["_target_"])
    return ineffective_options(found) if inspect.isclass(found) and issubclass(found, Mixer) else {}
