"""The folders that runs are written to, and the files in them.

outputs/NAME/            a sweep: any number of runs, and what `recall-lab report` makes of them
  commands.json          the commands that were given for it, and the descriptions of their experiments
  RUN/                   one run, named by a hash of what determines its result
    config.yaml          the settings that the run used, resolved
    status.json          format, state, times, error, versions, device, threads
    rows.json            the results: one row per metric and cell
    probe-….json         rows of probes that were run later
    curve.json           one point per validation
    run.log, checkpoint.pt, weights/
"""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from recall_lab.files import read_json, write_json, write_text

FORMAT = 2
"""Version of the layout above. A run of another version is refused."""

SELECT = "select.json"
"""In a sweep's folder: the settings that its report selects on validation."""

COMMANDS = "commands.json"
"""In a sweep's folder: the commands that were given for it."""

MARK = ".recall_lab"
"""The file that marks a folder as a sweep's folder of recall_lab."""

IGNORED = {".DS_Store", "Thumbs.db", "desktop.ini", ".gitkeep", ".gitignore"}
"""Files that operating systems and git leave in folders."""

HAS_ROWS = ("finished", "incomplete")
"""States in which a run has results: all of them, or all but those of the probes that failed."""

Config = dict[str, Any]
"""Resolved settings: nested plain values."""

Row = dict[str, Any]
"""One metric in one cell of one run: metric, value, split, and the cell's columns (`task.length` …)."""

REPLICATES = ("seed", "data_seed")
"""Settings that make another run of the same condition."""

CIRCUMSTANCES = ("name", "root", "report", "size", "select", "logger", "device", "threads", "deterministic",
                 "choice.task", "choice.mixer", "train.keep")  # fmt: skip
"""Settings that no result depends on. `size` only chooses other settings, and `choice` only names them."""

BUSY_AFTER = 0.5
"""Seconds to wait for a run's lock. A process that only looks at the run holds it for less."""


class Busy(Exception):
    """Another process works on the run."""


class ForeignFolder(ValueError):
    """A folder that recall_lab may not write to, or that holds nothing it can read."""


def claim(folder: Path, select: Sequence[str] | None = None) -> None:
    """Creates the sweep's folder, or checks that it is one.

    select  the settings that the report is to select on validation; None: those of an earlier command

    Raises ForeignFolder where it holds files of other programs or runs of another format, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = {path.name for path in folder.iterdir()}
        if MARK not in present:
            if present - IGNORED:
                raise ForeignFolder(f"{folder} holds other files; choose another name=…, or an empty folder")
            (folder / MARK).touch()
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ForeignFolder(f"cannot write to {folder}: {error.strerror or error}") from error
    runs(folder)
    if select is not None:
        write_json(folder / SELECT, list(select))


def add_command(folder: Path, command: str, description: str = "") -> None:
    """Adds a command to those of the sweep's folder. If it is there already, its description is replaced."""
    lock = FileLock(folder / ".lock", timeout=60)  # another command may add itself at the same time
    with contextlib.suppress(OSError, NotImplementedError):  # a file system without locks
        lock.acquire()
    try:
        others = [other for other in commands(folder) if other["command"] != command]
        write_json(folder / COMMANDS, [*others, {"command": command, "description": description}])
    finally:
        lock.release()


def commands(folder: Path) -> list[dict[str, str]]:
    """The commands that were given for the sweep, the latest last: `command`, and the `description` of its experiment
    or "". Raises ValueError, naming the file, if it is damaged."""
    found = read_json(folder / COMMANDS, [])
    if not (
        isinstance(found, list) and all(isinstance(x, dict) and {"command", "description"} <= set(x) for x in found)
    ):
        raise ValueError(f"{folder / COMMANDS} is damaged; delete it")
    return found


@dataclass(frozen=True, eq=False)
class Run:
    """A run's folder and its status. The settings are read when they are first used."""

    path: Path
    status: dict[str, Any]

    @cached_property
    def config(self) -> Config:
        """The settings that the run used. Raises ValueError, naming the file, if it is damaged."""
        return read_config(self.path)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.name

    @property
    def has_rows(self) -> bool:
        """Whether the run has results (see HAS_ROWS)."""
        return self.status["state"] in HAS_ROWS

    def describe(self) -> str:
        """The run in words: its name, mixer, task and seed; its name alone where the settings cannot be read."""
        try:
            return title(self.name, self.config)
        except (ValueError, OSError):
            return self.name


