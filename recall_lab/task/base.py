"""What a task is: a definition (`solve`), a sampler (`sample`) written independently of it, and its grid."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Int, Shaped

from recall_lab.checks import require

IGNORE = -100
"""Stands in `targets` and `factors` wherever nothing is scored (the value torch's losses ignore by default)."""


@dataclass(frozen=True)
class Batch:
    """Sequences and what is asked of them.

    tokens   b t (or b t c: c channels a place, embedded and added); of a continuous task float32, b t width
    targets  b t: the class that the logits *of that same place* should predict, IGNORE elsewhere; of a continuous
             task float32, b t vocab: the vector that the read-out of that place should equal, all IGNORE elsewhere
    factors  name → b t: what a plot may split by, at the scored places; IGNORE elsewhere.
             `source` is the place in the sequence that holds the answer, wherever there is a single one.

    Raises ValueError where nothing is scored: a loss over nothing would be NaN.
    """

    tokens: Shaped[np.ndarray, "b t *c"]
    targets: Shaped[np.ndarray, "b t *w"]
    factors: dict[str, Int[np.ndarray, "b t"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        b, t = self.tokens.shape[:2]
        require(bool(self.scored.any()), f"nothing to score in {b} sequences of {t} places; targets hold IGNORE only")

    @property
    def scored(self) -> Bool[np.ndarray, "b t"]:
        """True where a target stands."""
        return (self.targets if self.targets.ndim == 2 else self.targets[..., 0]) != IGNORE

    @property
    def age(self) -> Int[np.ndarray, "b t"]:
        """How many places ago the answer stood, at the scored places; IGNORE elsewhere.

        Raises KeyError for a task without a single source.
        """
        source = self.factors["source"]
        return np.where(source == IGNORE, IGNORE, np.arange(source.shape[1], dtype=np.int32) - source)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """The parameters of a synthetic task; immutable, so that `at` can name a whole grid of them.

    A subclass checks its sizes in `__post_init__` and raises ValueError with the numbers and the limit.
    """

    length: int
    """n: places of a sequence."""

    scales: ClassVar[tuple[str, ...]] = ("length",)
    """The fields that shrink and grow together when a training mixture or a test grid is derived."""

    @property
    @abstractmethod
    def vocab(self) -> int:
        """Width of the read-out: the token ids, which are its classes; of a continuous task a target's channels."""

    @property
    def width(self) -> int:
        """Channels of a token that is a vector; 0 where tokens are ids."""
        return 0

    @property
    def continuous(self) -> bool:
        """Whether tokens and targets are vectors, scored by their error."""
        return self.width > 0

    @property
    @abstractmethod
    def chance(self) -> float:
        """Accuracy per scored token of a guess that uses nothing of the sequence; of a continuous task its
        normalised error Σ‖y − target‖² / Σ‖target − mean‖², which is 1."""

    @abstractmethod
    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        """Draws that many independent sequences, from `rng` alone."""

    @abstractmethod
    def solve(self, tokens: Shaped[np.ndarray, "b t *c"]) -> Shaped[np.ndarray, "b t *w"]:
        """The targets, read off the tokens by the task's definition and sharing no code with `sample`."""

    @abstractmethod
    def roles(self, tokens: Shaped[np.ndarray, "b t *c"]) -> Shaped[np.ndarray, "b t *c"]:
        """The role of each token in words ("key", "value", "query", "filler" …), for people to read; of a
        continuous task the role of each place (b t)."""

    def at(self, **cell: Any) -> "Task":
        """The same task at another point of its grid.

        Raises ValueError where the task has no such parameter, or the sizes are impossible.
        """
        known = [f.name for f in fields(self)]
        for name in cell:
            if name not in known:
                raise ValueError(f"{type(self).__name__} has no parameter {name!r}; it has {', '.join(known)}")
        return replace(self, **cell)

    def scaled(
        self,
        factors: tuple[float | int, ...],
        left_out: Callable[[dict[str, int], ValueError], None] = lambda cell, error: None,
    ) -> Iterator[dict[str, int]]:
        """The cells at which every field of `scales` is multiplied by a factor.

        Impossible sizes are left out; `left_out` is called with each such cell and the reason.
        """
        for factor in factors:
            sizes = {name: getattr(self, name) for name in self.scales}
            cell = {name: max(min(1, size), int(size * factor)) for name, size in sizes.items()}
            try:
                self.at(**cell)
            except ValueError as error:
                left_out(cell, error)
                continue
            yield cell


def whole(task: Task, **least: int) -> None:
    """Raises ValueError unless each named field is a whole number no smaller than given; None passes where it is the
    field's default."""
    for f in fields(task):
        value, limit = getattr(task, f.name), least.get(f.name)
        if limit is None or (value is None and f.default is None):
            continue
        fits = isinstance(value, Integral) and not isinstance(value, bool) and value >= limit
        require(fits, f"{f.name}={value!r}: a whole number of at least {limit}")


def unscored(sequences: int, length: int) -> Int[np.ndarray, "b t"]:
    """Targets or factors (b t) of which no place is set yet."""
    return np.full((sequences, length), IGNORE, dtype=np.int32)


def put(array: Shaped[np.ndarray, "b t *c"], place: Int[np.ndarray, "b n"], value: Any) -> None:
    """array[i, place[i, j]] = value[i, j] for every sequence i."""
    array[np.arange(len(array))[:, None], place] = value


def distinct(rng: np.random.Generator, rows: int, count: int, pool: int) -> Int[np.ndarray, "rows count"]:
    """`count` different integers of range(pool) in each row, every ordered choice equally likely.

    A crowded pool is shuffled. Otherwise entries that repeat an earlier one of their row are drawn again until
    none does: renaming the integers renames the result, so every ordered choice keeps the same probability.
    """
    if count > pool:
        raise ValueError(f"{count} different values asked of a pool of {pool}")
    if 4 * count > pool:
        return rng.random((rows, pool), dtype=np.float32).argsort(axis=1)[:, :count].astype(np.int32)
    drawn = rng.integers(pool, size=(rows, count), dtype=np.int32)
    # Value above, column below, in one number: sorting it brings repeats together and keeps the earliest first.
    shift = count.bit_length()
    packed_type = np.uint32 if pool << shift < 2**32 else np.uint64
    column = np.arange(count, dtype=packed_type)
    todo, part = np.arange(rows), drawn
    while todo.size:
        packed = part.astype(packed_type) << shift | column
        packed.sort(axis=1)
        value = packed >> shift
        row, rank = np.nonzero(value[:, 1:] == value[:, :-1])
        repeat = packed[row, rank + 1] & (2**shift - 1)
        drawn[todo[row], repeat] = rng.integers(pool, size=row.size, dtype=np.int32)
        todo = todo[np.flatnonzero(np.bincount(row))]
        part = drawn[todo]
    return drawn


def others(
    rng: np.random.Generator, count: int, taken: Int[np.ndarray, "b n"], pool: int
) -> Int[np.ndarray, "b count"]:
    """`count` integers of range(pool) in each row, uniform over those that are not `taken` there (n different ones)."""
    drawn = rng.integers(pool - taken.shape[1], size=(len(taken), count), dtype=np.int32)
    for value in np.sort(taken, axis=1).T:
        drawn += drawn >= value[:, None]
    return drawn


def earliest(clock: np.ndarray, count: int) -> Int[np.ndarray, "rows count"]:
    """Columns of the `count` smallest entries of each row, smallest first; entries are float32 of at least 0.

    Such floats sort as their bits do, so bits above and column below make one number that sorts fast.
    """
    packed = np.empty((*clock.shape, 2), dtype="<u4")
    packed[..., 0] = np.arange(clock.shape[1])
    packed[..., 1] = clock.view(np.uint32)
    packed = packed.view("<u8")[..., 0]
    if count < clock.shape[1]:
        packed.partition(count - 1, axis=1)
    packed = packed[:, :count]
    packed.sort(axis=1)
    return packed.astype(np.uint32).astype(np.int32)


def alphabet(vocab: int, pairs: int, distractors: int, parts: int, chosen: int | None) -> int:
    """Tokens that each part of a key is chosen from, where half of the vocabulary is values: `chosen`, or as many
    as there are ids for.

    Raises ValueError unless all pairs can have different keys and different values.
    """
    ids, values = vocab // 2 - 1, vocab // 2
    size = ids // parts if chosen is None else chosen
    made = f"vocab={vocab} with key_parts={parts} of key_alphabet={size}"
    need = max(size, 1) * parts
    require(size >= 1 and need <= ids, f"{made}: only {ids} ids for keys, at least {need} needed")
    keys = size**parts
    require(keys < 2**31, f"{made} makes {keys} keys, at most {2**31 - 1}")
    require(
        pairs + distractors <= min(keys, values),
        f"pairs={pairs} and distractors={distractors} but {made} has only {keys} keys and {values} values",
    )
    return size


def spell(code: Int[np.ndarray, "b n"], parts: int, letters: int) -> Int[np.ndarray, "b n c"]:
    """Key number → token ids of its parts, one a channel: digit j in base `letters` becomes id 1 + j·letters + digit.

    Channels are embedded and added, so keys that share parts are correlated, and no embedding undoes it: A^parts keys
    lie in A·parts dimensions. With orthogonal embeddings two keys have cosine (shared parts)/parts; over all pairs
    of different keys it averages (A^(parts−1) − 1)/(A^parts − 1), about 1/A.
    """
    digit = np.arange(parts)
    return (1 + digit * letters + code[..., None] // letters**digit % letters).astype(np.int32)
