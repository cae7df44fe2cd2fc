"""The Hydra app: from a composed configuration to a run's folder, and from a command line to a finished sweep.

With __main__.py the only place that knows Hydra.
"""

import dataclasses
import difflib
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hydra
from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recall_lab import results

CONF = next(path for path in (Path(__file__).parent / "conf", Path(__file__).parents[1] / "conf") if path.is_dir())
"""The configuration: inside the installed package, or beside it in a checkout."""

SWEEP = "RECALL_LAB_SWEEP"
"""Environment variable by which the runs of one command, also in other processes, know that they belong together."""

FAILED = 1e9
"""What a failed run gives a sweeper that minimises: finite, and worse than any loss."""

ERRORS = (HydraException, OmegaConfBaseException, ValueError, OSError)
"""What a person can have caused: told in one line, without a traceback."""

log = logging.getLogger("recall_lab")


class Claim(Callback):
    """Before Hydra writes anything: keys nobody reads are refused and the output folder is made ours."""

    folder: Path | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        Claim.folder = Path(config.root) / config.name
        try:
            known = set(OmegaConf.load(CONF / "config.yaml")) | {"task", "mixer"}
            if unknown := sorted(set(config) - known):
                raise ValueError(f"there is no setting {unknown[0]}{meant(unknown[0])}")
            results.claim(Claim.folder)
        except ValueError as error:
            # Hydra turns a callback's exceptions into warnings; it lets this one through.
            raise SystemExit(complain(error)) from error

    on_multirun_start = on_run_start


