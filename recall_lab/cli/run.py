"""`recall-lab run`: the Hydra app, from a command line to a finished sweep."""

import os
import secrets
import shlex
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from recall_lab import folders
from recall_lab.checks import require
from recall_lab.cli.base import (
    PLACEMENT,
    experiment_files,
    job,
    leading_comment,
    parse,
    refuse,
    sized,
    sweep_folder,
)
from recall_lab.display import Display
from recall_lab.files import CONF, use, use_none
from recall_lab.messages import ERRORS, one_line, print_error, print_line
from recall_lab.sweep import ENVIRONMENT, WORKER_OF, Sweep, current, stopping

DRY = "--dry-run"
"""The option that lists the jobs and starts none."""


class Preflight(Callback):
    """Before anything is written, refuses settings that would be ignored and jobs that are impossible; then claims the
    output folder."""

    sweep: Sweep | None = None
    display: Display | None = None
    dry = False
    """--dry-run: nothing is started or written."""
    report = False
    """Whether this command ends with a report."""
    command = ""
    """The command line, which the sweep's folder keeps."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called by Hydra before a single run; exits with status 2 for settings that are refused."""
        with _refusing():
            _check_settings(config)
            _refuse_impossible(config)
            Preflight.begin(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called by Hydra before a sweep; exits with status 2 for settings that are refused. The sweeper of this
        package checks the jobs and calls `begin`."""
        with _refusing():
            _check_settings(config)
            if config.hydra.runtime.choices.get("hydra/sweeper") != "unfinished" and not Preflight.dry:
                Preflight.begin(config)

    @staticmethod
    def begin(config: DictConfig) -> Sweep:
        """Claims the folder and shows what goes on in it; nothing where the app runs again, after other processes."""
        if Preflight.sweep is None:
            folder = sweep_folder(config)
            folders.claim(folder, [str(name) for name in config.select])
            experiment = experiment_files(config)[:1]
            folders.add_command(folder, Preflight.command, "".join(map(leading_comment, experiment)))
            Preflight.sweep, Preflight.report = current(folder), bool(config.report)
            Preflight.sweep.begin()
            Preflight.display = Display(Preflight.sweep)
            Preflight.display.start()
        return Preflight.sweep


@contextmanager
def _refusing() -> Iterator[None]:
    """Hydra turns a callback's exceptions into warnings; it lets SystemExit through."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, ERRORS):
            traceback.print_exc()
        raise SystemExit(print_error(error)) from error


def _check_settings(config: DictConfig) -> None:
    """Raises ValueError for settings that would be ignored, and for a folder that holds other files."""
    HydraConfig.instance().set_config(config)  # so that ${hydra:…} can be resolved
    overrides = parse(list(config.hydra.overrides.task))  # a list, because reading an item can raise
    swept = [override.get_key_element() for override in overrides if override.is_sweep_override()]
    _refuse_swept([*swept, *(str(key) for key in config.hydra.sweeper.get("params") or {})])
    searched = config.hydra.runtime.choices["hydra/sweeper"] == "optuna"
    require(config.hydra.mode != RunMode.RUN or not searched, "hydra/sweeper=optuna has no effect without -m")
    refuse(config, overrides)
    _refuse_cluster_without_sweep(config)
    sized(None, None, _root_=config)
    folder = sweep_folder(config)
    if folder.is_dir() and any(folder.iterdir()):
        folders.claim(folder)


def _refuse_impossible(config: DictConfig) -> None:
    """Raises ValueError where a single run is impossible here. A finished run is not checked: that imports torch."""
    try:
        settings = job(config, sweep_folder(config))
    except OmegaConfBaseException:  # a setting that is known when the job starts
        return
    if folders.status(sweep_folder(config) / folders.identity(settings))["state"] != "finished":
        from recall_lab import building, machine

        reason = building.problem(settings)
        require(not reason, reason)
        machine.available(config.device)


def _refuse_swept(swept: list[str]) -> None:
    """Raises ValueError for a sweep over a setting that does not distinguish the runs of a sweep."""
    require("logger" not in swept, "a sweep over logger would do no run twice; give a list: logger=[tensorboard,wandb]")
    for key in swept:
        require(
            key not in PLACEMENT,
            f"a sweep over {key} would put its runs into different folders, without a report of all of them; "
            f"run the command once for each {key}",
        )


def _refuse_cluster_without_sweep(config: DictConfig) -> None:
    """Raises ValueError where a single run is to be done by a cluster: Hydra would do it in this process."""
    name = config.hydra.runtime.choices["hydra/launcher"]
    require(
        config.hydra.mode == RunMode.MULTIRUN or name not in ("slurm", "ray"),
        f"hydra/launcher={name} has an effect on a sweep only: add -m, also for one run",
    )


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def app(config: DictConfig) -> float:
    """One job: one run in its folder. Returns its validation loss. Raises what `base.job` raises."""
    sweep = current(sweep_folder(config))
    settings = job(config, sweep.folder)
    loss = sweep.found(settings)
    if loss is not None:
        return loss
    from recall_lab import runner

    hydra_config = HydraConfig.get()
    number = hydra_config.job.num if hydra_config.mode == RunMode.MULTIRUN else None
    return runner.execute(settings, sweep.folder, number)


def main(arguments: list[str]) -> int:
    """Runs the command. Returns the exit status: 0 only if every run of this command is finished."""
    os.environ[ENVIRONMENT] = secrets.token_hex(8)
    os.environ[WORKER_OF] = str(os.getpid())
    Preflight.dry = DRY in arguments
    options, words = options_first(word for word in arguments if word != DRY)
    try:
        _use_own(options)
    except ValueError as error:
        return print_error(error)
    if Preflight.dry:
        options.append("-m")  # a single run is listed like a sweep
    sys.argv = ["recall-lab run", *options, *with_options_swept(words)]
    Preflight.sweep, Preflight.display, Preflight.command = None, None, shlex.join(["recall-lab", "run", *arguments])
    old = {number: signal.signal(number, _stop_all) for number in stopping()}
    try:
        code = _launch()
        return code if code or Preflight.sweep is None else finish(Preflight.sweep, Preflight.report)
    except KeyboardInterrupt as error:
        number = error.args[0] if error.args and isinstance(error.args[0], int) else signal.SIGINT
        print_error("interrupted; the same command resumes the runs")
        return 128 + int(number)
    except ERRORS as error:
        return print_error(error)
    finally:
        if Preflight.sweep is not None:
            Preflight.sweep.end()
        for number, handler in old.items():
            signal.signal(number, handler)


def _use_own(options: list[str]) -> None:
    """Makes the folder given with --config-dir known, the last of several, as Hydra does. Raises what `use` raises."""
    use_none()
    for word, folder in pairwise(options):
        if word == "--config-dir":
            use(folder)


def options_first(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """-m and --config-dir FOLDER, and all other words: argparse, within Hydra, accepts no option between overrides."""
    options: list[str] = []
    words: list[str] = []
    for word in arguments:
        name, equals, folder = word.partition("=")
        if name in ("--config-dir", "-cd") and options[-1:] != ["--config-dir"]:
            options += ["--config-dir", folder] if equals else ["--config-dir"]
        else:
            (options if options[-1:] == ["--config-dir"] or word in ("-m", "--multirun") else words).append(word)
    return options, words


def with_options_swept(words: Iterable[str]) -> list[str]:
    """The words of a command line, in which an option of a swept group is a sweep over its one value:
    mixer=window,top_k mixer.budget=4 becomes mixer=window,top_k mixer.budget=choice(4).

    Before a sweep, Hydra composes a configuration without the swept settings. It has the default mixer, and Hydra
    refuses an option that this mixer lacks.
    """
    words = list(words)
    read: list[Override | None] = []
    for word in words:
        try:
            read.append(parse([word])[0])
        except HydraException:  # --config-dir and its folder; or Hydra names the error
            read.append(None)
    swept = {override.key_or_group for override in read if override and override.is_sweep_override()}
    for number, override in enumerate(read):
        if override and not override.is_sweep_override() and not override.is_delete():
            group, _, option = override.key_or_group.partition(".")
            if option and group in swept:
                value = override.get_value_element_as_str() or "''"
                words[number] = f"{override.get_key_element()}=choice({value})"
    return words


def _launch() -> int:
    """Runs the Hydra app, and again after other processes have left runs of this command that they worked on."""
    traceback_wanted = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that errors arrive here instead of being printed by Hydra
    try:
        while True:
            app()
            elsewhere = Preflight.sweep.elsewhere() if Preflight.sweep else []
            if Preflight.sweep is None or not elsewhere:
                return 0
            print_line(f"waiting   for other processes to end their runs: {len(elsewhere)}")
            Preflight.sweep.wait(elsewhere)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except ERRORS as error:
        if traceback_wanted:
            raise
        return print_error(error)
    finally:
        if Preflight.display is not None:
            Preflight.display.stop()
        if not traceback_wanted:
            os.environ.pop("HYDRA_FULL_ERROR", None)


def _stop_all(number: int, frame: FrameType | None) -> None:
    """The first signal makes all runs save checkpoints before this process ends; a second signal ends it at once."""
    for each in stopping():
        signal.signal(each, _end_at_once)
    if Preflight.sweep is not None:
        Preflight.sweep.ask_to_stop()
    raise KeyboardInterrupt(number)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def finish(sweep: Sweep, wanted: bool) -> int:
    """Ends a command and returns its exit status. Prints each warning once, makes the report if it is wanted and there
    are rows, and prints one line for every run that is not finished."""
    code = 0
    last = sweep.last()
    for line in dict.fromkeys(line for event in last.values() if event["event"] == "finished"
                              for line in event["text"].splitlines()):  # fmt: skip
        print_line(f"note: {line}")
    try:
        if wanted and any(run.has_rows for run in folders.runs(sweep.folder)):
            from recall_lab import report

            made = report.make(sweep.folder)
            print_line(made.text)
            code = 1 if made.failed else 0
    except ERRORS as error:
        print_error(f"no report: {one_line(error)}")
        code = 1
    for name, event in last.items():
        if event["event"] not in ("finished", "found"):
            print_error(event["text"] or f"{sweep.folder / name} died: its process was killed")
            code = 1
    return code
