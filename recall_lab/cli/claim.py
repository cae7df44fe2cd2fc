"""`recall-lab claim`: runs the experiments that claims need, and judges the claims."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hydra
import pandas as pd
from omegaconf import OmegaConf

from recall_lab import folders, page, results
from recall_lab.checks import require
from recall_lab.claim.base import Claim, Line, effect, measurements, multiplicity, statement, verdict_table
from recall_lab.cli.base import compose
from recall_lab.files import CONF, replacing
from recall_lab.messages import print_error, print_line
from recall_lab.page import attempt


def names(config_dir: str | None = None) -> list[str]:
    """The names of all claims, those of config_dir included."""
    found = [CONF / "claim", *([Path(config_dir) / "claim"] if config_dir else [])]
    return sorted({path.stem for folder in found for path in folder.glob("*.yaml")})


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


def claim(words: Iterable[str], config_dir: str | None = None) -> int:
    """Runs and judges the claims named in `words` (none: all of them). Returns the exit status.

    words  names of claims, and settings of the runs that follow (size=large, device=cuda, root=…); each experiment is
           run once, in outputs/claim/EXPERIMENT, and what is finished is not run again

    Writes outputs/claim/report.html, report.md, table.parquet, verdict.csv and the claims' figures. A claim whose
    judgement raises an exception is named there; the others are judged.

    Any verdict is status 0; a run or a judgement that failed, or a measurement that is missing, is 1.
    Raises ValueError for an unknown claim.
    """
    words = list(words)
    settings = [word for word in words if "=" in word]
    claims = load([word for word in words if "=" not in word], config_dir)
    root = next((word.partition("=")[2] for word in reversed(settings) if word.startswith("root=")), "outputs")
    folder = Path(root, "claim")
    failed = _run(claims, [word for word in settings if not word.startswith("root=")], folder, config_dir)
    measured: dict[str, Measured] = {}
    for name in _experiments(claims):
        measured |= attempt(failed, f"experiment {name}", _measured, name, folder / name, failed)
    require(bool(measured), f"{folder}: no experiment has results")
    table = collect(measured)
    results.save(table, folder / "table.parquet")
    judged = {name: next(attempt(failed, f"claim {name}", _judge, claim, table), []) for name, claim in claims.items()}
    lines = [(name, line) for name, found in judged.items() for line in found]
    with replacing(folder / "verdict.csv") as temporary:
        verdict_table(lines).to_csv(temporary, index=False)
    options = ["--config-dir", config_dir] if config_dir else []
    pictures = _pictures(claims, measured, folder / "figure", failed)
    shown = _sections(judged, claims, folder, pictures, failed, [*options, *settings])
    path = page.write(
        folder,
        "claims",
        {
            "title": "Claims",
            "folder": folder,
            "command": shlex.join(["recall-lab", "claim", *options, *words]),
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
class Measured:
    """The results of one experiment."""

    folder: Path
    every: pd.DataFrame
    """The rows of all runs."""
    chosen: pd.DataFrame
    """Those selected on validation."""
    over: tuple[str, ...]
    """The settings that were selected."""


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
    claims: dict[str, Claim], measured: dict[str, Measured], folder: Path, failed: list[str]
) -> dict[str, list[page.Picture]]:
    """Experiment → the figures that claims name, each drawn from the experiment's own selected table."""
    drawn: dict[str, list[page.Picture]] = {}
    for name, own in measured.items():
        wanted = sorted({figure for claim in claims.values() if name in claim.experiments for figure in claim.figures})
        if wanted:
            rows = page.with_curves(own.folder, own.chosen, own.over, failed)
            drawn[name] = list(page.pictures(folder, rows, own.every, failed, wanted, f"{name}-"))
    return drawn


def _experiments(claims: dict[str, Claim]) -> list[str]:
    return list(dict.fromkeys(name for claim in claims.values() for name in claim.experiments))


def _run(claims: dict[str, Claim], settings: list[str], folder: Path, config_dir: str | None) -> list[str]:
    """Runs every experiment once, one after another; one line for each that did not end well."""
    failed = []
    options = ["--config-dir", config_dir] if config_dir else []
    experiments = _experiments(claims)
    for number, experiment in enumerate(experiments, 1):
        print_line(f"experiment {number} of {len(experiments)}: {experiment}")
        place = [f"root={folder}", f"name={experiment}", "report=false"]
        command = [sys.executable, "-m", "recall_lab", "run", *options, f"experiment={experiment}", *place, *settings]
        code = subprocess.run(command, env=os.environ, check=False).returncode
        if code in (130, 143):
            raise KeyboardInterrupt
        if code:
            failed.append(f"experiment {experiment}: exit status {code}")
    return failed


def _measured(name: str, folder: Path, failed: list[str]) -> Iterator[tuple[str, Measured]]:
    """Yields an experiment's name and results, if it has any; damaged files are added to `failed`."""
    runs = folders.runs(folder) if (folder / folders.MARK).exists() else []
    if any(run.has_rows for run in runs):
        every, _, damaged = results.gather(folder, runs)
        failed += damaged
        over = results.selected_settings(folder)
        yield name, Measured(folder, every, results.select(every, over), over)


def collect(measured: dict[str, Measured]) -> pd.DataFrame:
    """The selected rows of all experiments, with the experiment's name as a column."""
    parts = [own.chosen.assign(experiment=name) for name, own in measured.items()]
    return pd.concat(parts, ignore_index=True)


def text(lines: Sequence[tuple[str, Line]]) -> str:
    """The verdict for the terminal: one row per line of a claim, and how many lines are judged."""
    rows = [("claim", "line", "rule", "effect", "verdict")]
    for name, line in lines:
        because = f" ({line.reason})" if line.reason else ""
        rows.append((name, line.name, line.rule, effect(line.estimate), f"{line.decision}{because}"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    table = "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return f"{table}\n\n{multiplicity([line for _, line in lines])}"
