"""Loggers: what copies a run's settings, training curve and results to another tool while the run goes on.

A logger is a circumstance: no result depends on it, and none is lost if it fails.
"""

import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from recall_lab.folders import Config, Row
from recall_lab.messages import one_line

log = logging.getLogger("recall_lab")

Point = Mapping[str, float]
"""One point of a training curve, as in curve.json: step, accuracy, loss and so on."""


class Logger(ABC):
    """The log of one run. A method may raise any error: the run then goes on without this logger."""

    package: ClassVar[str] = ""
    """The module that must be installed; a logger imports it in `start`."""
    install: ClassVar[str] = ""
    """The command that installs it."""

    def check(self) -> None:
        """Raises ValueError where `package` is not installed."""
        if self.package and importlib.util.find_spec(self.package) is None:
            raise ValueError(f"{self.package} is not installed: {self.install or f'pip install {self.package}'}")

    @abstractmethod
    def start(self, config: Config, run: Path, curve: Sequence[Point]) -> None:
        """Begins the log, or goes on with it: it then holds the settings, and each point of `curve` once.

        config  the settings of the run
        run     its folder, where the logger keeps what it needs to go on after an interruption
        curve   the points made before an interruption; none for a run that begins, or begins again
        """

    @abstractmethod
    def point(self, point: Point) -> None:
        """Adds a point of the curve. After an interruption, one that was added before may come again."""

    @abstractmethod
    def table(self, rows: Sequence[Row]) -> None:
        """Adds the results, as in rows.json."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """Ends the log. finished: the run has its results; otherwise it was interrupted or has failed."""


def grid(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """The names of all columns of the rows, and the rows as lists; None where a row lacks a column."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return names, [[row.get(name) for name in names] for row in rows]


class Log:
    """The loggers of one run. One that raises an error is left out from then on, with one warning."""

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self.loggers = list(loggers)

    def each(self, call: Callable[[Logger], None]) -> None:
        """Calls `call` with every logger."""
        for logger in list(self.loggers):
            try:
                call(logger)
            except Exception as error:
                log.warning("%s: %s; the run goes on without this logger", type(logger).__name__, one_line(error))
                log.info("the logger's error", exc_info=True)
                self.loggers.remove(logger)

    def point(self, point: Point) -> None:
        """Adds a point of the curve to every log."""
        self.each(lambda logger: logger.point(point))

    def table(self, rows: Sequence[Row]) -> None:
        """Adds the results to every log."""
        self.each(lambda logger: logger.table(rows))


@contextmanager
def recording(loggers: Iterable[Logger], config: Config, run: Path, curve: Sequence[Point]) -> Iterator[Log]:
    """Starts the loggers (see `Logger.start`), and closes them when the block ends, however it ends."""
    made, finished = Log(loggers), False
    made.each(lambda logger: logger.start(config, run, curve))
    try:
        yield made
        finished = True
    finally:
        made.each(lambda logger: logger.close(finished))
