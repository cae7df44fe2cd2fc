"""Which cells of a task's grid a model is trained and tested on, and how their batches are drawn.

A batch depends on (data seed, split, cell, batch number) alone. It is therefore the same for every mixer and after a
restart, and two splits never share a random stream.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from recall_lab.checks import require
from recall_lab.task.base import Batch, Task

Cell = dict[str, Any]
"""A point of a task's grid: the parameters in which it differs from the task."""

Grid = list[Cell] | dict[str, list[Any]]
"""A list of cells; or parameter → its values, which stands for every combination of them."""

Arrays = tuple[Shaped[Tensor, "b t *c"], Int[Tensor, "p"], Shaped[Tensor, "p *w"]]
"""Tokens, scored positions as indices into the b·t positions, and the targets of these positions."""

log = logging.getLogger("recall_lab")


def stream(seed: int, split: str, cell: Cell, number: int = 0) -> np.random.Generator:
    """The generator that draws batch `number` of a cell. Different arguments give independent generators."""
    digest = hashlib.sha256(repr((split, sorted(cell.items()))).encode()).digest()
    return np.random.default_rng([seed, number, *np.frombuffer(digest, dtype=np.uint32)])


def training_cells(task: Task, cells: Grid | None, warn: bool = True) -> list[Cell]:
    """The cells that training goes through in turn: those given, or the task at 1/8, 1/4, 1/2 and 1 times its size.

    Of the derived cells, those that are impossible for the task are left out; unless `warn` is False, a warning in the
    log gives the reason.
    """
    return _derived(task, (1 / 8, 1 / 4, 1 / 2, 1), warn) if cells is None else _listed(task, cells)


def test_cells(task: Task, cells: Grid | None, trained: list[Cell]) -> list[Cell]:
    """The cells that are tested: those given, or the training cells and the task at 2 and 4 times its size.

    Of the derived cells, those that are impossible for the task are left out; a warning in the log gives the reason.
    """
    if cells is not None:
        return _listed(task, cells)
    return trained + [cell for cell in _derived(task, (2, 4)) if cell not in trained]


def _derived(task: Task, factors: tuple[float | int, ...], warn: bool = True) -> list[Cell]:
    """The task's cells at these factors that are possible; a warning names each impossible one."""
    scaled = task.scaled(factors)
    for reason in scaled.impossible if warn else ():
        log.warning("a cell of the derived grid is left out: %s", reason)
    return scaled.cells


def arrays(batch: Batch, pinned: bool = False) -> Arrays:
    """A batch as tensors on the CPU; pinned: in memory from which a CUDA device copies while the host goes on."""
    targets = batch.targets[batch.scored]
    if targets.dtype.kind == "i":
        targets = targets.astype(np.int64)
    tensors = [torch.from_numpy(x) for x in (batch.tokens, np.flatnonzero(batch.scored), targets)]
    tokens, scored, targets = [x.pin_memory() for x in tensors] if pinned else tensors
    return tokens, scored, targets


def to_device(batch: Arrays, device: torch.device) -> Arrays:
    """The tensors of a batch on the device; from pinned memory, without waiting for it."""
    tokens, scored, targets = (x.to(device, non_blocking=True) for x in batch)
    return tokens, scored, targets


T = TypeVar("T")


def ahead(draw: Callable[[int], T], steps: Iterable[int], depth: int) -> Generator[T]:
    """draw(step) for each step in turn, the next `depth` of them prepared meanwhile in one background thread.

    An exception of `draw` is raised where its result would be yielded. Closing the generator ends the thread.
    """
    if depth == 0:
        yield from map(draw, steps)
        return
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(1) as thread:
        try:
            for step in steps:
                waiting.append(thread.submit(draw, step))
                if len(waiting) > depth:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)


def _listed(task: Task, cells: Grid) -> list[Cell]:
    """The grid as a list of cells. Raises ValueError, naming the cell, where one is impossible for the task."""
    if isinstance(cells, dict):
        for name, values in cells.items():
            listed = isinstance(values, list) and len(values) > 0
            require(listed, f"cells.{name}={values!r}: must be a list of values, of which every combination is a cell")
        cells = [dict(zip(cells, values, strict=True)) for values in product(*cells.values())]
    listed = isinstance(cells, list) and len(cells) > 0
    require(listed, f"cells={cells!r}: must hold at least one cell, or be null for the cells derived from the task")
    for number, cell in enumerate(cells):
        new = isinstance(cell, dict) and cell not in cells[:number]
        require(new, f"cells: {cell!r}: must map parameters to values, as {{length: 64}} does, and occur once")
        try:
            task.at(**cell)
        except ValueError as error:
            raise ValueError(f"cells: {cell}: {error}") from error
    return cells
