"""The machine that a run uses: device, threads, determinism."""

import os

import torch

from recall_lab.checks import choice, require, whole_number

DEVICES = ("auto", "cpu", "cuda", "mps")
"""Values of `device`; cuda:1 is one of several GPUs."""


def kind(device: str) -> str:
    """cuda of "cuda:1". Raises ValueError for what is none of DEVICES."""
    name = str(device).partition(":")[0]
    choice("device", name, DEVICES)
    return name


def available(device: str) -> str:
    """The device, that which stands for "auto" in its place. Raises ValueError where torch cannot use it here."""
    usable = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if kind(device) == "auto":
        return "cuda" if usable["cuda"] else "mps" if usable["mps"] else "cpu"
    require(
        usable[kind(device)],
        f"device={device}: must be available to torch on this machine; device=auto takes an available one",
    )
    return device


def prepare(device: str, threads: int, deterministic: bool = True, job: int | None = None) -> torch.device:
    """The torch device for "auto", "cpu", "cuda", "cuda:1" or "mps"; sets the number of threads and determinism.

    auto is cuda if available, else mps if available, else cpu.
    deterministic  use algorithms that give the same bits every time, where torch has them; it warns where it has not
    job            number of the run in its sweep: "cuda" is then the GPU with this number modulo their count
    Raises ValueError where torch cannot use such a device on this machine, or threads is not a positive whole number.
    """
    device = available(device)
    whole_number("threads", threads)
    torch.set_num_threads(threads)
    # cuBLAS reads this when it starts; without it some of its sums differ from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # use_deterministic_algorithms would import the compiler, which takes a second. The compiler reads the variable when
    # it is imported.
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(deterministic))
    torch.set_deterministic_debug_mode("warn" if deterministic else "default")
    # Filling new tensors with NaN, which reveals reads of uninitialised memory, costs a tenth of a training step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return torch.device(f"cuda:{job % torch.cuda.device_count()}" if device == "cuda" and job is not None else device)
