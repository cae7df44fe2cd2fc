"""`recall-lab claim`: runs the experiments that claims need, and judges the claims."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import hydra
import pandas as pd
from omegaconf import OmegaConf

from recall_lab import fairness, folders, page, results, table_files
from recall_lab.checks import require
from recall_lab.claim.base import Claim, Line, effect, measurements, multiplicity, statement, verdict_table
from recall_lab.cli.base import compose, parse
from recall_lab.cli.check import values
from recall_lab.cli.experiments import Job, Measured, collect, effective, measured, options, rows_of, run
from recall_lab.files import replacing, searched, use
from recall_lab.messages import print_error, print_line
from recall_lab.overview import columns
from recall_lab.page import attempt

TWICE = "_twice_the_steps"
"""Suffix of the folder with an experiment's runs of twice the steps."""


def names(config_dir: str | None = None) -> list[str]:
    """The names of all claims, those of config_dir included."""
    if config_dir is not None:
        use(config_dir)
    return sorted({path.stem for folder in searched() for path in folder.glob("claim/*.yaml")})


def load(chosen: Iterable[str], config_dir: str | None = None) -> dict[str, Claim]:
    """Name → claim, in the order given; all claims where none is given. Raises ValueError for an unknown name."""
    known = names(config_dir)
    claims = {}
    for name in list(chosen) or known:
        require(name in known, f"there is no claim {name!r}; there are {', '.join(known)}")
        config = compose([f"+claim={name}"], config_dir).claim
        claim = hydra.utils.instantiate(OmegaConf.to_container(config, resolve=True), _convert_="all")
        require(isinstance(claim, Claim), f"claim {name}: _target_={config.get('_target_')}: must be a Claim")
        claims[name] = claim
    return claims


def claim(words: Iterable[str], config_dir: str | None = None, csv: bool = False) -> int:
    """Runs and judges the claims named in `words` (none: all of them). Returns the exit status.

    words  names of claims, and settings of their runs (size=large, device=cuda, root=…). Each experiment is run once,
           in ROOT/claim/EXPERIMENT, and finished runs are not repeated. An experiment receives the settings that have
           an effect in its kind of run. One that must be trained to the end is run a second time, with seed=0 and twice
           the steps, in a folder of its own
    csv    also write the table as table.csv and settings.csv

    Writes report.html, report.md, the table, verdict.csv and the claims' figures in ROOT/claim. A claim whose judgement
    raises an exception is named in the report, and the others are judged.

    The exit status is 0 whatever the verdict, and 1 if a run or a judgement failed or a measurement is missing.
    Raises ValueError for an unknown claim, for a setting that has no effect in any experiment, and for a choice of
    mixers without some that an experiment compares.
    """
    words = list(words)
    settings = [word for word in words if "=" in word]
    claims = load([word for word in words if "=" not in word], config_dir)
    root = next((word.partition("=")[2] for word in reversed(settings) if word.startswith("root=")), "outputs")
    folder = Path(root, "claim")
    failed = _run(claims, [word for word in settings if not word.startswith("root=")], folder, config_dir)
    found: dict[str, Measured] = {}
    for name in _experiments(claims):
        found |= attempt(failed, f"experiment {name}", _measured, name, folder / name, failed)
    require(bool(found), f"{folder}: no experiment has results")
    table = collect(found)
    table_files.save(table, folder, csv)
    judged = {name: next(attempt(failed, f"claim {name}", _judge, claim, table), []) for name, claim in claims.items()}
    lines = [(name, line) for name, own in judged.items() for line in own]
    with replacing(folder / "verdict.csv") as temporary:
        verdict_table(lines).to_csv(temporary, index=False)
    pictures = _pictures(claims, found, folder / "figure", failed)
    shown = _sections(judged, claims, folder, pictures, failed, [*options(config_dir), *settings])
    path = page.write(
        folder,
        "claims",
        {
            "title": "Claims",
            "folder": folder,
            "command": shlex.join(["recall-lab", "claim", *options(config_dir), *words]),
            "multiplicity": multiplicity([line for _, line in lines]),
            "sections": shown,
            "failed": failed,
        },
    )
    print_line(f"{text(lines)}\n\nreport: {path}")
    for failure in failed:
        print_error(failure)
    return 1 if failed or any(line.missing for _, line in lines) else 0


def _judge(claim: Claim, table: pd.DataFrame) -> Iterator[list[Line]]:
    yield claim.judge(table)


@dataclass(frozen=True)
class Section:
    """One claim in the page."""

    name: str
    statement: str
    measurements: list[str]
    command: str
    lines: list[tuple[Line, str]]
    """Each with its effect in words."""
    experiments: dict[str, list[dict[str, str]]]
    """The commands of each experiment."""
    pictures: list[page.Picture]
    elsewhere: list[page.Picture]
    """Pictures that the section of an earlier claim shows."""


