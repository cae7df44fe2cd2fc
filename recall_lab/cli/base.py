"""Used by several commands: composing the configuration with Hydra, and reading overrides with Hydra's own parser."""

import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recall_lab.checks import choice, flag, require
from recall_lab.files import CONF, OWN, searched, use
from recall_lab.folders import Config, flatten, without
from recall_lab.messages import no_setting, one_line

SIZES = ("small", "large")
"""Values of `size`: `${sized:a,b}` is a for small and b for large."""

PLACEMENT = ("name", "root")
"""The settings that determine the folder of a sweep."""

GENERAL = (*PLACEMENT, "report", "skip_invalid", "select", "logger", "device", "threads", "deterministic")
"""Settings that every kind of run uses."""

RATES = Path(__file__).parents[1] / "rates.yaml"
"""task → mixer → learning rate. A rates.yaml in a folder given with --config-dir has precedence."""

DEFAULT_RATE = 1e-2
"""The rate of a mechanism or task that was not studied."""

MISSING = object()
"""Default of a lookup of a setting, whose value may be None."""


def sized(small: Any, large: Any, *, _root_: DictConfig) -> Any:
    """The one of two values that the setting `size` chooses; in a configuration `${sized:small,large}`."""
    choice("size", _root_.size, SIZES)
    return (small, large)[SIZES.index(_root_.size)]


OmegaConf.register_new_resolver("sized", sized, replace=True)


STUDIED = "studied"
"""The value of train.lr that stands for the rate in rates.yaml of a run's task and mixer."""


def studied_rate(task: str, mixer: str) -> float:
    """The rate in rates.yaml of a task and a mixer, as they are named on the command line; DEFAULT_RATE and a note if
    there is none. A variant (delta_rule/neg_eigval) without a rate of its own has that of its mechanism."""
    studied = read_rates().get(task, {})
    for name in (mixer, mixer.partition("/")[0]):
        if name in studied:
            return studied[name]
    _note(f"the learning rate of {mixer} on {task} was not studied: train.lr={DEFAULT_RATE:g}")
    return DEFAULT_RATE


@cache
def _note(line: str) -> None:
    sys.stderr.write(f"recall-lab: note: {line}\n")


def read_rates() -> dict[str, dict[str, float]]:
    """The content of rates.yaml, with that of the user's own folder."""
    found: dict[str, dict[str, float]] = {}
    for path in (RATES, *(folder / RATES.name for folder in OWN)):
        content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
        for task, rates in (content or {}).items():
            found[task] = found.get(task, {}) | rates
    return found


def launch(words: Iterable[str]) -> int:
    """Runs `recall-lab run WORDS` in a new process and returns its exit status.

    A new process, because Hydra keeps global state. Raises KeyboardInterrupt where the command was interrupted.
    """
    code = subprocess.run([sys.executable, "-m", "recall_lab", "run", *words], check=False).returncode
    if code in (129, 130, 143):
        raise KeyboardInterrupt
    return code


def parse(overrides: Iterable[str]) -> list[Override]:
    """The overrides as Hydra reads them. Raises hydra's OverrideParseException, a HydraException, if it cannot."""
    return OverridesParser.create().parse_overrides(list(overrides))


def compose(overrides: Iterable[str], config_dir: str | None = None, with_hydra: bool = False) -> DictConfig:
    """The configuration as `recall-lab run` would compose it; with_hydra: with Hydra's own part and its choices.

    config_dir  the user's own folder; None: the one in use, if any

    Raises ValueError where config_dir cannot be used (see `files.use`).
    """
    overrides = list(overrides)
    if config_dir is not None:
        use(config_dir)
    for folder in OWN:
        overrides.append(f"hydra.searchpath=[{quoted(f'file://{folder}')}]")
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", overrides, return_hydra_config=with_hydra)


