"""One run, from its resolved configuration to its finished folder; and probes of a run that is finished."""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hydra
import torch
from filelock import FileLock, Timeout
from omegaconf import OmegaConf
from torch import nn

from recall_lab import results, train
from recall_lab.files import replacing, write_json
from recall_lab.messages import CONF, one_line, say
from recall_lab.probe import base as probing
from recall_lab.results import Row
from recall_lab.task.base import Task
from recall_lab.train import Cell, Scores

FAILED = 1e9
"""What a failed run gives a sweeper that minimises: finite, and worse than any loss."""

Config = dict[str, Any]
"""A resolved configuration: nested plain values."""

log = logging.getLogger("recall_lab")


def identity(config: Config) -> str:
    """The name of a run's folder: a hash of every setting that its result depends on.

    Left out are where results are put, whether they are reported, and `size`, whose numbers are settings already.
    """
    content = {key: value for key, value in config.items() if key not in ("name", "root", "size", "report")}
    return hashlib.sha256(json.dumps(_plain(content), sort_keys=True).encode()).hexdigest()[:12]


def _plain(x: Any) -> Any:
    """The same values with 1.0 written as 1."""
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_plain(value) for value in x]
    return int(x) if isinstance(x, float) and x.is_integer() else x


def execute(config: Config, alone: bool = True) -> float:
    """One run; gives the validation loss (0 for a run that trains nothing).

    A finished run is left alone, one that was cut off goes on from its checkpoint, a failed one is done again.
    Whatever goes wrong is written into the folder (status.json, run.log), and FAILED is returned.
    alone: no other runs share the terminal, so that a progress bar may be shown.
    """
    parent = Path(str(config["root"]), str(config["name"]))
    results.claim(parent)
    folder = parent / identity(config)
    folder.mkdir(exist_ok=True)
    title = f"{folder.name} {config['choice']['mixer']} on {config['choice']['task']}, seed {config['seed']}"
    try:
        with FileLock(folder / ".lock", blocking=False):
            before = results.status(folder)
            if before["state"] == "finished":
                other = "" if before["git"] == revision() else f", made at another revision ({before['git']})"
                say(f"found     {title}{other}")
                return before["loss"]
            if before["state"] == "failed":
                (folder / "checkpoint.pt").unlink(missing_ok=True)
            return _work(config, folder, title, alone)
    except Timeout:
        say(f"skipped   {title}: another process is at it")
        return FAILED


def _work(config: Config, folder: Path, title: str, alone: bool) -> float:
    with replacing(folder / "config.yaml") as temporary:
        temporary.write_text(OmegaConf.to_yaml(config))
    facts = {"started": now(), "sweep": os.environ.get(results.SWEEP, ""), **provenance(), "threads": config["threads"]}
    began = time.perf_counter()

    def note(state: str, **more: Any) -> None:
        seconds = round(time.perf_counter() - began, 3)
        write_json(folder / "status.json", {"state": state, **facts, "seconds": seconds, **more})

    note("running", device="")
    with logging_to(folder / "run.log"):
        try:
            for name in ("seed", "data_seed"):
                if not isinstance(config[name], int) or config[name] < 0:
                    raise ValueError(f"{name}={config[name]}: a whole number of at least 0")
            device = prepare(config["device"], config["threads"])
            facts["device"] = str(device)
            with progress(title, config["train"]["steps"], alone) as advance:
                work = train_and_test if config["oracle"] is None else consult
                rows, told, loss = work(config, folder, device, advance)
            write_json(folder / "rows.json", rows)
        except KeyboardInterrupt:
            note("interrupted")
            log.warning("interrupted")
            raise
        except Exception as error:
            log.exception("failed")
            note("failed", error=one_line(error))
            if not alone:
                say(f"failed    {title}")
            return FAILED
        note("finished", loss=loss)
        log.info("finished")
    say(f"finished  {title}: {told}, {time.perf_counter() - began:.0f} s")
    return loss


Work = tuple[list[Row], str, float]
"""Rows, a summary of them in words, and the loss."""


