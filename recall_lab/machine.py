"""The machine that a run uses: device, threads, determinism, and the versions that a result depends on."""

import importlib.metadata
import os
import platform
import subprocess
from functools import cache

import torch

from recall_lab.checks import choice, require, whole_number
from recall_lab.files import CONF


def prepare(device: str, threads: int, deterministic: bool = True, job: int | None = None) -> torch.device:
    """The torch device for "auto", "cpu", "cuda", "cuda:1" or "mps"; sets the number of threads and determinism.

    auto is cuda if available, else mps if available, else cpu.
    deterministic  use algorithms that give the same bits every time, where torch has them; it warns where it has not
    job            number of the run in its sweep: "cuda" is then the GPU at this place, counted round and round
    Raises ValueError where torch cannot use such a device on this machine, or threads is not a positive whole number.
    """
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        device = "cuda" if available["cuda"] else "mps" if available["mps"] else "cpu"
    kind = str(device).partition(":")[0]
    choice("device", kind, ["auto", *available])
    require(
        available[kind],
        f"device={device}: must be available to torch on this machine; device=auto takes an available one",
    )
    whole_number("threads", threads)
    torch.set_num_threads(threads)
    # cuBLAS reads this when it starts; without it some of its sums differ from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    # Filling new tensors with NaN, which reveals reads of uninitialised memory, costs a tenth of a training step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return torch.device(f"cuda:{job % torch.cuda.device_count()}" if device == "cuda" and job is not None else device)


@cache
def provenance() -> dict[str, str]:
    """Where a result comes from: the git revision and the versions of recall_lab, Python, torch and numpy."""
    return {
        "git": revision(),
        "version": version("recall_lab"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
    }


def version(package: str) -> str:
    """The installed version of a package, "unknown" where it is not installed (in a bare checkout)."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@cache
def revision() -> str:
    """The checkout's git revision, with a + where files differ from it; "" for an installed package."""
    git = ["git", "-C", str(CONF.parent)]
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", "conf/config.yaml"], capture_output=True)
        if tracked.returncode:
            return ""
        describe = [*git, "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        return subprocess.check_output(describe, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
