"""What a task is: a definition (`solve`), a sampler (`sample`) written independently of it, and its grid."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32, Shaped

from recall_lab.checks import require, whole_number

IGNORE = -100
"""The value in `targets` and `factors` wherever nothing is scored (torch's losses ignore it by default)."""


@dataclass(frozen=True)
class Batch:
    """Sequences and the targets of their scored positions.

    tokens   b t, int32 ids (or b t c: c ids per position, whose embeddings are added); for a continuous task b t
             width, float32
    targets  b t, int32: the class that the logits at *that same position* should predict, IGNORE elsewhere; for a
             continuous task b t vocab, float32: the vector that the output at that position should equal, IGNORE in
             all channels elsewhere
    factors  name → b t, int32: quantities that a plot may split the scored positions by; IGNORE elsewhere.
             `source` is the position of the answer in the sequence, where there is exactly one.

    Raises ValueError where nothing is scored, since the mean loss of no positions would be NaN.
    """

    tokens: Shaped[np.ndarray, "b t *c"]
    targets: Shaped[np.ndarray, "b t *w"]
    factors: dict[str, Int[np.ndarray, "b t"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        b, t = self.tokens.shape[:2]
        require(bool(self.scored.any()), f"nothing to score in {b} sequences of {t} positions: every target is IGNORE")

    @property
    def scored(self) -> Bool[np.ndarray, "b t"]:
        """True at the positions that have a target."""
        return (self.targets if self.targets.ndim == 2 else self.targets[..., 0]) != IGNORE

    @property
    def age(self) -> Int[np.ndarray, "b t"]:
        """Distance from the answer to the scored position, in positions; IGNORE elsewhere.

        Raises KeyError for a task without the factor `source`.
        """
        source = self.factors["source"]
        return np.where(source == IGNORE, IGNORE, np.arange(source.shape[1], dtype=np.int32) - source)


@dataclass(frozen=True)
class Scaled:
    """The points of a grid that `Task.scaled` derives from a task."""

    cells: list[dict[str, int]]
    """Those that the task allows, each once, in the order of the factors."""
    impossible: list[str]
    """For each of the others, its values and the reason why the task refuses it."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """The parameters of a synthetic task. Immutable: `at` gives the same task at another point of its grid.

    A subclass checks its fields in `__post_init__` and raises ValueError naming the values and the limit.
    """

    length: int
    """n: positions of a sequence."""

    scales: ClassVar[tuple[str, ...]] = ("length",)
    """The fields that are multiplied by one common factor when a training mixture or a test grid is derived."""

    @property
    @abstractmethod
    def vocab(self) -> int:
        """Width of the output: the number of token ids, which are the classes; for a continuous task the number of
        channels of a target."""

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
        """Expected accuracy per scored token of a guess made without reading the sequence; for a continuous task the
        normalised error Σ‖output − target‖² / Σ‖target − mean target‖² of the mean target, which is 1."""

    @abstractmethod
    def sample(self, sequences: int, rng: np.random.Generator) -> Batch:
        """Draws `sequences` independent sequences, with no source of randomness but `rng`."""

    @abstractmethod
    def solve(self, tokens: Shaped[np.ndarray, "b t *c"]) -> Shaped[np.ndarray, "b t *w"]:
        """The targets, computed from the tokens by the task's definition, without any code of `sample`."""

    @abstractmethod
    def roles(self, tokens: Shaped[np.ndarray, "b t *c"]) -> Shaped[np.ndarray, "b t *c"]:
        """The role of each token as a word ("key", "value", "query", "filler" …), for display; for a continuous
        task the role of each position (b t). The scored positions are those with a "query"."""

    def at(self, **cell: Any) -> "Task":
        """The same task with other values of some parameters.

        Raises ValueError where the task has no such parameter, or does not allow the values.
        """
        known = [f.name for f in fields(self)]
        for name in cell:
            require(name in known, f"{type(self).__name__} has no parameter {name!r}; it has {', '.join(known)}")
        return replace(self, **cell)

    def scaled(self, factors: Sequence[float | int]) -> Scaled:
        """One cell per factor: every field of `scales` times the factor, rounded down, at least 1 (0 stays 0)."""
        cells: list[dict[str, int]] = []
        impossible: dict[str, None] = {}
        for factor in factors:
            sizes = {name: getattr(self, name) for name in self.scales}
            cell = {name: max(min(1, size), int(size * factor)) for name, size in sizes.items()}
            try:
                self.at(**cell)
            except ValueError as reason:
                values = ", ".join(f"{name}={size}" for name, size in cell.items())
                impossible[f"{values}: {reason}"] = None
            else:
                cells += [cell] if cell not in cells else []
        return Scaled(cells, list(impossible))


def unscored(sequences: int, length: int) -> Int32[np.ndarray, "b t"]:
    """Targets or factors (b t) that are IGNORE at every position."""
    return np.full((sequences, length), IGNORE, dtype=np.int32)


def put(array: Shaped[np.ndarray, "b t *c"], position: Int[np.ndarray, "b n"], value: Any) -> None:
    """array[i, position[i, j]] = value[i, j] for every sequence i, in place; value: b n (c), or one number."""
    array[np.arange(len(array))[:, None], position] = value


def distinct(rng: np.random.Generator, rows: int, count: int, pool: int) -> Int32[np.ndarray, "rows count"]:
    """`count` different integers of range(pool) in each row, every ordered choice equally likely.

    Where 4·count > pool, the first entries of a random permutation. Otherwise independent draws, in which entries that
    repeat an earlier one of their row are drawn again until none does; this treats all integers alike, so every ordered
    choice keeps the same probability. Raises ValueError where count > pool.
    """
    require(count <= pool, f"{count} different values cannot be drawn from a pool of {pool}")
    if 4 * count > pool:
        return rng.random((rows, pool), dtype=np.float32).argsort(axis=1)[:, :count].astype(np.int32)
    drawn = rng.integers(pool, size=(rows, count), dtype=np.int32)
    todo = np.arange(rows)
    while todo.size:
        part = drawn[todo]
        order = smallest(part, count)  # equal entries become neighbours, the earliest first
        value = np.take_along_axis(part, order, axis=1)
        row, rank = np.nonzero(value[:, 1:] == value[:, :-1])
        drawn[todo[row], order[row, rank + 1]] = rng.integers(pool, size=row.size, dtype=np.int32)
        todo = todo[np.unique(row)]
    return drawn


def others(
    rng: np.random.Generator, count: int, taken: Int[np.ndarray, "b n"], pool: int
) -> Int32[np.ndarray, "b count"]:
    """`count` integers of range(pool) in each row, uniform over those that are not among the row's n different
    `taken` ones; they may repeat."""
    drawn = rng.integers(pool - taken.shape[1], size=(len(taken), count), dtype=np.int32)
    for value in np.sort(taken, axis=1).T:
        drawn += drawn >= value[:, None]
    return drawn


def smallest(
    keys: Int32[np.ndarray, "rows n"] | Float32[np.ndarray, "rows n"], count: int
) -> Int32[np.ndarray, "rows count"]:
    """Columns of the `count` smallest entries of each row, smallest first, equal ones by column; entries are int32 or
    float32 and at least 0. Equals keys.argsort(axis=1, kind="stable")[:, :count].

    Such numbers are ordered like their bit patterns. Entry and column are therefore packed into one 64-bit integer, the
    entry in the upper half, and these integers are partitioned and sorted. This is 7 to 11 times as fast as the stable
    argsort (4096 × 248, count 8: 3.6 ms and 39 ms), with which 100,000 long sequences of mqar take 3 times as long.
    """
    packed = np.empty((*keys.shape, 2), dtype="<u4")
    packed[..., 0] = np.arange(keys.shape[1])
    packed[..., 1] = keys.view(np.uint32)
    packed = packed.view("<u8")[..., 0]
    if count < keys.shape[1]:
        packed.partition(count - 1, axis=1)
    packed = packed[:, :count]
    packed.sort(axis=1)
    return packed.astype(np.uint32).astype(np.int32)


def check_pairs(vocab: Any, length: Any, pairs: Any, queries: Any, distractors: Any, parts: Any, chosen: Any) -> None:
    """Checks the parameters that tasks on pairs of key and value share. Raises ValueError, naming the parameter.

    parts, chosen  as in `alphabet`
    """
    whole_number("vocab", vocab, 4)
    whole_number("length", length)
    whole_number("pairs", pairs)
    if queries is not None:
        whole_number("queries", queries)
    whole_number("distractors", distractors, 0)
    whole_number("key_parts", parts)
    if chosen is not None:
        whole_number("key_alphabet", chosen)
    require(vocab % 2 == 0, f"vocab={vocab}: must be even")
    alphabet(vocab, pairs, distractors, parts, chosen)


def alphabet(vocab: int, pairs: int, distractors: int, parts: int, chosen: int | None) -> int:
    """Number of token ids that each part of a key is chosen from: `chosen`, or for None the largest possible.

    Id 0 is filler, half of the vocabulary is values, and the other ids are divided equally among the parts of a key.

    Raises ValueError unless all pairs and distractors can have different keys and different values.
    """
    ids, values = vocab // 2 - 1, vocab // 2
    size = ids // parts if chosen is None else chosen
    made = f"vocab={vocab}, key_parts={parts} and key_alphabet={size}"
    need = max(size, 1) * parts
    require(size >= 1 and need <= ids, f"{made} need {need} ids for keys, but there are only {ids}")
    keys = size**parts
    require(keys < 2**31, f"{made} give {keys} keys: there must be at most {2**31 - 1}")
    require(
        pairs + distractors <= min(keys, values),
        f"pairs={pairs} and distractors={distractors} but {made} give only {keys} keys and {values} values",
    )
    return size


def spell(code: Int[np.ndarray, "b n"], parts: int, letters: int) -> Int32[np.ndarray, "b n parts"]:
    """Key number → token ids of its parts: digit j of the number in base `letters` becomes id 1 + j·letters + digit.

    The embeddings of the parts are added, so keys that share parts are correlated for every embedding:
    A^parts keys (A = letters) lie in A·parts dimensions. With orthogonal embeddings two keys have the cosine
    (shared parts)/parts; its mean over all pairs of different keys is (A^(parts−1) − 1)/(A^parts − 1), about 1/A.
    """
    digit = np.arange(parts)
    return (1 + digit * letters + code[..., None] // letters**digit % letters).astype(np.int32)
