"""`recall-lab claim`: runs the experiments that claims need, and judges the claims."""

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import hydra
import pandas as pd
from omegaconf import OmegaConf

from recall_lab import folders, results
from recall_lab.checks import require
from recall_lab.claim.base import Claim, Line, effect, multiplicity, verdict_table
from recall_lab.cli.base import compose
from recall_lab.files import CONF, replacing
from recall_lab.messages import print_error, print_line


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

    Any verdict is status 0; a run that failed, or a measurement that is missing, is 1.
    Raises ValueError for an unknown claim.
    """
    words = list(words)
    settings = [word for word in words if "=" in word]
    claims = load([word for word in words if "=" not in word], config_dir)
    root = next((word.partition("=")[2] for word in reversed(settings) if word.startswith("root=")), "outputs")
    folder = Path(root, "claim")
    failed = _run(claims, [word for word in settings if not word.startswith("root=")], folder, config_dir)
    table = collect(claims, folder)
    lines = [(name, line) for name, claim in claims.items() for line in claim.judge(table)]
    verdicts = verdict_table(lines)
    with replacing(folder / "verdict.csv") as temporary:
        verdicts.to_csv(temporary, index=False)
    print_line(text(lines))
    for failure in failed:
        print_error(failure)
    return 1 if failed or any(line.missing for _, line in lines) else 0


def _run(claims: dict[str, Claim], settings: list[str], folder: Path, config_dir: str | None) -> list[str]:
    """Runs every experiment once, one after another; one line for each that did not end well."""
    failed = []
    options = ["--config-dir", config_dir] if config_dir else []
    experiments = list(dict.fromkeys(name for claim in claims.values() for name in claim.experiments))
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


def collect(claims: dict[str, Claim], folder: Path) -> pd.DataFrame:
    """The rows of all experiments of the claims, selected on validation, with the experiment's name as a column."""
    parts = []
    for experiment in dict.fromkeys(name for claim in claims.values() for name in claim.experiments):
        place = folder / experiment
        if any(run.has_rows for run in folders.runs(place)):
            rows = results.select(results.collect(place), results.selected_settings(place))
            parts.append(rows.assign(experiment=experiment))
    require(bool(parts), f"{folder}: no experiment has results")
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
