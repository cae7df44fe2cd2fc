"""`recall-lab rates`: the learning rate of every mechanism on every task, chosen on validation and kept in rates.yaml.

The small sizes of the experiments read that file by `train.lr=studied`, so that each mechanism is trained at a rate
that suits it, without a sweep of rates in every run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from recall_lab.checks import require
from recall_lab.cli.base import RATES, STUDIED, compose
from recall_lab.files import OWN, searched, write_text
from recall_lab.messages import print_line
from recall_lab.results import SAME, SCORES, collect

GRID = (3e-3, 1e-2, 3e-2)
"""The rates that a study begins with."""

LADDER = [float(f"{digit}e{power}") for power in range(-5, 1) for digit in (1, 3)]
"""The rates that a study may add to its grid."""


def write(found: Mapping[str, Mapping[str, float]]) -> None:
    """Adds rates to rates.yaml, that of the user's own folder where there is one; a rate of the same task and mixer is
    replaced."""
    path = written()
    rates = (yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None) or {}
    for task, own in found.items():
        rates[task] = {**rates.get(task, {}), **own}
    first = RATES.read_text(encoding="utf-8").partition("\n")[0]
    write_text(path, first + "\n" + yaml.safe_dump(rates, default_flow_style=None, sort_keys=False, width=110))


def written() -> Path:
    """The rates.yaml that a study writes to."""
    return OWN[0] / RATES.name if OWN else RATES


def study(experiments: Sequence[str], overrides: Sequence[str], launch: Callable[[list[str]], int]) -> int:
    """Trains the mechanisms of each experiment over GRID at its small size, extends the grid of those whose best rate
    is at its edge, writes the best rates to rates.yaml and returns the exit status.

    overrides  settings for all runs (seed=0, train.steps=400, mixer=…); the runs are in outputs/rates_EXPERIMENT
    launch     runs `recall-lab run` with these arguments, and returns its exit status

    Raises ValueError for an experiment that does not take its rates from rates.yaml.
    """
    from recall_lab import report

    for name in experiments:
        require(_takes_rates(name), f"{name}: must be an experiment with train.lr=studied: {', '.join(_known())}")
    code = 0
    for name in experiments:
        folder = Path("outputs", f"rates_{name}")
        untested = ["test.tokens=1", "test.sequences=1"]  # the choice is made on validation
        common = ["-m", f"experiment={name}", f"name=rates_{name}", "report=false", *untested]
        common += [word for folder in OWN for word in ("--config-dir", str(folder))]
        grids: dict[str, set[float]] = {}
        wanted = {"": set(GRID)}
        while wanted:
            for mixers, rates in wanted.items():
                only = [f"mixer={mixers}", *(word for word in overrides if not word.startswith("mixer="))]
                grid = ",".join(f"{rate:g}" for rate in sorted(rates))
                code = max(code, launch([*common, *(only if mixers else overrides), f"train.lr={grid}"]))
            scores = validation_scores(folder)
            grids, before = {f"{t} {m}": set(own) for (t, m), own in scores.items()}, grids
            wanted = _extended(scores) if grids != before else {}
        found: dict[str, dict[str, float]] = {}
        for (task, mixer), own in scores.items():
            found.setdefault(task, {})[mixer] = best(own)
        write(found)
        print_line(report.make(folder).text)
        print_line(f"\n{written()}: {found}")
    return code


def _takes_rates(experiment: str) -> bool:
    """Whether the experiment exists and takes its rates from rates.yaml."""
    if not any((folder / "experiment" / f"{experiment}.yaml").is_file() for folder in searched()):
        return False
    return OmegaConf.select(compose([f"experiment={experiment}"]), "train.lr") == STUDIED


def _known() -> list[str]:
    names = sorted(path.stem for folder in searched() for path in folder.glob("experiment/*.yaml"))
    return [name for name in names if _takes_rates(name)]


def validation_scores(folder: Path, seed: int | None = None) -> dict[tuple[str, str], dict[float, float]]:
    """(task, mixer) → rate → validation score, the mean over cells, seeds and the other axes of the experiment.

    seed  the one whose runs count; None: all
    """
    table = collect(folder)
    rows = table[(table["split"] == "validation") & table["metric"].isin(SCORES)]
    rows = rows if seed is None else rows[rows["seed"] == seed]
    runs = rows.groupby(["task", "mixer", "train.lr", "run"])["value"].mean()
    scores: dict[tuple[str, str], dict[float, float]] = {}
    for (task, mixer, rate), score in runs.groupby(level=[0, 1, 2]).mean().items():
        scores.setdefault((task, mixer), {})[float(rate)] = float(score)
    return scores


def best(scores: Mapping[float, float]) -> float:
    """The rate with the highest score; of several with the same (up to SAME), the one nearest the grid's middle."""
    top = max(scores.values())
    middle = math.sqrt(min(scores) * max(scores))
    return min((rate for rate in scores if scores[rate] >= top - SAME), key=lambda rate: abs(math.log(rate / middle)))


def beyond(scores: Mapping[float, float]) -> float | None:
    """The next rate to try where the best one is at the edge of its grid, on the ladder 1, 3, 10, 30 …; else None."""
    chosen = best(scores)
    if len(scores) > 1 and chosen == max(scores):
        return next((rate for rate in LADDER if rate > 1.5 * chosen), None)
    if len(scores) > 1 and chosen == min(scores):
        return next((rate for rate in reversed(LADDER) if rate < chosen / 1.5), None)
    return None


def _extended(scores: Mapping[tuple[str, str], Mapping[float, float]]) -> dict[str, set[float]]:
    """Mixers, joined by commas → the rate to be added to their grid."""
    growing: dict[float, list[str]] = {}
    for (_, mixer), own in scores.items():
        rate = beyond(own)
        if rate is not None:
            growing.setdefault(rate, []).append(mixer)
    return {",".join(mixers): {rate} for rate, mixers in growing.items()}