def identity(config: dict[str, Any]) -> str:
    """The name of a run's folder: a hash of all that its result depends on, not of where that is put."""
    content = {key: value for key, value in config.items() if key not in ("name", "root", "report", "hydra")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def execute(config: dict[str, Any]) -> float | int:
    """One run, from its resolved configuration to its finished folder; gives the validation loss.

    A finished run is left alone, one that was cut off goes on from its checkpoint, a failed one is done again.
    Whatever goes wrong is written into the folder (status.json, run.log), and FAILED is returned.
    """
    parent = Path(config["root"]) / config["name"]
    results.claim(parent)
    folder = parent / identity(config)
    folder.mkdir(exist_ok=True)
    title = f"{folder.name} {config['choice']['mixer']} on {config['choice']['task']}, seed {config['seed']}"
    try:
        with FileLock(folder / ".lock", blocking=False):
            before = results.status(folder)
            if before.get("state") == "finished":
                say(f"found     {title}")
                return before["validation_loss"]
            if before.get("state") == "failed":
                (folder / "checkpoint.pt").unlink(missing_ok=True)
            return _work(config, folder, title)
    except Timeout:
        say(f"skipped   {title}: another process is at it")
        return FAILED


def _work(config: dict[str, Any], folder: Path, title: str) -> float:
    with results.replacing(folder / "config.yaml") as temporary:
        temporary.write_text(OmegaConf.to_yaml(config))
    facts = {"started": now(), "sweep": os.environ.get(SWEEP, ""), **provenance(), "threads": config["threads"]}
    began = time.perf_counter()

    def note(state: str, **more: Any) -> None:
        seconds = round(time.perf_counter() - began, 3)
        results.write_json(folder / "status.json", {"state": state, **facts, "seconds": seconds, **more})

    note("running")
    with logging_to(folder / "run.log"):
        try:
            outcome = _train_and_test(config, folder, facts, title)
        except KeyboardInterrupt:
            note("interrupted")
            log.warning("interrupted")
            raise
        except Exception as error:
            log.exception("failed")
            note("failed", error=one_line(error))
            if sweeping():
                say(f"failed    {title}")
            return FAILED
        note("finished", validation_loss=outcome["loss"])
        log.info("finished")
    say(f"finished  {title}: validation accuracy {outcome['accuracy']:.3f}, {time.perf_counter() - began:.0f} s")
    return outcome["loss"]


def _train_and_test(config: dict[str, Any], folder: Path, facts: dict[str, Any], title: str) -> dict[str, float | int]:
    import torch

    from recall_lab import train

    device = prepare(config["device"], config["threads"])
    facts["device"] = str(device)
    task = hydra.utils.instantiate(config["task"])
    training = hydra.utils.instantiate(config["train"], _convert_="all")
    testing = hydra.utils.instantiate(config["test"], _convert_="all")
    trained = train.training_cells(task, training.cells)
    tested = train.test_cells(task, testing.cells, trained)
    torch.manual_seed(config["seed"])
    mixer = hydra.utils.instantiate(config["mixer"])
    model = hydra.utils.instantiate(
        config["model"], vocab=task.vocab, width=task.width, mixer=mixer, _convert_="all"
    ).to(device)
    log.info("%s on %s: %d parameters", title, device, sum(p.numel() for p in model.parameters()))
    curve_path = folder / "curve.json"

    with progress(title, training.steps) as advance:

        def report(point: dict[str, float | int]) -> None:
            log.info("step %d: accuracy %.4f, loss %.4f", point["step"], point["accuracy"], point["loss"])
            advance(point)

        curve = train.train(model, task, training, config["data_seed"], device, folder / "checkpoint.pt", report)
    results.write_json(curve_path, curve)

    rows: list[results.Row] = []
    for split, cells, least in (
        ("validation", trained, training.validation_sequences),
        ("test", tested, testing.sequences),
    ):
        for cell in cells:
            at = task.at(**cell)
            sequences = max(least, testing.tokens // at.length) if split == "test" else least
            scores = train.evaluate(model, task, cell, config["data_seed"], split, sequences, device)
            elements, size = model.state_size(at.length)
            scores |= {"chance": at.chance, "state_elements": elements, "state_bytes": size}
            where = {f"task.{name}": value for name, value in dataclasses.asdict(at).items()}
            rows += [{**where, "split": split, "metric": name, "value": value} for name, value in scores.items()]
            log.info("%s %s: %s", split, cell, scores)
    results.write_json(folder / "rows.json", rows)
    return curve[-1]


def prepare(device: str, threads: int) -> Any:
    """The torch device meant by auto, cpu, cuda or mps, with the thread count and determinism set.

    Raises ValueError where the machine has no such device.
    """
    import torch

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
def progress(title: str, steps: int) -> Iterator[Any]:
    """A progress bar on a terminal; silent elsewhere, and in a sweep, whose runs would write over each other."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    quiet = not console.is_terminal or sweeping()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[accuracy]}"), console=console, disable=quiet) as bar:
        task = bar.add_task(title, total=steps, accuracy="")
        yield lambda point: bar.update(
            task, completed=point["step"], accuracy=f"validation accuracy {point['accuracy']:.3f}"
        )


def sweeping() -> bool:
    """Whether this run is one of several of a Hydra sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def say(line: str) -> None:
    """One line for the person at the terminal, whole even when several processes speak."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def complain(error: BaseException) -> int:
    """One line on stderr; gives the exit status."""
    sys.stderr.write(f"recall-lab: {one_line(error)}\n")
    return 2


def one_line(error: BaseException) -> str:
    """The error in one readable line, with the key that was meant where one was misspelt."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    text = "\n".join(map(str, chain))
    if missing := re.search(r"Key '.+?' is not in struct\s+full_key: (\S+)", text):
        return f"there is no setting {missing[1]}{meant(missing[1])}"
    if missing := re.search(r"Could not override '(.+?)'", text):
        return f"there is no setting {missing[1]}{meant(missing[1])}"
    if missing := re.search(r"Could not find '(.+?)'", text):
        group, _, option = missing[1].rpartition("/")
        options = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
        return f"there is no {group or 'config'} {option!r}; there are {', '.join(options)}"
    # Hydra wraps what a constructor raised: the innermost error is the one that says what is wrong.
    return " ".join(str(chain[-1] if isinstance(error, InstantiationException) else error).split())


def meant(word: str) -> str:
    """The setting that a misspelt one comes closest to, as a question; nothing where none is near."""
    known: list[str] = []

    def walk(config: dict[str, Any], prefix: str) -> None:
        for key, value in config.items():
            known.append(f"{prefix}{key}")
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")

    for path in CONF.rglob("*.yaml"):
        # conf/GROUP/NAME.yaml lands under GROUP; so does conf/GROUP_base.yaml, which the options of GROUP take in.
        group = path.parent.name if path.parent != CONF else path.stem.partition("_base")[0]
        walk(OmegaConf.to_container(OmegaConf.load(path)), "" if group in ("config", "experiment") else f"{group}.")
        known.append(group)
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def compose(overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """The configuration as `recall-lab run` would compose it, for the verbs that run nothing."""
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ValueError(f"--config-dir {config_dir}: no such folder")
        overrides = [*overrides, f"hydra.searchpath=[file://{Path(config_dir).absolute()}]"]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", overrides)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def app(config: DictConfig) -> float:
    resolved = OmegaConf.to_container(config, resolve=True)
    choices = HydraConfig.get().runtime.choices
    resolved["choice"] = {"task": choices["task"], "mixer": choices["mixer"]}
    return execute(resolved)


def main(arguments: list[str]) -> int:
    """`recall-lab run …`: the exit status, 0 only if every run of this command is finished."""
    sweep = os.environ[SWEEP] = secrets.token_hex(8)
    patient = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that errors come here instead of being printed by Hydra
    sys.argv = ["recall-lab run", *arguments]
    code = 0
    try:
        app()
    except KeyboardInterrupt:
        sys.stderr.write("recall-lab: interrupted; the same command goes on from here\n")
        code = 130
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except ERRORS as error:
        if patient:
            raise
        code = complain(error)
    if code or Claim.folder is None:
        return code
    return finish(Claim.folder, sweep)


def finish(folder: Path, sweep: str) -> int:
    """The report where one is wanted and possible, then the failures of this command, each in a line."""
    from recall_lab import report

    runs = results.runs(folder)
    finished = [run for run in runs if results.status(run)["state"] == "finished"]
    if finished and results.read_config(runs[-1])["report"]:
        say(report.make(folder))
    failed = [run for run in runs if _failed(results.status(run), sweep)]
    for run in failed:
        status = results.status(run)
        sys.stderr.write(f"recall-lab: {run} {status['state']}: {status.get('error', 'cut off')}\n")
    return 1 if failed else 0


def _failed(status: dict[str, Any], sweep: str) -> bool:
    return status["sweep"] == sweep and status["state"] != "finished"