def leading_comment(path: Path) -> str:
    """The comment lines of a yaml that begin at the left margin, which say what it is for, without `@package`."""
    comments = [line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    return "\n".join(line for line in comments if not line.startswith("@package"))


def experiment_files(config: DictConfig) -> list[Path]:
    """The yaml of the chosen experiment, the user's own first; none where none is chosen. config: with Hydra's part."""
    name = config.hydra.runtime.choices.get("experiment")
    paths = [folder / "experiment" / f"{name}.yaml" for folder in searched()] if name else []
    return [path for path in paths if path.exists()]


def part_of(key: str) -> str:
    """The first part of a setting's or group's name: task of task.length, hydra of hydra/launcher."""
    return key.partition(".")[0].partition("/")[0]


def quoted(text: str) -> str:
    """The text as a string of Hydra's override grammar, in quotes unless it is a plain path."""
    if re.fullmatch(r"[\w.-]*(/[\w.-]+)+", text, re.ASCII):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def resolved(config: DictConfig, choices: dict[str, Any]) -> Config:
    """The settings that the run uses, as plain values, with its circumstances and the names of what was chosen.

    choices  the option that was chosen of each config group
    """
    settings = OmegaConf.to_container(config.workload, resolve=True)
    assert isinstance(settings, dict)
    task = choices["task"] if "task" in settings else "oracle"
    if "train" in settings and settings["train"].get("lr") == STUDIED:
        settings["train"]["lr"] = studied_rate(task, str(choices["mixer"]))
    loggers = OmegaConf.to_container(config.logger, resolve=True) if config.logger else {}
    assert isinstance(loggers, dict)
    circumstances = {
        **({"logger": list(loggers.values())} if loggers else {}),
        "device": config.device,
        "threads": config.threads,
        "deterministic": config.deterministic,
        "choice": {"task": task, "mixer": choices["mixer"]},
    }
    return {str(key): value for key, value in settings.items()} | circumstances


def sweep_folder(config: DictConfig) -> Path:
    """ROOT/NAME. Raises ValueError where one of them is not a text, or cannot be resolved before a run starts."""
    try:
        parts = {key: config[key] for key in reversed(PLACEMENT)}
    except OmegaConfBaseException as error:
        raise ValueError(f"name and root must be known before the first run starts: {one_line(error)}") from error
    for key, value in parts.items():
        text = isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip()
        require(bool(text), f"{key}={value}: must be the name of a folder")
        inside = key != "name" or not {"..", "/"} & {*Path(str(value)).parts}
        require(inside, f"name={value}: must be a folder in root={config.root}; give another root=…")
    return Path(*map(str, parts.values()))


def job(config: DictConfig, folder: Path) -> Config:
    """The settings of one job, composed by Hydra and with its part in place.

    folder  that of the sweep. Raises ValueError where the job's is another: of several experiments each may set its own
            name.
    """
    own = sweep_folder(config)
    require(
        own == folder,
        f"this sweep would put runs into different folders, among them {own}, without a report of all of "
        "them; give one name=…, or run the commands one by one",
    )
    return resolved(config, dict(HydraConfig.get().runtime.choices))


def refuse(config: DictConfig, overrides: list[Override]) -> None:
    """Raises ValueError for an override, or a setting in a chosen experiment, that would be ignored, naming it and what
    has an effect instead; and for impossible values of the settings of the command itself.

    config: composed from the overrides that are not sweeps, with Hydra's part.
    """
    refuse_twice(overrides)
    _refuse_unknown(config)
    _check_loggers(config)
    flag("report", config.report)
    flag("skip_invalid", config.skip_invalid)
    flag("deterministic", config.deterministic)
    select = OmegaConf.to_container(config.select) if OmegaConf.is_list(config.select) else None
    require(select is not None, f"select={config.select}: must be a list of settings, as in select=[train.lr]")
    for name in config.select:
        if OmegaConf.select(config, str(name), default=MISSING) is MISSING:
            raise ValueError(f"select: {no_setting(str(name))}")
    _refuse_ineffective(config, {override.key_or_group for override in overrides})
    for path in experiment_files(config):
        content = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(content, dict)
        chosen = without(flatten({str(key): value for key, value in content.items()}), ["defaults"])
        try:
            _refuse_ineffective(config, set(chosen))
        except ValueError as error:
            raise ValueError(f"experiment={path.stem}: {error}") from error


def _check_loggers(config: DictConfig) -> None:
    """Raises ValueError where a logger is impossible, or what it needs is not installed."""
    for name, part in (config.logger or {}).items():
        from recall_lab.building import loggers

        (logger,) = loggers([OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else part])
        try:
            logger.check()
        except ValueError as error:
            raise ValueError(f"logger={name}: {error}") from error


def no_effect(config: DictConfig, key: str) -> str:
    """Why a setting or group has no effect in the kind of run of this configuration; empty where it has one."""
    used = _used(config)
    part = part_of(key)
    if part not in used and part not in (*GENERAL, "hydra", "experiment", "workload", "size"):
        return f"{key} has no effect in this kind of run, whose settings are {', '.join(sorted(used))}"
    if key == "size" and "${sized:" not in OmegaConf.to_yaml(config, resolve=False):
        return "size has no effect here: only experiments with ${sized:…} in a setting have two sizes"
    if "oracle" in used and key.startswith("mixer."):
        return _no_effect_on_oracle(config, key)
    return ""


def _used(config: DictConfig) -> set[str]:
    """The parts of the configuration that its kind of run uses."""
    return {str(key) for key in config.workload if not str(key).startswith("_")}


def _refuse_ineffective(config: DictConfig, given: set[str]) -> None:
    """Raises ValueError for a setting among those given that has no effect in this kind of run."""
    for key in sorted(given):
        reason = no_effect(config, key)
        require(not reason, reason)
    if "oracle" not in _used(config):
        _refuse_task_parameters(config, given)
        if "test.probe_sequences" in given and not config.probe:
            raise ValueError("test.probe_sequences has no effect without a probe: add probe=[retrieval], or others")


def refuse_twice(overrides: list[Override]) -> None:
    """Raises ValueError for a setting given twice, once as a sweep, of which Hydra would use the last value only; and
    for one that is removed, which would make the run use a default that its folder does not name."""
    for override in overrides:
        require(not override.is_delete(), f"{override.input_line}: a setting cannot be removed; give it a value")
        key = override.get_key_element()
        same = [other for other in overrides if other.get_key_element() == key]
        require(
            len(same) == 1 or not any(other.is_sweep_override() for other in same),
            f"{key} is given twice: {' and '.join(str(other.input_line) for other in same)}; give one list of values",
        )


def _refuse_unknown(config: DictConfig) -> None:
    """Raises ValueError for a setting beside those of config.yaml and its groups. An experiment is no setting: its
    content is merged into the others."""
    own = OmegaConf.load(CONF / "config.yaml")
    groups = {str(key) for entry in own.defaults if OmegaConf.is_dict(entry) for key in entry}
    for name in sorted({str(key) for key in config} - ({str(key) for key in own} | groups - {"experiment"})):
        raise ValueError(no_setting(name))


def _no_effect_on_oracle(config: DictConfig, key: str) -> str:
    """Why an option of the mixer has no effect on a mechanism that gets random keys and values; empty if it has one."""
    from recall_lab.building import ineffective_mixer_options

    reasons = ineffective_mixer_options(OmegaConf.to_container(config.mixer, resolve=True))  # type: ignore[arg-type]
    reason = reasons.get(key.partition(".")[2])
    return f"{key} has no effect with oracle=random: {reason}" if reason else ""


def _refuse_task_parameters(config: DictConfig, given: set[str]) -> None:
    """Raises ValueError for a parameter of the task that every cell of training and testing sets itself."""
    settings = [OmegaConf.to_container(config[part], resolve=True) for part in ("train", "test")]
    grids = [part["cells"] or None for part in settings]  # type: ignore[call-overload,index]
    fixed = [set.intersection(*map(set, grid)) if isinstance(grid, list) else set(grid or ()) for grid in grids]
    for key in given:
        part, _, parameter = key.partition(".")
        if part == "task" and parameter in fixed[0] and parameter in fixed[1]:
            raise ValueError(f"{key} has no effect: every cell of train.cells and test.cells sets {parameter} itself")