def runs(folder: Path) -> list[Run]:
    """The runs of a sweep, in the order in which they were started.

    Raises ForeignFolder where this is not a sweep's folder, or holds a run of another format.
    """
    if not (folder / MARK).exists():
        raise ForeignFolder(f"{folder} was not written by recall-lab run")
    found = [Run(path.parent, status(path.parent)) for path in folder.glob("*/status.json")]
    for run in found:
        if run.status["format"] != FORMAT:
            raise ForeignFolder(
                f"{run.path} has format {run.status['format']}, this version of recall_lab reads format {FORMAT} only; "
                "choose another name=…, or delete that run"
            )
    return sorted(found, key=lambda run: (run.status["started"], run.name))


def merged(sweeps: Sequence[Path]) -> list[Run]:
    """The runs of several sweeps, in the order in which they were started. Of a run that has no results in one of them,
    and is in another as well, the one with results is taken, or else the latest.

    Raises ForeignFolder where one is not a sweep's folder, or has no run.
    """
    found: list[Run] = []
    for sweep in sweeps:
        own = runs(sweep)
        if not own and len(sweeps) > 1:
            raise ForeignFolder(f"{sweep} has no runs")
        found += own
    found.sort(key=lambda run: (run.status["started"], run.name))
    best = {run.name: run for run in sorted(found, key=lambda run: run.has_rows)}
    return [run for run in found if run.has_rows or run is best[run.name]]


def status(run: Path) -> dict[str, Any]:
    """The content of status.json. Its `state` is one of

    running      in progress, or its process was killed (kill −9)
    interrupted  stopped by Ctrl-C or SIGTERM; the same command resumes it
    finished     all rows are written
    incomplete   trained and tested, but a probe failed: its rows are missing
    failed       ended by an error; the same command starts it again
    died         one command's processes for it were killed sweep.ATTEMPTS times
    lost         finished, but its files are missing
    damaged      status.json cannot be read; `error` says why; the same command resumes or repeats the run
    """
    unknown = {"format": 1, "state": "lost", "started": "", "sweep": "", "seconds": 0.0}
    try:
        facts = unknown | read_json(run / "status.json", {})
    except (ValueError, TypeError) as error:
        return unknown | {"format": FORMAT, "state": "damaged", "error": str(error)}
    if facts["state"] in HAS_ROWS and not all((run / name).exists() for name in ("config.yaml", "rows.json")):
        facts["state"] = "lost"
    return facts


@contextmanager
def locked(run: Path, patience: float = BUSY_AFTER) -> Iterator[None]:
    """Holds the lock of the run's folder. Raises Busy if another process holds it for longer than `patience` seconds,
    OSError if it cannot be locked."""
    path = run / ".lock"
    try:
        lock = FileLock(path, timeout=patience)
        lock.acquire()
    except Timeout as error:
        raise Busy from error
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OSError(getattr(error, "errno", None) or 0, f"cannot lock {path}: {reason}") from error
    try:
        yield
    finally:
        lock.release()


def busy(run: Path) -> bool:
    """Whether a process works on the run; True where its lock cannot be opened, in a folder that may not be written."""
    if not (run / ".lock").exists():
        return False
    try:
        with locked(run, patience=0):
            return False
    except (Busy, OSError):
        return True


def read_config(run: Path) -> Config:
    """The settings that a run used. Raises ValueError, naming the file, if it is damaged."""
    path = run / "config.yaml"
    damaged = ValueError(f"{path} is damaged; delete it to repeat the run")
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise damaged from error
    named = config.get("choice") if isinstance(config, dict) else None
    if not (isinstance(named, dict) and {"task", "mixer"} <= set(named)):  # a file cut short can still be yaml
        raise damaged
    return config


def write_config(run: Path, config: Config) -> None:
    """Writes the settings that a run uses."""
    write_text(run / "config.yaml", yaml.safe_dump(config, allow_unicode=True, sort_keys=False))


def identity(config: Config) -> str:
    """The name of a run's folder: a hash of every setting that determines its result, bit for bit.

    The device, the number of threads and determinism are among them, since sums are rounded differently. The output
    folder, the names of the chosen options and the settings of a later selection are left out.
    """
    irrelevant = set(CIRCUMSTANCES) - {"device", "threads", "deterministic", "train.keep"} | {"choice"}
    content = {key: value for key, value in config.items() if key not in irrelevant}
    return hashlib.sha256(json.dumps(_canonical(content), sort_keys=True).encode()).hexdigest()[:12]


def _canonical(x: Any) -> Any:
    """The same values with 1.0 written as 1."""
    if isinstance(x, dict):
        return {key: _canonical(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_canonical(value) for value in x]
    return int(x) if isinstance(x, float) and x.is_integer() else x


def title(name: str, config: Config) -> str:
    """A run in words, from its name and settings."""
    return f"{name} {config['choice']['mixer']} on {config['choice']['task']}, seed {config['seed']}"


def flatten(config: Config, prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots. Lists become JSON."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
    return flat


def without(flat: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The entries that are not among the names."""
    names = set(names)
    return {key: value for key, value in flat.items() if key not in names}
