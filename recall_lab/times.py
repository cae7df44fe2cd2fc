"""How long runs take, estimated from those already made."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

from recall_lab.folders import CIRCUMSTANCES, MARK, REPLICATES, Config, Run, flatten, runs, without


class Times:
    """Seconds of finished runs, by their settings.

    The estimate for a run is the mean over finished runs that differ from it only in seeds and circumstances. Without
    such runs, it is the mean over runs of the same task and mixer, scaled by the number of training steps.
    """

    def __init__(self, made: Iterable[tuple[Config, float]] = ()) -> None:
        self.exact: dict[str, list[float]] = {}
        self.similar: dict[tuple[str, str], list[float]] = {}
        """Seconds per step, by task and mixer."""
        for config, seconds in made:
            self.add(config, seconds)

    def add(self, config: Config, seconds: float) -> None:
        """Adds a finished run with these settings."""
        self.exact.setdefault(_condition(config), []).append(seconds)
        self.similar.setdefault(_kind(config), []).append(seconds / _steps(config))

    def estimate(self, config: Config) -> float | None:
        """Seconds of a run with these settings; None if no comparable run has been made."""
        if found := self.exact.get(_condition(config)):
            return mean(found)
        found = self.similar.get(_kind(config))
        return mean(found) * _steps(config) if found else None


def made(folder: Path) -> list[tuple[Config, float]]:
    """Settings and seconds of the finished runs in the sweep's folder and in the sweeps beside it."""
    found = []
    for sweep in sorted(folder.parent.glob(f"*/{MARK}")):
        found += [pair for run in _readable(sweep.parent) for pair in _seconds(run)]
    return found


def _readable(folder: Path) -> Sequence[Run]:
    try:
        return [run for run in runs(folder) if run.has_rows]
    except ValueError:  # of another format
        return []


def _seconds(run: Run) -> list[tuple[Config, float]]:
    try:
        return [(run.config, float(run.status["seconds"]))]
    except (ValueError, OSError):  # damaged
        return []


def _kind(config: Config) -> tuple[str, str]:
    return config["choice"]["task"], config["choice"]["mixer"]


def _steps(config: Config) -> int:
    return int(config.get("train", {}).get("steps", 1))


def _condition(config: Config) -> str:
    chosen = without(flatten(config), (*CIRCUMSTANCES, *REPLICATES))
    return json.dumps(chosen, sort_keys=True)


def in_words(seconds: float | None) -> str:
    """A duration: "8 s", "3 min", "2 h 05 min", "unknown"."""
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
