"""The jobs of a `recall-lab run` command, composed and checked before the first one starts."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from recall_lab.cli.base import job, sweep_folder
from recall_lab.files import whole
from recall_lab.folders import Config, identity, status, title
from recall_lab.messages import counted, print_error, print_line
from recall_lab.sweep import ENDED, Sweep
from recall_lab.times import Times, in_words, made

Words = Sequence[str]
"""The overrides of one job."""

STATES = {"finished": "finished", "failed": "failed", "lost": "new"}
"""State of a run's folder → that of the job; of any other state the job is to resume the run."""


@dataclass(frozen=True)
class Job:
    """One job of a command: its overrides and, if they could be composed, its settings and the run's state."""

    words: Words
    settings: Config | None = None
    """None: they depend on ${hydra:job.num}, which is known when the job starts."""
    state: str = "unknown"
    """new, finished, failed (to be repeated), to resume, impossible, unknown."""
    problem: str = ""
    """Why the job is impossible."""
    share: float = 1.0
    """Part of the work that is left."""

    @property
    def unfinished(self) -> bool:
        """Whether there is anything to do, and it is possible."""
        return self.state not in ("finished", "impossible")


NUMBERED = "${hydra:job."
"""The beginning of an interpolation that depends on the number of the job."""

COMPOSED: dict[tuple[str, ...], Config] = {}
"""The settings of the jobs that `jobs` has composed, by their overrides."""


def settings(loader: ConfigLoader, config: DictConfig, words: Words, number: int) -> Config:
    """The settings of a job that is about to start: those that `jobs` has composed, or else composed now.

    number  the job's number in the sweep, ${hydra:job.num}
    """
    if tuple(words) in COMPOSED:
        return COMPOSED[tuple(words)]
    composed = loader.load_sweep_config(config, list(words))
    with open_dict(composed):
        composed.hydra.job.id, composed.hydra.job.num = f"{composed.hydra.job.name}_{number}", number
    try:
        HydraConfig.instance().set_config(composed)
        return job(composed, sweep_folder(config))
    finally:
        HydraConfig.instance().set_config(config)


def jobs(loader: ConfigLoader, config: DictConfig, every: Sequence[Words]) -> list[Job]:
    """Composes all jobs of a sweep, and checks those that are not finished.

    config  that of the sweep, composed without the swept settings, with Hydra's part
    """
    found, folder = [], sweep_folder(config)
    COMPOSED.clear()
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    if any(NUMBERED in text for text in (OmegaConf.to_yaml(own), *(word for words in every for word in words))):
        return [Job(words) for words in every]  # leaving one out would change the numbers of others
    try:
        for words in every:
            composed = loader.load_sweep_config(config, list(words))
            HydraConfig.instance().set_config(composed)  # so that ${hydra:…} can be resolved
            found.append(_job(words, composed, folder))
    except OmegaConfBaseException:
        return [Job(words) for words in every]
    finally:
        HydraConfig.instance().set_config(config)
    COMPOSED.update((tuple(each.words), each.settings) for each in found if each.settings)
    return found


def _job(words: Words, config: DictConfig, folder: Path) -> Job:
    settings = job(config, folder)
    facts = status(folder / identity(settings))
    state = STATES.get(facts["state"], "to resume")
    if state == "finished" and not whole(folder / identity(settings) / "rows.json"):
        state = "to resume"
    if state != "finished":
        from recall_lab.building import problem

        reason = problem(settings)
        if reason:
            return Job(words, settings, "impossible", reason)
    done, steps = facts.get("step", 0), settings.get("train", {}).get("steps", 1)
    return Job(words, settings, state, share=1 - min(1.0, done / steps) if state == "to resume" else 1.0)


