"""Every check of a task notices the fault that it is meant for, and no other check complains."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from recall_lab.checks import whole_number
from recall_lab.contract.base import examine
from recall_lab.contract.task import CHECKS
from recall_lab.task.base import IGNORE, Batch, Task
from recall_lab.task.subset_average import SubsetAverage

PLAIN = dataclass(frozen=True, kw_only=True)


@PLAIN
class Repeat(Task):
    """Random letters, then as many markers, whose targets are the letters. Factor: `source`."""

    length: int = 16
    letters: int = 8

    def __post_init__(self) -> None:
        whole_number("length", self.length, 2)

    @property
    def vocab(self) -> int:
        return self.letters + 1

    @property
    def chance(self) -> float:
        return 1 / self.letters

    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        half = self.length // 2
        tokens = np.zeros((sequences, self.length), dtype=np.int32)
        tokens[:, :half] = self.draw((sequences, half), rng)
        targets, source = np.full_like(tokens, IGNORE), np.full_like(tokens, IGNORE)
        targets[:, half : 2 * half] = tokens[:, :half]
        source[:, half : 2 * half] = np.arange(half)
        return Batch(tokens, targets, {"source": source})

    def draw(self, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
        return rng.integers(1, self.letters + 1, size=shape)

    def solve(self, tokens):
        targets = np.full_like(tokens, IGNORE)
        for row, answer in zip(tokens, targets, strict=True):
            letters = [token for token in row if token]
            answer[len(letters) : 2 * len(letters)] = letters
        return targets

    def roles(self, tokens):
        waits = np.arange(tokens.shape[1]) >= self.length // 2 * 2
        return np.where(waits, "filler", np.where(tokens == 0, "query", "letter"))


@PLAIN
class WrongSolution(Repeat):
    __doc__ = Repeat.__doc__

    def solve(self, tokens):
        return np.where(tokens == 0, np.roll(tokens, self.length // 2 - 1, axis=1), IGNORE)


@PLAIN
class ShapelessSolution(Repeat):
    __doc__ = Repeat.__doc__

    def solve(self, tokens):
        return super().solve(tokens)[:, 1:]


@PLAIN
class UsesAGlobalGenerator(Repeat):
    __doc__ = Repeat.__doc__

    def draw(self, shape, rng):
        return np.random.randint(1, self.letters + 1, size=shape)  # noqa: NPY002


@PLAIN
class IgnoresTheGenerator(Repeat):
    __doc__ = Repeat.__doc__

    def draw(self, shape, rng):
        return super().draw(shape, np.random.default_rng(0))


@PLAIN
class SmallVocabulary(Repeat):
    __doc__ = Repeat.__doc__
    vocab = 8


@PLAIN
class WideTokens(Repeat):
    __doc__ = Repeat.__doc__

    def sample(self, sequences, rng):
        batch = super().sample(sequences, rng)
        return Batch(batch.tokens.astype(np.int64), batch.targets, batch.factors)


@PLAIN
class CountsTheMarker(Repeat):
    __doc__ = Repeat.__doc__

    @property
    def chance(self):
        return 1 / self.vocab


@PLAIN
class PrefersALetter(Repeat):
    """Half of the letters are the first. Factor: `source`."""

    def draw(self, shape, rng):
        return np.where(rng.random(shape) < 0.5, 1, super().draw(shape, rng))


@PLAIN
class NamesNoQuery(Repeat):
    __doc__ = Repeat.__doc__

    def roles(self, tokens):
        return np.where(tokens == 0, "answer", "letter")


@PLAIN
class UndescribedFactor(Repeat):
    """Letters, then the same letters."""


@PLAIN
class WrongSource(Repeat):
    __doc__ = Repeat.__doc__

    def sample(self, sequences, rng):
        batch = super().sample(sequences, rng)
        return Batch(
            batch.tokens,
            batch.targets,
            {"source": np.where(batch.scored, batch.factors["source"][:, ::-1] * 0, IGNORE)},
        )


@PLAIN
class ScalesNothing(Repeat):
    __doc__ = Repeat.__doc__
    scales: ClassVar[tuple[str, ...]] = ("length", "letter")


@PLAIN
class AcceptsNoLength(Repeat):
    __doc__ = Repeat.__doc__

    def __post_init__(self):
        pass


@PLAIN
class WrongWhenLong(Repeat):
    __doc__ = Repeat.__doc__

    def solve(self, tokens):
        targets = super().solve(tokens)
        return np.where(targets == 3, 4, targets) if self.length > 16 else targets


@PLAIN
class InexactVectors(SubsetAverage):
    def solve(self, tokens):
        targets = super().solve(tokens)
        return np.where(targets == IGNORE, targets, targets + np.float32(1e-3))


FAULTS = {
    WrongSolution: ("solve equals sample", "entries differ; the first: sequence 0, position 8: solve"),
    ShapelessSolution: ("solve equals sample", "solve returns shape (64, 15), the targets have (64, 16)"),
    InexactVectors: ("solve equals sample", "entries differ by up to 1.0e-03 (allowed 1e-06)"),
    UsesAGlobalGenerator: ("seeds", "sample changes a global generator"),
    IgnoresTheGenerator: ("seeds", "two generators with different seeds give the same tokens"),
    SmallVocabulary: ("vocabulary and shapes", "tokens 0 … 8, targets 1 … 8, vocab 8"),
    WideTokens: ("vocabulary and shapes", "tokens are int64 and targets int32; both must be int32"),
    CountsTheMarker: ("chance", "8 equally frequent classes: 1/8, stated 0.1111"),
    PrefersALetter: ("chance", "always answering 1 is right for 0.5"),
    NamesNoQuery: ("queries are scored", "the first: sequence 0, position 8 is answer but scored"),
    UndescribedFactor: ("factors are declared", "the docstring of UndescribedFactor must name `source`"),
    WrongSource: ("factors are declared", "source 0 of position"),
    ScalesNothing: ("scaling", "AttributeError: 'ScalesNothing' object has no attribute 'letter'"),
    AcceptsNoLength: ("scaling", "length=0 is accepted; impossible values must raise ValueError"),
    WrongWhenLong: ("scaling", "length=32: solve equals sample: "),
}


def test_the_task_without_a_fault_passes():
    assert [finding for finding in examine(CHECKS, Repeat()) if not finding.holds] == []


@pytest.mark.parametrize("made", FAULTS, ids=lambda made: made.__name__)
def test_a_fault_fails_the_check_meant_for_it(made):
    check, detail = FAULTS[made]
    failed = {finding.check: finding.detail for finding in examine(CHECKS, made()) if finding.failed}
    assert failed.keys() == {check}, failed
    assert detail in failed[check]
    assert "\n" not in failed[check]
