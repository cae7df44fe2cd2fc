"""Files are written completely or not at all, always as UTF-8; output survives a terminal with fewer characters."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONF = next(path for path in (Path(__file__).parent / "conf", Path(__file__).parents[1] / "conf") if path.is_dir())
"""The configuration: inside the installed package, or beside it in a checkout."""


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
        raise type(error)(error.errno, f"cannot write {path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes the text as UTF-8, replacing the file in one step."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Writes plain numbers, strings, lists and dictionaries. Raises ValueError for NaN and infinity."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def whole(path: Path) -> bool:
    """Whether a file that `write_json` has written with a dictionary is there to its end, without reading it all."""
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
