"""Files are written completely or not at all, always as UTF-8; output survives a terminal with fewer characters.

Also where configuration is: conf/, and a folder of the user's own.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

CONF = next(path for path in (Path(__file__).parent / "conf", Path(__file__).parents[1] / "conf") if path.is_dir())
"""The configuration: inside the installed package, or beside it in a checkout."""

CONFIG_DIR = "RECALL_LAB_CONFIG_DIR"
"""Environment variable by which worker processes know the folder given with --config-dir."""

OWN: list[Path] = [Path(os.environ[CONFIG_DIR])] if os.environ.get(CONFIG_DIR) else []
"""The folder given with --config-dir: its options, settings, figures and learning rates are known too."""


def searched() -> list[Path]:
    """The folders of configuration, the user's own first."""
    return [*OWN, CONF]


@cache
def mixer_options() -> frozenset[str]:
    """The options that every mechanism has, those of conf/mixer_base.yaml: heads, d_key, short_conv …"""
    import yaml  # not needed by most commands

    content = yaml.safe_load((CONF / "mixer_base.yaml").read_text(encoding="utf-8"))
    return frozenset(name for name in content if not name.startswith("_"))


def use(config_dir: str | Path) -> None:
    """Makes a folder of the user's own known, in this process and in those that it starts: its configuration and its
    figures; and its modules, by putting it first on the Python path, where it is not already.

    Raises ValueError where there is no such folder, and where it has a file that the configuration or the figures of
    recall_lab have too, because only one of both could be found.
    """
    folder = Path(config_dir).absolute()
    if not folder.is_dir():
        raise ValueError(f"--config-dir {config_dir}: there is no such folder")
    package = Path(__file__).parent
    taken = [path.relative_to(CONF) for path in CONF.rglob("*.yaml")]
    taken += [path.relative_to(package) for path in package.glob("figure/*.py") if path.stem != "__init__"]
    for name in taken:
        if (folder / name).exists():
            raise ValueError(f"{folder / name}: recall_lab has a {name} of its own; give yours another name")
    OWN[:] = [folder]
    os.environ[CONFIG_DIR] = str(folder)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if str(folder) not in map(os.path.abspath, inherited):
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *inherited])


def use_none() -> None:
    """Forgets the folder given with --config-dir; its modules stay on the Python path."""
    OWN.clear()
    os.environ.pop(CONFIG_DIR, None)


def remove_half_written(*folders: Path, least: float = 0.0) -> None:
    """Removes the temporary files of `replacing` that killed processes have left in these folders.

    least  age in seconds from which a file is removed. With 0, no other process may write to the folders.
    """
    for left in (path for folder in folders for path in folder.glob(".*.[0-9]*") if path.suffix[1:].isdigit()):
        with suppress(OSError):  # somebody else has removed it
            if not least or time.time() - left.stat().st_mtime >= least:
                left.unlink()


@contextmanager
def using(config_dir: str | Path | None) -> Iterator[None]:
    """A context in which the folder is in use (see `use`; None: the one that is), as what was in use is afterwards. Its
    modules stay on the Python path."""
    before = list(OWN)
    if config_dir is not None:
        use(config_dir)
    try:
        yield
    finally:
        use_none()
        for folder in before:
            OWN.append(folder)
            os.environ[CONFIG_DIR] = str(folder)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`: moved onto `path` when the block ends, removed when the block raises.

    A reader therefore never finds half a file. Raises OSError, naming `path`, if it cannot be written (a full disk).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)  # that of pyarrow is longer
        raise type(error)(error.errno, f"cannot write {path}: {reason}") from error
    finally:
        with suppress(OSError):  # a disk that may not be written: the error above says so
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes the text as UTF-8, replacing the file in one step."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Writes plain numbers, strings, lists and dictionaries. Raises ValueError for NaN and infinity."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def whole(path: Path) -> bool:
    """Whether a file that `write_json` has written from a dictionary is complete, judged by its last two bytes."""
    try:
        with path.open("rb") as file:
            file.seek(-2, os.SEEK_END)
            return file.read() == b"}\n"
    except OSError:
        return False


def read_json(path: Path, default: Any = None) -> Any:
    """The file's content, or `default` where there is no such file. Raises ValueError, naming it, if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else default
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it to repeat the run") from error


def tolerate_terminal() -> None:
    """Replaces characters that the terminal cannot show, where they would otherwise end the program."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
