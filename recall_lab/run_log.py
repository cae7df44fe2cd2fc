"""The log of a run, run.log in its folder, and the warnings in it."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("recall_lab")


class Warnings(logging.Handler):
    """Collects the messages of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class RunLog(logging.FileHandler):
    """The handler of a run.log. On a full disk it loses lines: the run ends where it would lose results."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Prints an error as logging does, unless the file cannot be written."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):
            super().close()


@contextmanager
def logging_to(path: Path) -> Iterator[list[str]]:
    """While the block runs, recall_lab's log is written to the file. Yields a list that collects its warnings."""
    file, warnings = RunLog(path, encoding="utf-8"), Warnings()
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for handler in (file, warnings):
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield warnings.messages
    finally:
        for handler in (file, warnings):
            log.removeHandler(handler)
        file.close()