def refuse_impossible(found: Sequence[Job], skip: bool) -> int:
    """Prints one line for each reason why jobs are impossible. Returns 2, the exit status of bad input, if there is one
    and they may not be skipped, or if no other job is left; otherwise 0."""
    reasons: dict[str, list[str]] = {}
    for name, each in zip(describe(found), found, strict=True):
        if each.problem:
            reasons.setdefault(each.problem, []).append(name)
    wrong = sum(map(len, reasons.values()))
    if 1 < wrong == len(found) and len(reasons) == 1:
        return print_error(f"all {wrong} jobs: {next(iter(reasons))}")
    for reason, names in reasons.items():
        others = f" and {counted(len(names) - 1, 'other job')}" if len(names) > 1 else ""
        print_error(f"{names[0]}{others}: {reason}")
    if wrong and (not skip or wrong == len(found)):
        others = "; skip_invalid=true runs the others" if wrong < len(found) else ""
        print_error(f"nothing was started; impossible jobs: {wrong} of {len(found)}{others}")
    return 2 if wrong and (not skip or wrong == len(found)) else 0


def start(found: Sequence[Job], sweep: Sweep) -> list[Words]:
    """Notes all jobs, prints what is finished, and returns the others that are possible, each run once.

    When a command checks its jobs again after waiting for other processes, the runs that it has ended are left out.
    """
    composed = {identity(each.settings): each for each in found if each.settings and each.state != "impossible"}
    sweep.plan({name: title("", each.settings).strip() for name, each in composed.items() if each.settings})
    ended = {name for name, event in sweep.last().items() if event["event"] in ENDED and event["event"] != "skipped"}
    for name, each in composed.items():
        if each.state == "finished" and each.settings and name not in ended:
            sweep.found(each.settings)
    wanted = [each.words for name, each in composed.items() if each.unfinished and name not in ended]
    return wanted + [each.words for each in found if each.state == "unknown"]


def describe(found: Sequence[Job]) -> list[str]:
    """The jobs in words: those of their overrides in which they differ, or the title of a single job."""
    common = set.intersection(*(set(each.words) for each in found))
    named = []
    for each in found:
        own = " ".join(word for word in each.words if word not in common)
        named.append(own or (title("", each.settings).strip() if each.settings else "all"))
    return named


def listing(found: Sequence[Job], folder: Path, parallel: int | None) -> str:
    """One line for each job with its state and the time that it is expected to take, and totals.

    parallel  how many jobs run at a time; None: unknown
    """
    times = Times(made(folder))
    lines, total, unknown = [], 0.0, 0
    for words, each in zip(describe(found), found, strict=True):
        expected = ""
        if each.unfinished:
            seconds = times.estimate(each.settings) if each.settings else None
            expected = in_words(None if seconds is None else seconds * each.share)
            total, unknown = total + (seconds or 0.0) * each.share, unknown + (seconds is None)
        name = identity(each.settings) if each.settings else ""
        lines.append(f"{each.state:<10} {name:<12} {words}  {expected}".rstrip())
    states = Counter(each.state for each in found)
    counts = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    summary = f"{counted(len(found), 'job')}: {counts}"
    left = sum(each.unfinished for each in found)
    if left:
        summary += f"; {in_words(total)} of work" if unknown < left else "; time unknown"
        if parallel and parallel > 1 and unknown < left:
            summary += f", {in_words(total / min(parallel, left))} with {parallel} at a time"
        if 0 < unknown < left:
            summary += f", and {counted(unknown, 'job')} of unknown length"
    return "\n".join([*lines, summary])


def show(found: Sequence[Job], config: DictConfig) -> int:
    """Prints the listing for --dry-run. Returns the exit status: 2 if the command would be refused."""
    print_line(listing(found, sweep_folder(config), at_a_time(config)))
    return refuse_impossible(found, bool(config.skip_invalid))


def at_a_time(config: DictConfig) -> int | None:
    """How many jobs of a sweep run at a time; None where the launcher decides."""
    wanted = OmegaConf.select(config, "hydra.launcher.n_jobs")
    if wanted is None:
        return 1 if config.hydra.runtime.choices.get("hydra/launcher") == "basic" else None
    return int(wanted) if wanted > 0 else max(1, cores() + 1 + int(wanted))


def cores() -> int:
    """The number of cores that this process may use."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = Path("/sys/fs/cgroup/cpu.max")  # of a container
    quota, _, period = limit.read_text().partition(" ") if limit.exists() else ("max", "", "")
    return found if quota == "max" else max(1, min(found, round(int(quota) / int(period))))
