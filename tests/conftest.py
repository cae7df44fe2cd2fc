"""What the tests share. Every annotation of recall_lab (shapes too) is checked while they run."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from jaxtyping import install_import_hook

install_import_hook("recall_lab", "beartype.beartype")

import torch  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402

CONF = Path(__file__).parents[1] / "conf"
GOLDEN = Path(__file__).parent / "golden"


def names(group: str) -> list[str]:
    """The options of a config group: what parametrised tests run over."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def config(*overrides: str):
    """The real configuration, composed as the command line does."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(overrides))


def golden(name: str) -> dict[str, torch.Tensor]:
    """The arrays of tests/golden/NAME.npz; their layout is b t h d."""
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files if key != "__meta__"}


def ratio(x: torch.Tensor, reference: torch.Tensor) -> float:
    """rms(x − reference) / rms(reference), the error metric of the golden files."""
    error = (x.double() - reference.double()).square().mean().sqrt()
    return float(error / reference.double().square().mean().sqrt())


def seconds(*runs: Callable[[], object], times: int = 5) -> list[float]:
    """Processor time of the fastest run of each, all in turn, so that a busy machine disturbs them alike."""
    best = [math.inf] * len(runs)
    for _ in range(times):
        for i, run in enumerate(runs):
            start = time.process_time()
            run()
            best[i] = min(best[i], time.process_time() - start)
    return best


@pytest.fixture(autouse=True)
def _one_thread():
    """Bit-equal reruns need a fixed thread count."""
    torch.set_num_threads(1)
