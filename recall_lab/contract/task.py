"""The contract of a task. Its tests and `recall-lab check` use the same functions.

A check takes a task and samples what it needs; the checks in BATCH also accept a given batch.
"""

import itertools
import random

import numpy as np

from recall_lab.contract.base import BrokenError, Finding, examine
from recall_lab.task.base import IGNORE, Batch, Task

TOLERANCE = 1e-6
"""Largest absolute error of the targets of a continuous task."""

SEQUENCES = 64
"""Sequences of a batch that is checked."""

FACTORS = (0.125, 0.25, 0.5, 1, 2, 4)
"""Sizes that a task is scaled to: those of the default training and test cells."""


def draw(task: Task, sequences: int = SEQUENCES, seed: int = 0) -> Batch:
    """A batch that depends on nothing but the task, the number of sequences and the seed."""
    return task.sample(sequences, np.random.default_rng(seed))


def solve_equals_sample(task: Task, batch: Batch | None = None) -> Finding:
    """`solve` gives the targets of `sample`: the same classes, or for a continuous task the same vectors."""
    batch = draw(task) if batch is None else batch
    solved = task.solve(batch.tokens)
    if solved.shape != batch.targets.shape:
        raise BrokenError(f"solve returns shape {solved.shape}, the targets have {batch.targets.shape}")
    if task.continuous:
        difference = np.abs(solved - batch.targets)
        wrong = ~(difference <= TOLERANCE)
        size = f" by up to {np.nanmax(difference):.1e} (allowed {TOLERANCE:.0e})"
    else:
        wrong, size = solved != batch.targets, ""
    if not wrong.any():
        return Finding(True, f"{batch.scored.sum():,} targets in {len(solved)} sequences agree")
    index = tuple(np.argwhere(wrong)[0])
    first = f"sequence {index[0]}, position {index[1]}: solve {solved[index]}, sample {batch.targets[index]}"
    return Finding(False, f"{wrong.sum():,} of {wrong.size:,} entries differ{size}; the first: {first}")


def vocabulary_and_shapes(task: Task, batch: Batch | None = None) -> Finding:
    """Tokens and targets have the stated shapes, types and ranges, and every sequence has a scored position."""
    batch = draw(task) if batch is None else batch
    tokens, targets = batch.tokens, batch.targets
    if tokens.shape[1] != task.length or targets.shape[:2] != tokens.shape[:2]:
        raise BrokenError(f"tokens have shape {tokens.shape} and targets {targets.shape}, but length is {task.length}")
    idle = int((~batch.scored.any(axis=1)).sum())
    if idle:
        raise BrokenError(f"{idle} of {len(tokens)} sequences have no scored position")
    kind = np.dtype(np.float32 if task.continuous else np.int32)
    if tokens.dtype != kind or targets.dtype != kind:
        raise BrokenError(f"tokens are {tokens.dtype} and targets {targets.dtype}; both must be {kind}")
    if task.continuous:
        return _channels(task, batch)
    scored = targets[batch.scored]
    ranges = f"tokens {tokens.min()} … {tokens.max()}, targets {scored.min()} … {scored.max()}, vocab {task.vocab}"
    ids = np.concatenate([tokens.ravel(), scored])
    return Finding(bool((ids >= 0).all() and (ids < task.vocab).all()), ranges)


def _channels(task: Task, batch: Batch) -> Finding:
    """Tokens and targets of a continuous task have the stated number of channels and are finite."""
    stated, found = (task.width, task.vocab), (batch.tokens.shape[2:], batch.targets.shape[2:])
    if found != ((stated[0],), (stated[1],)):
        raise BrokenError(f"tokens and targets have channels {found}, but width and vocab are {stated}")
    if not (batch.targets[~batch.scored] == IGNORE).all():
        raise BrokenError("a position whose first channel is IGNORE has targets in other channels")
    finite = bool(np.isfinite(batch.tokens).all() and np.isfinite(batch.targets).all())
    return Finding(
        finite, f"{stated[0]} channels per token, {stated[1]} per target, " + ("finite" if finite else "not finite")
    )


def queries_are_scored(task: Task, batch: Batch | None = None) -> Finding:
    """The scored positions are those with a token whose role is "query"."""
    batch = draw(task) if batch is None else batch
    named = task.roles(batch.tokens)
    shape = batch.tokens.shape[:2] if task.continuous else batch.tokens.shape
    if named.shape != shape:
        raise BrokenError(f"roles have shape {named.shape} instead of {shape}")
    queries = (named == "query").reshape(*batch.scored.shape, -1).any(axis=2)
    wrong = queries != batch.scored
    if not wrong.any():
        return Finding(True, f"{queries.sum():,} queries are the scored positions")
    i, t = np.argwhere(wrong)[0]
    role, scored = named[i, t], "scored" if batch.scored[i, t] else "not scored"
    return Finding(False, f"{wrong.sum():,} positions; the first: sequence {i}, position {t} is {role} but {scored}")


def factors_are_declared(task: Task, batch: Batch | None = None) -> Finding:
    """Every factor is an integer per position, IGNORE where nothing is scored, and named as `NAME` in the docstring.

    `source` is an earlier position that holds the answer.
    """
    batch = draw(task) if batch is None else batch
    for name, factor in batch.factors.items():
        if factor.shape != batch.scored.shape or factor.dtype.kind != "i":
            raise BrokenError(f"{name} is {factor.dtype} of shape {factor.shape}; it must be b t integers")
        if not (factor[~batch.scored] == IGNORE).all():
            raise BrokenError(f"{name} has a value at a position that is not scored; it must be {IGNORE} there")
        if f"`{name}`" not in (type(task).__doc__ or ""):
            raise BrokenError(f"{name} is not described: the docstring of {type(task).__name__} must name `{name}`")
    if "source" in batch.factors:
        _check_source(task, batch)
    return Finding(True, ", ".join(batch.factors) or "none")


