"""The experiments: both sizes compose and fit their tasks, sweeps parse, and small ones run to their figures."""

import re

import hydra
import numpy as np
import pandas as pd
import pytest
from conftest import config, names
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from recall_lab import results, run, theory
from recall_lab.figure import needle, recall_phase_diagram, retrieval, selective_copying, updates, window_coverage
from recall_lab.task.mqar import MQAR
from recall_lab.train import test_cells as grid
from recall_lab.train import training_cells

SIZES = ("small", "large")


def composed(name: str, size: str, *more: str) -> tuple[dict, dict[str, list[str]]]:
    """An experiment's resolved configuration, and its sweep: setting → values."""
    full = config(f"experiment={name}", f"size={size}", "+hydra=none", *more)
    return OmegaConf.to_container(full, resolve=True)


def sweep(name: str, size: str) -> list[list[str]]:
    """Every job of an experiment's own sweep, as lists of overrides."""
    with hydra.initialize_config_dir(str(run.CONF), version_base="1.3"):
        full = hydra.compose("config", [f"experiment={name}", f"size={size}"], return_hydra_config=True)
    params = full.hydra.sweeper.params or {}
    overrides = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()])
    jobs = [[]]
    for override in overrides:
        values = override.sweep_string_iterator() if override.is_sweep_override() else [override.value()]
        jobs = [[*job, f"{override.key_or_group}={value}"] for job in jobs for value in list(values)]
    return jobs