def train_and_test(
    config: Config, folder: Path, device: torch.device, advance: Callable[[Scores], None] = lambda point: None
) -> Work:
    """Trains a model, scores it on the validation and the test cells, and puts the probes to it."""
    task = hydra.utils.instantiate(config["task"])
    training = hydra.utils.instantiate(config["train"], _convert_="all")
    testing = hydra.utils.instantiate(config["test"], _convert_="all")
    trained = train.training_cells(task, training.cells)
    tested = train.test_cells(task, testing.cells, trained)
    probes = instantiate_probes(config)
    torch.manual_seed(config["seed"])
    model = build(config, task, device)
    log.info("%s: %d parameters", device, sum(p.numel() for p in model.parameters()))

    def report(point: Scores) -> None:
        log.info("step %d: accuracy %.4f, loss %.4f", point["step"], point["accuracy"], point["loss"])
        if training.keep:
            (folder / "weights").mkdir(exist_ok=True)
            with replacing(folder / "weights" / f"{point['step']:06d}.pt") as temporary:
                torch.save(model.state_dict(), temporary)
        advance(point)

    curve = train.train(model, task, training, config["data_seed"], device, folder / "checkpoint.pt", report)
    write_json(folder / "curve.json", curve)
    seed = config["data_seed"]
    rows = score(model, task, trained, seed, "validation", lambda at: training.validation_sequences, device)
    rows += score(model, task, tested, seed, "test", testing.sequences_of, device)
    rows += probe_model(probes, model, task, tested, seed, testing.probe_sequences)
    last = curve[-1]
    return rows, f"validation accuracy {last['accuracy']:.3f} after {last['step']} steps", float(last["loss"])


def consult(
    config: Config, folder: Path, device: torch.device, advance: Callable[[Scores], None] = lambda point: None
) -> Work:
    """Puts the probes to the oracle: random keys and values straight into the mechanism, nothing trained."""
    torch.manual_seed(config["seed"])
    oracle = hydra.utils.instantiate(config["oracle"], _convert_="all")
    make = hydra.utils.instantiate(config["mixer"], _convert_="all")
    if isinstance(make, list):
        raise ValueError("the oracle asks one mechanism, not a hybrid of several")
    probes = instantiate_probes(config)
    if not probes:
        raise ValueError("an oracle without a probe measures nothing: give probe=[state_retention] or others")
    rng = train.stream(config["data_seed"], "oracle", {"seed": config["seed"]})
    trace = oracle.trace(oracle.mixer(make).to(device), rng)
    where = {f"oracle.{name}": value for name, value in dataclasses.asdict(oracle).items() if name != "gates"}
    rows = [{**where, "split": "oracle", **row} for row in probing.run_trace(probes, trace, rng)]
    return rows, f"{len(rows)} rows", 0.0


def probe(run: Path, config: Config, mixer: str) -> int:
    """Puts the probes of `config` to a finished run's model; gives the number of rows.

    config: the run's configuration, with the probes, and another mixer where another policy is to be put on the same
    weights (named `mixer`): it is then scored on the test cells too. The rows go into a file of their own in the
    run's folder, where the table finds them; the same question asked again replaces its answer.
    Raises ValueError where the run has no weights, or the mixer's do not fit.
    """
    trained = results.read_config(run)
    if not (run / "checkpoint.pt").exists():
        raise ValueError(f"{run} has no checkpoint.pt: only a run that has trained a model can be probed")
    device = prepare(config["device"], config["threads"])
    task = hydra.utils.instantiate(config["task"])
    training = hydra.utils.instantiate(config["train"], _convert_="all")
    testing = hydra.utils.instantiate(config["test"], _convert_="all")
    cells = train.test_cells(task, testing.cells, train.training_cells(task, training.cells))
    probes = instantiate_probes(config)
    swapped = config["mixer"] != trained["mixer"]
    model = build(config, task, device)
    seed, rows = config["data_seed"], []
    kept = {int(path.stem): path for path in sorted((run / "weights").glob("*.pt"))}
    for step, path in [*({} if swapped else kept).items(), (None, run / "checkpoint.pt")]:
        saved = train.load(path, device)
        try:
            model.load_state_dict(saved if step is not None else saved["model"])
        except RuntimeError as error:
            kind = trained["choice"]["mixer"]
            raise ValueError(f"{mixer} cannot take the weights of {kind}: it has others") from error
        found = probe_model(probes, model, task, cells, seed, testing.probe_sequences)
        rows += [row if step is None else {**row, "step": step} for row in found]
    if swapped:
        rows += score(model, task, cells, seed, "test", testing.sequences_of, device)
    columns = results.flatten({key: config[key] for key in ("mixer", "probe", "test")}) | {"mixer": mixer}
    if swapped:
        columns["trained_as"] = trained["choice"]["mixer"]
    name = hashlib.sha256(json.dumps(columns, sort_keys=True).encode()).hexdigest()[:12]
    write_json(run / f"probe-{name}.json", {"columns": columns, "rows": rows})
    return len(rows)