def _check_source(task: Task, batch: Batch) -> None:
    row, position = batch.scored.nonzero()
    source = batch.factors["source"][batch.scored]
    late = (source < 0) | (source >= position)
    if late.any():
        i = int(late.argmax())
        raise BrokenError(f"source {source[i]} of position {position[i]} in sequence {row[i]} is no earlier position")
    if task.continuous:
        return
    answer = batch.tokens[row, source].reshape(source.size, -1)
    wrong = ~(answer == batch.targets[batch.scored][:, None]).any(axis=1)
    if wrong.any():
        i = int(wrong.argmax())
        held, target = answer[i].tolist(), batch.targets[batch.scored][i]
        raise BrokenError(
            f"source {source[i]} of position {position[i]} in sequence {row[i]} holds {held}, the target is {target}"
        )


BATCH = (solve_equals_sample, vocabulary_and_shapes, queries_are_scored, factors_are_declared)
"""The checks of a batch, which they sample if none is given."""


def seeds(task: Task) -> Finding:
    """Equal seeds give equal batches, different seeds different ones, and no global generator is used."""
    before = _global_generators()
    first, again, other = (draw(task, 32, seed) for seed in (1, 1, 2))
    if _global_generators() != before:
        raise BrokenError("sample changes a global generator; every random number must come from rng")
    if _bytes(first) != _bytes(again):
        raise BrokenError("two generators with the same seed give different batches")
    if first.tokens.tobytes() == other.tokens.tobytes():
        raise BrokenError("two generators with different seeds give the same tokens")
    return Finding(True, "32 sequences: equal for the same seed, different for another")


def chance(task: Task) -> Finding:
    """`chance` is what the best constant answer achieves: the most frequent class, or the mean target.

    Of equally frequent classes it is 1 / their number. Otherwise the answer is chosen on one batch and scored on
    another; allowed are five standard errors, sequences being clusters.
    """
    first, second = draw(task, 2000, seed=1), draw(task, 2000, seed=2)
    stated, chosen = task.chance, first.targets[first.scored]
    if task.continuous:
        truth = second.targets[second.scored]
        error = float(((truth - chosen.mean(axis=0)) ** 2).sum() / ((truth - truth.mean(axis=0)) ** 2).sum())
        return Finding(
            bool(abs(error - stated) < 0.05), f"normalised error of the mean target {error:.3f}, stated {stated:g}"
        )
    classes, counts = np.unique(chosen, return_counts=True)
    expected = counts.mean()
    excess = float(((counts - expected) ** 2).sum() / expected) - (counts.size - 1)
    if counts.size > 1 and expected > 5 and excess < 5 * (2 * (counts.size - 1)) ** 0.5:  # as in a chi-square test
        holds = bool(abs(stated * counts.size - 1) < 1e-6)
        return Finding(holds, f"{counts.size} equally frequent classes: 1/{counts.size}, stated {stated:.4g}")
    best = classes[counts.argmax()]
    right = ((second.targets == best) & second.scored).sum(axis=1) / second.scored.sum(axis=1).mean()
    accuracy, allowed = float(right.mean()), 5 * max(float(right.std()), stated) / len(right) ** 0.5
    measured = f"always answering {best} is right for {accuracy:.4f} of the scored positions"
    return Finding(bool(abs(accuracy - stated) <= allowed), f"{measured}, stated {stated:.4f} (± {allowed:.4f})")


def scaling(task: Task) -> Finding:
    """`at` and `scales` give the task at other sizes, where a batch passes all checks that it passes at this size.

    Length 0 is refused.
    """
    try:
        task.at(length=0)
    except ValueError:
        pass
    else:
        raise BrokenError("length=0 is accepted; impossible values must raise ValueError")
    unchanged = {name: getattr(task, name) for name in task.scales}
    if task.at(**unchanged) != task:
        raise BrokenError(f"at({_words(unchanged)}) differs from the task with these values")
    cells = task.scaled(FACTORS)
    sound = [finding.holds for finding in examine(BATCH, task)]
    for cell in cells.cells:
        scaled = task.at(**cell)
        batch = draw(scaled, 8)
        for finding in examine(itertools.compress(BATCH, sound), scaled, batch):
            if finding.failed:
                return Finding(False, f"{_words(cell)}: {finding.check}: {finding.detail}")
    described = "; ".join(_words(cell) for cell in cells.cells)
    refused = f"; sizes refused: {len(cells.impossible)}" if cells.impossible else ""
    return Finding(True, f"holds at {described}{refused}")


CHECKS = (*BATCH, seeds, chance, scaling)
"""All checks of a task."""


def _bytes(batch: Batch) -> list[bytes]:
    arrays = [batch.tokens, batch.targets, *(batch.factors[name] for name in sorted(batch.factors))]
    return [array.tobytes() for array in arrays]


def _global_generators() -> tuple[str, str]:
    return repr(np.random.get_state()), repr(random.getstate())  # noqa: NPY002


def _words(cell: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in cell.items())
