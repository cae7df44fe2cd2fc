"""`recall-lab probe FOLDER probe=… mixer=… test.…`: probes, or another mixer, on the models of finished runs."""

import hashlib
import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from recall_lab import folders
from recall_lab.checks import require
from recall_lab.cli.base import compose, parse, part_of
from recall_lab.files import CONF, write_json
from recall_lab.folders import FORMAT, Config, flatten
from recall_lab.messages import ERRORS, one_line, print_error, print_line

CHANGEABLE = ("probe", "mixer", "test")
"""The settings of a finished run that can be replaced."""


def probe(folder: str, words: list[str], config_dir: str | None = None) -> int:
    """Runs the probes on one run, or on every finished run of a sweep, and makes the report again. The exit status is
    1 where a run or a probe failed.

    The overrides replace the run's own settings. Another mixer keeps the run's values of the options that all mixers
    share.
    """
    overrides = parse(words)
    for override in overrides:
        require(
            part_of(override.key_or_group) in CHANGEABLE,
            f"{override.key_or_group}: of a finished run only probe, mixer and test can be changed",
        )
        several = f"{override.input_line}: has several values; run the command once for each"
        require(not override.is_sweep_override(), several)
    path = Path(folder).resolve()
    single = (path / "status.json").exists()
    found = [folders.Run(path, folders.status(path))] if single else folders.runs(path)
    runs = [run.path for run in found if run.has_rows]
    if not runs:
        raise folders.ForeignFolder(f"{folder} has no finished run to probe")
    sweep = path.parent if single else path
    options = ["--config-dir", config_dir] if config_dir else []
    folders.add_command(sweep, shlex.join(["recall-lab", "probe", folder, *options, *words]))
    code = 0
    for run in runs:
        try:
            code = max(code, _probe_run(run, words, overrides, config_dir))
        except (*ERRORS, RuntimeError) as error:
            if len(runs) == 1:
                raise ValueError(one_line(error)) from error
            print_error(f"{run.name}: {one_line(error)}")
            code = 1
    from recall_lab import report

    made = report.make(sweep)
    print_line(made.text)
    return 1 if made.failed else code


def _probe_run(run: Path, words: list[str], overrides: list[Override], config_dir: str | None) -> int:
    """Probes one run and writes the rows to a file of their own, which repeating the same probe replaces."""
    from recall_lab import machine
    from recall_lab.building import build
    from recall_lab.runner import logging_to
    from recall_lab.workload import Workspace

    trained = folders.read_config(run)
    if not (run / "checkpoint.pt").exists():
        raise ValueError(f"{run} has no checkpoint.pt: only a run that has trained a model can be probed")
    config = changed(trained, words, overrides, config_dir)
    mixer = config["choice"]["mixer"]
    swapped = config["mixer"] != trained["mixer"]
    _refuse_without_effect({override.key_or_group for override in overrides}, bool(config["probe"]), swapped)
    name = f"{run.name} {mixer}" + (f" with the weights of {trained['choice']['mixer']}" if swapped else "")
    device = machine.prepare(config["device"], config["threads"], config.get("deterministic", True))
    target = {"_target_": "recall_lab.workload.ProbeRun", "swapped": mixer if swapped else ""}
    with logging_to(run / "run.log"):  # tracebacks
        outcome = build(config | target).run(Workspace(run, device))
    columns = {"mixer": mixer} | {
        key: value
        for key, value in flatten({part: config[part] for part in CHANGEABLE}).items()
        if key != "test.cells"
    }  # fmt: skip
    if swapped:
        columns["trained_as"] = trained["choice"]["mixer"]
    code = hashlib.sha256(json.dumps(columns, sort_keys=True).encode()).hexdigest()[:12]
    write_json(run / f"probe-{code}.json", {"format": FORMAT, "columns": columns, "rows": outcome.rows})
    print_line(f"probed    {name}: {outcome.summary}")
    for line in outcome.missing:
        print_error(f"{run.name}: {line}")
    return 1 if outcome.missing else 0


def _refuse_without_effect(given: set[str], probes: bool, swapped: bool) -> None:
    """Raises ValueError where nothing would be measured, or a setting of `test` would be ignored."""
    require(probes or swapped, "nothing to measure: add probe=[retrieval], or others, or another mixer")
    scores = ("test.tokens", "test.sequences")
    for name in sorted(given & {*scores, "test.probe_sequences"}):
        needed, wanted = (swapped, "another mixer, whose scores are new") if name in scores else (probes, "a probe")
        require(needed, f"{name} has no effect here without {wanted}")


def changed(trained: Config, words: list[str], overrides: Iterable[Override], config_dir: str | None) -> Config:
    """The run's settings with what the overrides replace.

    In `test` single keys are replaced, in `probe` all; in `mixer` single keys, or all if the mixer is another one. It
    then keeps the run's values of the options that both share, except where a variant sets its own.
    """
    given = {override.key_or_group: override for override in overrides}
    before = trained["choice"]["mixer"]
    mixer = str(given["mixer"].value()) if "mixer" in given else before
    composed = OmegaConf.to_container(compose([f"mixer={mixer}", *(w for w, o in zip(words, parse(words), strict=True)
                                               if o.key_or_group != "mixer")], config_dir), resolve=True)  # fmt: skip
    assert isinstance(composed, dict)
    config = dict(trained)
    parts = {part_of(key) for key in given}
    if "probe" in parts:
        config["probe"] = composed["probe"]
    if "test" in parts:
        config["test"] = _with_given("test", trained["test"], given, composed)
    if "mixer" in parts:
        own = trained["mixer"]
        if mixer != before:
            new, plain = composed["mixer"], compose([f"mixer={mixer.partition('/')[0]}"], config_dir).mixer
            shared = [
                str(key)
                for path in CONF.glob("*_base.yaml")
                for key in OmegaConf.load(path)
                if key in own and key in new
            ]
            own = new | {key: own[key] for key in shared if key[0] != "_" and new[key] == plain[key]}
        config["mixer"] = _with_given("mixer", own, given, composed)
        config["choice"] = trained["choice"] | {"mixer": mixer}
    return config


def _with_given(part: str, own: Config, given: Iterable[str], composed: dict[Any, Any]) -> Config:
    """The settings of one part, with those that were given (mixer.budget, of a hybrid mixer.second.heads) replaced."""
    result, source = OmegaConf.create(own), OmegaConf.create(composed)
    for key in given:
        if key.startswith(f"{part}."):
            OmegaConf.update(result, key.removeprefix(f"{part}."), OmegaConf.select(source, key), force_add=True)
    settings = OmegaConf.to_container(result)
    assert isinstance(settings, dict)
    return {str(key): value for key, value in settings.items()}
