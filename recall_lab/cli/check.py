"""`recall-lab check mixer=… task=…`: checks any mixer or task against the contract of the built-in ones."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import hydra
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from omegaconf import OmegaConf

from recall_lab.checks import require
from recall_lab.cli.base import compose, parse, part_of
from recall_lab.contract.base import Finding, examine, raised
from recall_lab.files import searched
from recall_lab.messages import print_line

WIDTH = 16
"""d_model of a mixer that is checked."""

Subject = tuple[str, Iterable[Finding]]
"""A description of what is checked, and the findings."""


def check(words: list[str], config_dir: str | None = None, golden: str | None = None) -> int:
    """Prints one line per check. The exit status is 1 where one failed.

    Of a setting with several values (mixer=linear,delta_rule) each is checked.
    Raises ValueError where nothing that can be checked is given, and for a setting that has no effect.
    """
    overrides = parse(words)
    require(bool(overrides), "nothing to check: give mixer=NAME, task=NAME or both; `recall-lab list` shows the names")
    for override in overrides:
        require(
            part_of(override.key_or_group) in ("mixer", "task"),
            f"{override.key_or_group} has no effect: check examines mixers and tasks (mixer=…, task=…, mixer.heads=…)",
        )
        require(not override.is_delete(), f"{override.input_line}: a setting cannot be removed; give it a value")
    mixers, tasks = ([o for o in overrides if part_of(o.key_or_group) == part] for part in ("mixer", "task"))
    require(not golden or bool(mixers), "--golden has reference arrays of a mechanism: give mixer=NAME as well")
    arrays = None
    if golden is not None:
        from recall_lab.contract.golden import load

        arrays = load(golden)
    failed = False
    for settings in combinations(mixers):
        for title, findings in examined(settings, config_dir, arrays):
            failed |= _print(title, findings)
    for settings in combinations(tasks):
        failed |= _print(*_task(settings, config_dir))
    return 1 if failed else 0


def combinations(overrides: Sequence[Override]) -> Iterator[list[str]]:
    """Every combination of the values of the overrides, as words without a sweep; none for no overrides."""
    if not overrides:
        return
    for chosen in product(*map(values, overrides)):
        yield [f"{o.get_key_element()}={value}" for o, value in zip(overrides, chosen, strict=True)]


def values(override: Override) -> list[str]:
    """The values of an override, as words: several for a sweep. Raises ValueError for a sweep that lists none."""
    value, key = override.value(), override.key_or_group
    if isinstance(value, Glob):
        names = sorted({path.stem for folder in searched() for path in (folder / key).glob("*.yaml")})
        require(bool(names), f"{override.input_line}: glob(…) lists the options of a group, as of mixer; {key} is none")
        found = value.filter(names)
        require(bool(found), f"{override.input_line}: there is no such {key}; there are {', '.join(names)}")
        return found
    require(
        not isinstance(value, IntervalSweep),
        f"{override.input_line}: an interval has no list of values; give them one by one, or range(start,stop,step)",
    )
    return (
        list(override.sweep_string_iterator())
        if override.is_sweep_override()
        else [override.get_value_element_as_str()]
    )


def _print(title: str, findings: Iterable[Finding]) -> bool:
    """Prints the findings as they are made, and a line that sums them up. Returns whether one failed."""
    print_line(title)
    failed = []
    for finding in findings:
        mark = "FAILED" if finding.failed else "ok" if finding.holds else "-"
        print_line(f"  {mark:<6}  {finding.check}: {finding.detail}")
        failed += [finding.check] if finding.failed else []
    print_line(f"  {len(failed)} failed: {', '.join(failed)}" if failed else "  none failed")
    return bool(failed)


def examined(settings: list[str], config_dir: str | None, arrays: dict[str, Any] | None = None) -> Iterator[Subject]:
    """The mixer that the settings describe; of a hybrid, each that its layers have.

    It has two heads where the settings name no number, since errors in the order of axes need two to show.
    """
    makes = makers(compose(settings, config_dir).mixer)
    for number, make in enumerate(makes, start=1):
        part = f", mechanism {number} of {len(makes)}" if len(makes) > 1 else ""
        sizes = {"d_model": WIDTH}
        if not any(".heads=" in word for word in settings) and _made(make, **sizes, heads=2)[0] is not None:
            sizes["heads"] = 2
        title = f"{' '.join(settings)}{part}, with {', '.join(f'{name}={size}' for name, size in sizes.items())}"
        yield title, _mixer_findings(make, sizes, arrays)


def makers(config: Any) -> list[Callable[..., Any]]:
    """The function that makes the mixer of this configuration, from d_model; of a hybrid, that of each mechanism."""
    from recall_lab.building import check_targets

    check_targets("mixer", OmegaConf.to_container(config, resolve=True))
    made = hydra.utils.instantiate(config, _convert_="all")
    return list(dict.fromkeys(made)) if isinstance(made, list) else [made]


def _made(make: Callable[..., Any], **sizes: int) -> tuple[Any, str]:
    """The mixer, and an empty text; or None, and why it cannot be made."""
    from recall_lab.contract.mixer import built

    try:
        return built(make, **sizes), ""
    except Exception as error:  # a user's own code may raise anything
        return None, raised(error)


def _mixer_findings(
    make: Callable[..., Any], sizes: dict[str, int], arrays: dict[str, Any] | None
) -> Iterator[Finding]:
    from recall_lab.contract import golden
    from recall_lab.contract.mixer import CHECKS
    from recall_lab.mixer.base import Mixer

    mixer, fault = _made(make, **sizes)
    if mixer is None:
        yield Finding(False, fault, "construction")
        return
    name = type(mixer).__name__
    require(isinstance(mixer, Mixer), f"{name} has no queries, keys and values; it is checked when a run first uses it")
    yield from examine(CHECKS, mixer)
    if arrays is not None:
        try:
            yield from golden.findings(make, arrays)
        except Exception as error:  # as above
            yield Finding(False, raised(error), "golden")


def _task(settings: list[str], config_dir: str | None) -> Subject:
    from recall_lab.building import check_targets

    config = compose(settings, config_dir).task
    check_targets("task", OmegaConf.to_container(config, resolve=True))
    return " ".join(settings), _task_findings(config)


def _task_findings(config: Any) -> Iterator[Finding]:
    from recall_lab.contract.task import CHECKS

    try:
        task = hydra.utils.instantiate(config, _convert_="all")
    except hydra.errors.InstantiationException as error:
        cause = error.__cause__
        yield Finding(False, raised(cause if isinstance(cause, Exception) else error), "construction")
        return
    yield from examine(CHECKS, task)
