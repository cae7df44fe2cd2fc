"""The Hydra app: from a command line to a finished sweep, and the configuration for the verbs that run nothing."""

import os
import secrets
import sys
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from recall_lab import results
from recall_lab.messages import CONF, ERRORS, complain, meant, one_line, say

SIZES = ("small", "large")
"""What `size` may be: `${sized:a,b}` is a at the first and b at the second."""


def sized(small: Any, large: Any, *, _root_: DictConfig) -> Any:
    """The one of two values that the setting `size` chooses; in a configuration `${sized:small,large}`."""
    if _root_.size not in SIZES:
        raise ValueError(f"size={_root_.size}: one of {', '.join(SIZES)}")
    return (small, large)[SIZES.index(_root_.size)]


OmegaConf.register_new_resolver("sized", sized, replace=True)


class Claim(Callback):
    """Before Hydra writes anything: keys nobody reads are refused and the output folder is made ours."""

    folder: Path | None = None
    report = False
    """Whether this command ends with a report."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        Claim.folder, Claim.report = Path(str(config.root), str(config.name)), config.report
        try:
            known = set(OmegaConf.load(CONF / "config.yaml")) | {"task", "mixer"}
            if unknown := sorted(set(config) - known):
                raise ValueError(f"there is no setting {unknown[0]}{meant(unknown[0])}")
            sized(None, None, _root_=config)
            results.claim(Claim.folder)
        except ValueError as error:
            # Hydra turns a callback's exceptions into warnings; it lets this one through.
            raise SystemExit(complain(error)) from error

    on_multirun_start = on_run_start


def compose(overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """The configuration as `recall-lab run` would compose it, for the verbs that run nothing."""
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ValueError(f"--config-dir {config_dir}: no such folder")
        overrides = [*overrides, f"hydra.searchpath=[file://{Path(config_dir).absolute()}]"]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", overrides)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def app(config: DictConfig) -> float:
    from recall_lab import job

    return job.execute(plain(config), alone=HydraConfig.get().mode != RunMode.MULTIRUN)


def plain(config: DictConfig, choices: Any = None) -> dict[str, Any]:
    """The configuration resolved to plain values, with the names of the task and the mixer chosen."""
    choices = HydraConfig.get().runtime.choices if choices is None else choices
    resolved = OmegaConf.to_container(config, resolve=True)
    task = choices["task"] if resolved["oracle"] is None else "oracle"
    return resolved | {"choice": {"task": task, "mixer": choices["mixer"]}}


def main(arguments: list[str]) -> int:
    """`recall-lab run …`: the exit status, 0 only if no run of this command failed or died."""
    sweep = os.environ[results.SWEEP] = secrets.token_hex(8)
    traceback_wanted = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that errors come here instead of being printed by Hydra
    # argparse, within Hydra, takes no option between overrides.
    options = [word for word in arguments if word in ("-m", "--multirun")]
    sys.argv = ["recall-lab run", *options, *(word for word in arguments if word not in options)]
    code = 0
    try:
        app()
    except KeyboardInterrupt:
        sys.stderr.write("recall-lab: interrupted; the same command goes on from here\n")
        code = 130
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BrokenExecutor:
        # Its run is found "running" below, and named.
        code = 0 if Claim.folder else 1
    except ERRORS as error:
        if traceback_wanted:
            raise
        code = complain(error)
    if code or Claim.folder is None:
        return code
    try:
        return finish(Claim.folder, Claim.report, sweep)
    except ERRORS as error:
        return complain(error)


def probe(folder: str, overrides: list[str], config_dir: str | None = None) -> int:
    """`recall-lab probe FOLDER probe=… mixer=… test.…`: the exit status.

    What the overrides name replaces the run's own; a new mixer takes over what the run's set for all mixers.
    """
    from recall_lab import job, report

    path = Path(folder)
    single = (path / "status.json").exists()
    runs = [path] if single else results.runs(path)
    named = {override.lstrip("+~").partition("=")[0].partition(".")[0].partition("@")[0] for override in overrides}
    if strange := named - {"probe", "mixer", "test"}:
        raise ValueError(f"{', '.join(sorted(strange))}: of a finished run only probe, mixer and test can be changed")
    shared = OmegaConf.load(CONF / "mixer_base.yaml")
    finished = [run for run in runs if results.status(run)["state"] == "finished"]
    if not finished:
        raise results.ForeignFolder(f"{folder} has no finished run to probe")
    for run in finished:
        trained = results.read_config(run)
        mixer = trained["choice"]["mixer"]
        chosen, picked = mixer, list(overrides)
        if "mixer" in named:
            chosen = next((o.partition("=")[2] for o in overrides if o.startswith("mixer=")), mixer)
            given = {o.lstrip("+").partition("=")[0] for o in overrides}
            own = {f"mixer.{key}": trained["mixer"].get(key) for key in shared if not key.startswith("_")}
            if chosen == mixer:
                own = {f"mixer.{key}": value for key, value in trained["mixer"].items() if not key.startswith("_")}
                picked.append(f"mixer={mixer}")
            picked += [f"{key}={_word(value)}" for key, value in own.items() if key not in given]
        composed = OmegaConf.to_container(compose(picked, config_dir), resolve=True)
        asked = {key: composed[key] for key in named - {"test"}}
        if "test" in named:
            keys = {o.lstrip("+").partition("=")[0].partition(".")[2].partition(".")[0] for o in overrides}
            asked["test"] = trained["test"] | {key: composed["test"][key] for key in keys if key in composed["test"]}
        title = f"{run.name} {chosen}{'' if chosen == mixer else f' with the weights of {mixer}'}"
        try:
            say(f"probed    {title}: {job.probe(run, trained | asked, chosen)} rows")
        except ValueError as error:
            if len(finished) == 1:
                raise
            say(f"skipped   {title}: {one_line(error)}")
    say(report.make(path.parent if single else path))
    return 0


def _word(value: Any) -> str:
    """A plain value as Hydra's override grammar reads it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def finish(folder: Path, wanted: bool, sweep: str) -> int:
    """The report where one is wanted and possible, then the failures of this command, each in a line."""
    from recall_lab import report

    runs = results.runs(folder)
    if wanted and any(results.status(run)["state"] == "finished" for run in runs):
        say(report.make(folder))
    failed = [run for run in runs if _failed(results.status(run), sweep)]
    for run in failed:
        status = results.status(run)
        sys.stderr.write(f"recall-lab: {run} {status['state']}: {status.get('error', 'its process died')}\n")
    return 1 if failed else 0


def _failed(status: dict[str, Any], sweep: str) -> bool:
    return status["sweep"] == sweep and status["state"] != "finished"
