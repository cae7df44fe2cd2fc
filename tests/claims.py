"""Helpers for tests of claims: made-up rows, the claims as their yaml makes them, and looking up one line."""

from collections.abc import Iterable
from typing import Any

import pandas as pd
from hydra.utils import instantiate
from omegaconf import OmegaConf

from recall_lab.claim.base import Claim, Line
from recall_lab.cli.base import compose


def claim(name: str) -> Claim:
    """The claim of conf/claim/NAME.yaml."""
    return instantiate(OmegaConf.to_container(compose([f"+claim={name}"]).claim), _convert_="all")


def rows(experiment: str, metric: str, mixer: str, values: Iterable[float], split: str = "probe", **columns: Any):
    """One row per value, each of a seed of its own; a run per mixer and seed."""
    values = list(values)
    table = pd.DataFrame({"seed": range(len(values)), "value": values})
    names = [f"{experiment} {mixer} {seed}" for seed in table["seed"]]
    fixed = {"experiment": experiment, "metric": metric, "mixer": mixer, "split": split, "data_seed": 0, "run": names}
    return table.assign(**fixed, **{name.replace("__", "."): x for name, x in columns.items()})


def spread(mean: float, seeds: int = 5, width: float = 0.01) -> list[float]:
    """Values of that mean, one per seed, evenly spaced over twice the width."""
    return [mean + width * (2 * seed / max(seeds - 1, 1) - 1) for seed in range(seeds)]


def line(lines: list[Line], *words: str) -> Line:
    """The one line whose name holds all these words."""
    found = [one for one in lines if all(word in one.name for word in words)]
    assert len(found) == 1, [one.name for one in lines]
    return found[0]
