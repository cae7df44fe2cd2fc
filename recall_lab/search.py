"""A search for the values of settings with the lowest validation loss, with optuna.

The trials of a search depend only on its intervals, its seed and the losses so far. A search that was interrupted is
therefore not stored: it is repeated, and the trials whose runs are finished cost nothing.
"""

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from recall_lab.checks import require
from recall_lab.files import read_json, write_json
from recall_lab.folders import CIRCUMSTANCES, HAS_ROWS, REPLICATES, Config, flatten, identity, status, without
from recall_lab.sweep import FAILED

RANDOM = 4
"""The number of trials at random values, before the others are chosen by the losses of the earlier ones."""


def check() -> None:
    """Raises ValueError where optuna is not installed."""
    found = importlib.util.find_spec("optuna") is not None
    require(found, "hydra/sweeper=optuna: optuna is not installed: pip install 'recall_lab[optuna]'")


@dataclass(frozen=True)
class Interval:
    """The values that are searched: from low to high, both included. Raises ValueError for impossible ones.

    log    whether equal ratios, rather than equal differences, are equally probable
    whole  whether the values are whole numbers
    """

    low: float | int
    high: float | int
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        given = f"interval({self.low:g}, {self.high:g})"
        require(self.low < self.high, f"{given}: the first number must be the lower one")
        require(not self.log or self.low > 0, f"tag(log, {given}): the lower number must be above 0")


class Search:
    """The search for one combination of the other settings.

    words      these settings, as on the command line, without seeds
    intervals  setting → its interval
    batch      the number of trials that are asked for at a time
    """

    def __init__(self, words: Sequence[str], intervals: dict[str, Interval], seed: int, batch: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.words, self.intervals, self.seed, self.batch = list(words), intervals, seed, batch
        # constant_liar keeps the trials of a batch, which are chosen before their losses are known, apart.
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=RANDOM, constant_liar=True)
        self.study = optuna.create_study(sampler=sampler)
        self.asked: list[tuple[Any, dict[str, float | int]]] = []
        self.losses: list[float] = []

    def ask(self, count: int) -> list[dict[str, float | int]]:
        """The values of the next trials, in three significant digits."""
        for _ in range(count):
            trial = self.study.ask()
            self.asked.append((trial, {name: self._suggest(trial, name) for name in self.intervals}))
        return [values for _, values in self.asked[-count:]]

    def _suggest(self, trial: Any, name: str) -> float | int:
        own = self.intervals[name]
        if own.whole:
            return int(trial.suggest_int(name, int(own.low), int(own.high), log=own.log))
        return min(max(float(f"{trial.suggest_float(name, own.low, own.high, log=own.log):.3g}"), own.low), own.high)

    def tell(self, losses: Sequence[float]) -> None:
        """The losses of the trials asked last; FAILED for one that has none."""
        for (trial, _), loss in zip(self.asked[-len(losses) :], losses, strict=True):
            self.study.tell(trial, loss)
        self.losses += losses

    @property
    def failed(self) -> int:
        """The number of trials without a loss."""
        return self.losses.count(FAILED)

    @property
    def best(self) -> tuple[float, dict[str, float | int]] | None:
        """The lowest loss and the values of its trial, the first of several; None where every trial failed."""
        loss, number = min(zip(self.losses, range(len(self.losses)), strict=True), default=(FAILED, 0))
        return None if loss == FAILED else (loss, self.asked[number][1])

    def describe(self) -> str:
        """The best trial so far in words."""
        if self.best is None:
            return "no trial has a loss"
        return f"best {_in_words(self.best[1])}, validation loss {self.best[0]:.4g}"

    def write(self, folder: Path, replicates: Sequence[Config]) -> None:
        """Keeps the best trial so far in the sweep's folder, for its report. replicates: the settings of one trial"""
        flat = flatten(replicates[0])
        loss, values = self.best or (None, {})
        known = {
            "settings": without(flat, (*CIRCUMSTANCES, *REPLICATES, *self.intervals)),
            "intervals": {name: asdict(interval) for name, interval in self.intervals.items()},
            "seeds": [[settings[name] for name in REPLICATES] for settings in replicates],
            "sampler": [self.seed, self.batch],
        }
        name = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]
        found = {"best": values, "loss": loss, "trials": len(self.losses), "failed": self.failed}
        write_json(folder / f"search-{name}.json", {**replicates[0]["choice"], **known, **found})


def mean_loss(folder: Path, replicates: Sequence[Config]) -> float:
    """The mean validation loss of the runs with these settings in a sweep's folder; FAILED where one has none."""
    facts = [status(folder / identity(settings)) for settings in replicates]
    losses = [float(each["loss"]) if each["state"] in HAS_ROWS else FAILED for each in facts]
    return FAILED if FAILED in losses else sum(losses) / len(losses)


def _in_words(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={f'{x:g}' if isinstance(x, float) else x}" for name, x in values.items())


def best_trials(folders: Sequence[Path]) -> pd.DataFrame:
    """The best trial of every search in the folders of sweeps: task, mixer, what was searched, the settings in which
    searches of the same task and mixer differ, the best values, their validation loss, the number of seeds and trials.

    Raises ValueError for a damaged file.
    """
    found = [read_json(path) for folder in folders for path in sorted(folder.glob("search-*.json"))]
    lines = [
        {
            "task": each["task"],
            "mixer": each["mixer"],
            "settings": _in_words(_differing(each, found)),
            "searched": ", ".join(f"{k} from {x['low']:g} to {x['high']:g}" for k, x in each["intervals"].items()),
            "best": _in_words(each["best"]) or "every trial failed",
            "validation loss": "" if each["loss"] is None else f"{each['loss']:.4g}",
            "seeds": len(each["seeds"]),
            "trials": f"{each['trials']}" + (f", {each['failed']} of them failed" if each["failed"] else ""),
        }
        for each in found
    ]
    table = pd.DataFrame(lines)
    return table if found and any(table["settings"]) else table.drop(columns="settings", errors="ignore")


def _differing(one: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The settings in which a search differs from another one of the same task and mixer."""
    same = [other["settings"] for other in others if (other["task"], other["mixer"]) == (one["task"], one["mixer"])]
    return {name: x for name, x in one["settings"].items() if any(other.get(name) != x for other in same)}
