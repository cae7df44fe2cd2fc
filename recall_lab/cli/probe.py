"""`recall-lab probe FOLDER probe=… mixer=… test.…`: probes, or another mixer, on the models of finished runs."""

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from recall_lab import folders, provenance
from recall_lab.checks import flag, require
from recall_lab.cli.base import compose, parse, part_of, refuse_twice
from recall_lab.cli.check import combinations
from recall_lab.files import CONF, read_json, write_json
from recall_lab.folders import FORMAT, Config, flatten
from recall_lab.messages import ERRORS, one_line, print_error, print_line

CHANGEABLE = ("probe", "mixer", "test")
"""The settings of a finished run that can be replaced."""

SKIP = "skip_invalid"
"""The setting of the command itself: whether to leave out what is impossible, and do the rest."""

TARGET = {"_target_": "recall_lab.workload.ProbeRun"}

NO_MODEL = "{run} has no checkpoint.pt: it has trained no model, or its weights were deleted"

Composing = Callable[..., DictConfig]
"""The configuration with these overrides."""


@dataclass(frozen=True)
class Job:
    """One combination of settings on the model of one run."""

    run: Path
    title: str
    config: Config = field(default_factory=dict)
    columns: Config = field(default_factory=dict)
    """The settings that distinguish its rows."""
    file: Path = Path()
    """Where its rows are written."""
    done_at: str | None = None
    """The revision at which it was measured, without a failure; None if it was not."""
    problem: str = ""
    """Why it is impossible."""


def probe(folder: str, words: list[str], config_dir: str | None = None, multirun: bool = False) -> int:
    """Runs the probes on one run, or on every finished run of a sweep, and makes the report again. The exit status is
    1 where a run or a probe failed, 2 where one is impossible: it is named, and nothing is started, unless
    skip_invalid=true is given.

    The overrides replace the run's own settings. Another mixer keeps the run's values of the options that all mixers
    share.

    multirun  every combination of values is measured, except on runs where it has been already
    """
    skip, overrides = _read(words, multirun)
    path = Path(folder).resolve()
    single = (path / "status.json").exists()
    found = [folders.Run(path, folders.status(path))] if single else folders.runs(path)
    runs = [run.path for run in found if run.has_rows]
    if not runs:
        raise folders.ForeignFolder(f"{folder} has no finished run to probe")
    jobs = _jobs(runs, overrides, config_dir, multirun)
    impossible = [job for job in jobs if job.problem]
    if impossible and len(jobs) == 1:
        raise ValueError(impossible[0].problem)
    for job in impossible:
        print_error(f"{job.title}: {job.problem}")
    if impossible and (len(impossible) == len(jobs) or not skip):
        others = f"; {SKIP}=true runs the others" if len(impossible) < len(jobs) else ""
        return print_error(f"nothing was started, {len(impossible)} of {len(jobs)} are impossible{others}")
    sweep = path.parent if single else path
    options = [*(["-m"] if multirun else []), *(["--config-dir", config_dir] if config_dir else [])]
    folders.add_command(sweep, shlex.join(["recall-lab", "probe", *options, folder, *words]))
    code = 0
    possible = [job for job in jobs if not job.problem]
    for run, own in groupby(possible, key=attrgetter("run")):
        code = max(code, _measure(run, list(own), len(jobs) == 1))
    from recall_lab import report

    made = report.make(sweep)
    print_line(made.text)
    return 1 if made.failed else code


def _read(words: list[str], multirun: bool) -> tuple[bool, list[Override]]:
    """Whether to skip what is impossible, and the overrides of the runs. Raises ValueError for one that is ignored."""
    every = parse(words)
    refuse_twice(every)
    skip = [override.value() for override in every if override.key_or_group == SKIP]
    for value in skip:
        flag(SKIP, value)
    overrides = [override for override in every if override.key_or_group != SKIP]
    for override in overrides:
        require(
            part_of(override.key_or_group) in CHANGEABLE,
            f"{override.key_or_group}: of a finished run only probe, mixer and test can be changed",
        )
        several = f"{override.input_line}: has several values; `recall-lab probe -m` measures each"
        require(multirun or not override.is_sweep_override(), several)
    return any(skip), overrides


def _jobs(runs: Sequence[Path], overrides: Sequence[Override], config_dir: str | None, multirun: bool) -> list[Job]:
    """Every combination of values on every run, each once, composed and checked; with multirun, except those that are
    measured already."""

    @cache
    def composing(*words: str) -> DictConfig:
        return compose(words, config_dir)

    several = {override.get_key_element() for override in overrides if override.is_sweep_override()}
    jobs: dict[object, Job] = {}
    for run in runs:
        for words in combinations(overrides) if overrides else [[]]:
            varied = " ".join(word for word in words if word.partition("=")[0] in several)
            try:
                job = _job(run, words, varied, composing)
                if multirun:
                    job = replace(job, done_at=_done_at(job.file))
                if job.done_at is None:
                    _check(job)
            except (*ERRORS, RuntimeError, TypeError, ArithmeticError, LookupError) as error:
                job = Job(run, f"{run.name} {varied}".strip(), problem=one_line(error))
            jobs.setdefault((run, *words) if job.problem else job.file, job)
    return list(jobs.values())