def _sections(
    judged: dict[str, list[Line]],
    claims: dict[str, Claim],
    folder: Path,
    pictures: dict[str, list[page.Picture]],
    failed: list[str],
    settings: list[str],
) -> list[Section]:
    shown: set[str] = set()
    sections = []
    commands = {name: list(attempt(failed, f"commands of {name}", folders.commands, folder / name))
                for name in _experiments(claims)}  # fmt: skip
    for name, claim in claims.items():
        own = [picture for experiment in claim.experiments for picture in pictures.get(experiment, ())
               if picture.name.startswith(tuple(claim.figures))]  # fmt: skip
        sections.append(
            Section(
                name,
                statement(claim),
                measurements(claim),
                shlex.join(["recall-lab", "claim", name, *settings]),
                [(line, effect(line.estimate)) for line in judged[name]],
                {experiment: commands[experiment] for experiment in claim.experiments},
                [picture for picture in own if picture.file not in shown],
                [picture for picture in own if picture.file in shown],
            )
        )
        shown |= {picture.file for picture in own}
    return sections


def _pictures(
    claims: dict[str, Claim], found: dict[str, Measured], folder: Path, failed: list[str]
) -> dict[str, list[page.Picture]]:
    """Experiment → the figures that claims name, drawn from the selected table of the experiment, or of several that a
    claim draws together: then they are under the first of these."""
    drawn: dict[str, list[page.Picture]] = {}
    joined = [[name for name in claim.together if name in found] for claim in claims.values()]
    groups = [group for group in joined if group]
    groups += [[name] for name in found if not any(name in group for group in groups)]
    for group in groups:
        wanted = {figure for claim in claims.values() for figure in claim.figures if set(group) & {*claim.experiments}}
        if not wanted:
            continue
        parts = [found[name] for name in group]
        rows = pd.concat(
            [page.with_curves(own.folder.joinpath, own.chosen, own.over, failed) for own in parts], ignore_index=True
        )
        rows.attrs["selected"] = parts[0].over
        if len(parts) > 1:
            rows["series"] = results.series(rows, axis=parts[0].over)
        every = pd.concat([own.every for own in parts], ignore_index=True)
        drawn[group[0]] = list(page.pictures(folder, rows, every, failed, sorted(wanted), f"{group[0]}-"))
    return drawn


def _experiments(claims: dict[str, Claim]) -> list[str]:
    return list(dict.fromkeys(name for claim in claims.values() for name in claim.experiments))


def _run(claims: dict[str, Claim], settings: list[str], folder: Path, config_dir: str | None) -> list[str]:
    """Runs every experiment once. Returns one line for each that failed."""
    jobs = []
    for experiment, words in effective(_experiments(claims), settings, config_dir).items():
        _refuse_fewer_mixers(experiment, words, config_dir)
        jobs.append(Job(experiment, experiment, words))
        if any(experiment in claim.to_the_end for claim in claims.values()):
            jobs.append(Job(f"{experiment}{TWICE}", experiment, twice(experiment, words, config_dir)))
    return run(jobs, folder, config_dir)


def _refuse_fewer_mixers(experiment: str, settings: Sequence[str], config_dir: str | None) -> None:
    """Raises ValueError for a choice of mixers without some that the experiment is there to compare."""
    for override in parse(settings):
        if override.key_or_group == "mixer":
            hydra_part = compose([f"experiment={experiment}"], config_dir, with_hydra=True).hydra
            own = (hydra_part.sweeper.params or {}).get("mixer", hydra_part.runtime.choices.mixer)
            (compared,) = parse([f"mixer={own}"])
            missing = [name for name in values(compared) if name not in values(override)]
            names = ", ".join(missing)
            require(not missing, f"{override.input_line}: must include {names}, which experiment {experiment} compares")


def twice(experiment: str, settings: Sequence[str], config_dir: str | None) -> list[str]:
    """The settings with which an experiment is repeated with seed=0 and twice the steps (see `fairness`)."""
    parsed = dict(zip(settings, parse(settings), strict=True))
    of_steps = [
        word
        for word, override in parsed.items()
        if override.key_or_group in ("size", fairness.STEPS) and not override.is_sweep_override()
    ]
    steps = compose([f"experiment={experiment}", *of_steps], config_dir).train.steps
    kept = [word for word, override in parsed.items() if override.key_or_group not in ("seed", fairness.STEPS)]
    return [*kept, "seed=0", f"{fairness.STEPS}={2 * steps}"]


def _measured(name: str, folder: Path, failed: list[str]) -> Iterator[tuple[str, Measured]]:
    """Yields an experiment's name and results, if it has any; damaged files are added to `failed`."""
    own = measured(folder, failed)
    if own is not None:
        more = rows_of(folder.with_name(f"{name}{TWICE}"), failed)
        every = own.every if more is None else pd.concat([own.every, more])
        yield name, replace(own, chosen=_with_ends(own.chosen, every))


def _with_ends(chosen: pd.DataFrame, every: pd.DataFrame) -> pd.DataFrame:
    """The chosen rows with the column `trained_to_end`, from all runs, those with twice the steps included."""
    ends = fairness.trained_to_end(chosen, every.reset_index(drop=True))[["task", "series", "verdict"]]
    return chosen.merge(ends.rename(columns={"verdict": "trained_to_end"}), on=["task", "series"], how="left")


def text(lines: Sequence[tuple[str, Line]]) -> str:
    """The verdict for the terminal: one row per line of a claim, and how many lines are judged."""
    rows = [("claim", "line", "rule", "effect", "verdict")]
    for name, line in lines:
        because = f" ({line.reason})" if line.reason else ""
        rows.append((name, line.name, line.rule, effect(line.estimate), f"{line.decision}{because}"))
    return "\n".join([*columns(rows), "", multiplicity([line for _, line in lines])])
