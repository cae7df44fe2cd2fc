"""Fixtures that tests share. While tests run, every type annotation of recall_lab is checked, including shapes."""

import copy
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxtyping import install_import_hook

install_import_hook("recall_lab", "typechecker.check")

import torch  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from hydra.utils import instantiate  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from recall_lab import files  # noqa: E402
from recall_lab.model import Model  # noqa: E402
from recall_lab.task.mqar import MQAR  # noqa: E402
from recall_lab.train import Training  # noqa: E402

CONF = Path(__file__).parents[1] / "conf"
GOLDEN = Path(__file__).parent / "golden"
CPU = torch.device("cpu")
TASK = MQAR(vocab=32, length=16, pairs=4)


def names(group: str) -> list[str]:
    """The names of the options of a config group, over which many tests are parametrised."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def config(*overrides: str) -> DictConfig:
    """The real configuration, composed as on the command line; a copy, which a test may change."""
    return copy.deepcopy(_composed(*overrides))


@cache
def _composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(overrides))


def small_model(mixer: str = "softmax", seed: int = 0, overrides: Sequence[str] = (), **more: Any) -> Model:
    """An untrained model for TASK: one layer of width 16."""
    chosen = instantiate(config(f"mixer={mixer}", *overrides).mixer, _convert_="all")
    torch.manual_seed(seed)
    layers = len(chosen) if isinstance(chosen, list) else 1
    return Model(TASK.vocab, chosen, **{"d_model": 16, "layers": layers, **more})


def small_training(**changed: Any) -> Training:
    """Thirty small training steps, with a validation after every ten."""
    return Training(**{"steps": 30, "tokens": 512, "validate_every": 10, "validation_sequences": 16, **changed})


def golden(name: str) -> dict[str, torch.Tensor]:
    """The arrays of tests/golden/NAME.npz; their layout is b t h d."""
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files if key != "__meta__"}


def ratio(x: torch.Tensor, reference: torch.Tensor) -> float:
    """rms(x − reference) / rms(reference), the error metric of the golden files."""
    error = (x.double() - reference.double()).square().mean().sqrt()
    return float(error / reference.double().square().mean().sqrt())


def seconds(*runs: Callable[[], object], times: int = 5) -> list[float]:
    """Processor time in seconds of the fastest call of each function. Calls alternate, so that load affects all."""
    best = [math.inf] * len(runs)
    for _ in range(times):
        for i, run in enumerate(runs):
            start = time.process_time()
            run()
            best[i] = min(best[i], time.process_time() - start)
    return best


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Runs the suite on all cores, at most eight, where pytest-xdist is installed and -n is not given.

    A single process runs named files, because they end before workers would have started; benchmarks, because workers
    would disturb them; tests on the GPU, because there is only one; and coverage, which must know of its workers before
    this file is read (`pytest -n 2 --cov`).
    """
    suite = all(Path(argument).is_dir() and "benchmarks" not in argument for argument in config.args)
    undecided = config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None
    undecided = undecided and not getattr(config.option, "cov_source", None)
    if undecided and suite and config.option.markexpr != "gpu" and not hasattr(config, "workerinput"):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        config.option.numprocesses, config.option.dist = min(8, cores), "worksteal"


@pytest.fixture(autouse=True)
def _one_thread():
    """Runs are bit-equal only for a fixed number of threads."""
    torch.set_num_threads(1)


@pytest.fixture
def no_figures(monkeypatch):
    """Reports without figures, which take most of their time."""
    monkeypatch.setattr("recall_lab.page.pictures", lambda *_, **__: [])


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """Runs the test in an empty folder and undoes the global settings that the command line makes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv(files.CONFIG_DIR, "")
    for name in ("HYDRA_FULL_ERROR", "RECALL_LAB_SWEEP", "RECALL_LAB_PID"):
        monkeypatch.delenv(name, raising=False)
    yield
    files.OWN.clear()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
