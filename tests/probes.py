"""Helpers for tests of probes: traces of the oracle, and looking up one value among many rows."""

from typing import Any

import numpy as np
import torch
from conftest import config
from hydra.utils import instantiate

from recall_lab.mixer.base import Mixer, Trace
from recall_lab.mixer.linear import Linear
from recall_lab.oracle import Oracle
from recall_lab.results import Row


def traced(make: Any = Linear, seed: int = 0, **fields: Any) -> Trace:
    """A trace of the oracle with these settings."""
    oracle = Oracle(**{"reads": 1024} | fields)
    torch.manual_seed(seed)
    return oracle.trace(oracle.mixer(make), np.random.default_rng(seed))


def mixer(name: str, **fields: Any) -> Mixer:
    torch.manual_seed(0)
    return instantiate(config(f"mixer={name}").mixer)(**fields)


def value(rows: list[Row], metric: str, **where: Any) -> float:
    """The value of the one row with that metric and these columns."""
    found = [r["value"] for r in rows if r["metric"] == metric and all(r.get(k) == x for k, x in where.items())]
    assert len(found) == 1, (metric, where, len(found))
    return found[0]