def build(config: Config, task: Task, device: torch.device) -> nn.Module:
    """The model that the configuration describes, for that task."""
    mixer = hydra.utils.instantiate(config["mixer"], _convert_="all")
    model = hydra.utils.instantiate(config["model"], vocab=task.vocab, width=task.width, mixer=mixer, _convert_="all")
    return model.to(device)


def instantiate_probes(config: Config) -> list[Callable[..., list[Row]]]:
    return [hydra.utils.instantiate(chosen, _convert_="all") for chosen in (config["probe"] or {}).values()]


def cell_columns(task: Task) -> Row:
    """The task's parameters at a cell, as columns of the table."""
    return {f"task.{name}": value for name, value in dataclasses.asdict(task).items()}


def score(
    model: nn.Module,
    task: Task,
    cells: list[Cell],
    data_seed: int,
    split: str,
    sequences: Callable[[Task], int],
    device: torch.device,
) -> list[Row]:
    """The metrics of `train.evaluate`, chance, and what is carried at the end of a sequence, in every cell."""
    rows: list[Row] = []
    for cell in cells:
        at = task.at(**cell)
        scores = train.evaluate(model, task, cell, data_seed, split, sequences(at), device)
        elements, size = model.state_size(at.length)
        scores |= {"chance": at.chance, "state_elements": elements, "state_bytes": size}
        rows += [{**cell_columns(at), "split": split, "metric": name, "value": x} for name, x in scores.items()]
        log.info("%s %s: %s", split, cell, scores)
    return rows


def probe_model(
    probes: list[Callable[..., list[Row]]],
    model: nn.Module,
    task: Task,
    cells: list[Cell],
    data_seed: int,
    sequences: int,
) -> list[Row]:
    """Every probe in every cell, on a stream of its own."""
    rows: list[Row] = []
    for cell in cells if probes else []:
        at, rng = task.at(**cell), train.stream(data_seed, "probe", cell)
        found = probing.run(probes, model, at.sample(sequences, rng), rng)
        rows += [{**cell_columns(at), "split": "probe", **row} for row in found]
        log.info("probe %s: %d rows", cell, len(found))
    return rows


def prepare(device: str, threads: int) -> torch.device:
    """The torch device meant by auto, cpu, cuda or mps, with the thread count and determinism set.

    Raises ValueError where the machine has no such device.
    """
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        device = "cuda" if there["cuda"] else "mps" if there["mps"] else "cpu"
    kind = str(device).split(":")[0]
    if kind not in there:
        raise ValueError(f"device={device}: one of auto, {', '.join(there)}")
    if not there[kind]:
        raise ValueError(f"device={device}: this machine has none that torch can use; device=auto takes what there is")
    if not isinstance(threads, int) or threads < 1:
        raise ValueError(f"threads={threads}: a whole number of at least 1")
    torch.set_num_threads(threads)
    # cuBLAS reads this when it starts; without it some of its sums differ from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    return torch.device(device)


def provenance() -> dict[str, str]:
    """Where a result comes from: git revision (marked + where files differ from it) and versions."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy")}
    return {
        "git": revision(),
        "version": importlib.metadata.version("recall_lab"),
        "python": platform.python_version(),
        **versions,
    }


def revision() -> str:
    """The checkout's git revision, "" for an installed package."""
    try:
        command = ["git", "-C", str(CONF.parent), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        inside = subprocess.run(
            ["git", "-C", str(CONF.parent), "ls-files", "--error-unmatch", "conf/config.yaml"], capture_output=True
        )
        return subprocess.check_output(command, text=True).strip() if inside.returncode == 0 else ""
    except (OSError, subprocess.CalledProcessError):
        return ""


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """recall_lab's log goes to the file while the block runs."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


@contextmanager
def progress(title: str, steps: int, alone: bool) -> Iterator[Callable[[Scores], None]]:
    """A progress bar on a terminal; silent elsewhere, and beside other runs, which would write over each other."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    quiet = not (alone and console.is_terminal)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[accuracy]}"), console=console, disable=quiet) as bar:
        task = bar.add_task(title, total=steps, accuracy="")
        yield lambda point: bar.update(
            task, completed=point["step"], accuracy=f"validation accuracy {point['accuracy']:.3f}"
        )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