def _job(run: Path, words: list[str], varied: str, composing: Composing) -> Job:
    """The job of one run. Raises ValueError where it has trained no model, or would measure nothing."""
    trained = folders.read_config(run)
    if "train" not in trained:
        raise ValueError(NO_MODEL.format(run=run))
    config = changed(trained, words, composing)
    mixer, before = config["choice"]["mixer"], trained["choice"]["mixer"]
    swapped = config["mixer"] != trained["mixer"]
    _refuse_without_effect({override.key_or_group for override in parse(words)}, bool(config["probe"]), swapped)
    columns = {"mixer": mixer} | {
        key: value
        for key, value in flatten({part: config[part] for part in CHANGEABLE}).items()
        if key != "test.cells"
    }  # fmt: skip
    if swapped:
        columns["trained_as"] = before
    cells = config["test"]["cells"]
    content: object = columns if cells == trained["test"]["cells"] else [columns, cells]
    code = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    title = f"{run.name} {mixer}" + (f" with the weights of {before}" if swapped else "")
    title += f", {varied}" if varied else ""
    config |= {**TARGET, "swapped": mixer if swapped else ""}
    return Job(run, title, config, columns, run / f"probe-{code}.json")


def _done_at(file: Path) -> str | None:
    try:
        content = read_json(file, {})
    except (ValueError, OSError):
        return None
    whole = isinstance(content, dict) and {"rows", "columns", "git"} <= set(content) and content.get("missing") == []
    return str(content["git"]) if whole else None


def _check(job: Job) -> None:
    """Raises an error of the part that is to blame, if the job is impossible. No weights are loaded."""
    from recall_lab.building import build
    from recall_lab.workload import ProbeRun

    if not (job.run / "checkpoint.pt").exists():
        raise ValueError(NO_MODEL.format(run=job.run))
    made = cast(ProbeRun, build(job.config))
    made.check()
    if made.swapped:
        made.check_weights(cast(ProbeRun, build(folders.read_config(job.run) | TARGET)).shapes())


def _measure(run: Path, jobs: list[Job], alone: bool) -> int:
    """Does the jobs of one run, whose weights are loaded once, and writes the rows of each to its file. Returns 1 where
    one failed; raises ValueError instead where it is the only one of the command."""
    from recall_lab import checkpoint, machine
    from recall_lab.building import build
    from recall_lab.run_log import logging_to
    from recall_lab.workload import ProbeRun, Workspace

    code, weights = 0, None
    for job in jobs:
        if job.done_at is not None:
            other = "" if job.done_at == provenance.revision() else f", made at another revision ({job.done_at})"
            print_line(f"found     {job.title}{other}")
            continue
        try:
            how = job.config
            device = machine.prepare(how["device"], how["threads"], how.get("deterministic", True))
            weights = weights or checkpoint.load(run / "checkpoint.pt", device)["model"]
            with logging_to(run / "run.log"):  # tracebacks
                outcome = cast(ProbeRun, build(how)).run(Workspace(run, device), weights)
        except (*ERRORS, RuntimeError) as error:
            if alone:
                raise ValueError(one_line(error)) from error
            print_error(f"{job.title}: {one_line(error)}")
            code = 1
            continue
        facts = {"format": FORMAT, "git": provenance.revision(), "missing": outcome.missing}
        write_json(job.file, {**facts, "columns": job.columns, "rows": outcome.rows})
        print_line(f"probed    {job.title}: {outcome.summary}")
        for line in outcome.missing:
            print_error(f"{run.name}: {line}")
            code = 1
    return code


def _refuse_without_effect(given: set[str], probes: bool, swapped: bool) -> None:
    """Raises ValueError where nothing would be measured, or a setting of `test` would be ignored."""
    require(probes or swapped, "nothing to measure: add probe=[retrieval], or others, or another mixer")
    scores = ("test.tokens", "test.sequences")
    for name in sorted(given & {*scores, "test.probe_sequences"}):
        needed, wanted = (swapped, "another mixer, whose scores are new") if name in scores else (probes, "a probe")
        require(needed, f"{name} has no effect here without {wanted}")


def changed(trained: Config, words: Sequence[str], composing: Composing) -> Config:
    """The run's settings with what the overrides replace.

    In `test` single keys are replaced, in `probe` all; in `mixer` single keys, or all if the mixer is another one. It
    then keeps the run's values of the options that both share, except where a variant sets its own.
    """
    given = {override.key_or_group: override for override in parse(words)}
    before = trained["choice"]["mixer"]
    mixer = str(given["mixer"].value()) if "mixer" in given else before
    others = [str(override.input_line) for key, override in given.items() if key != "mixer"]
    composed = OmegaConf.to_container(composing(f"mixer={mixer}", *others), resolve=True)
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
            new, plain = composed["mixer"], composing(f"mixer={mixer.partition('/')[0]}").mixer
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
