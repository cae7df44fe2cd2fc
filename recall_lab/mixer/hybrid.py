"""Layers of different mechanisms in one model."""

from collections.abc import Callable, Sequence

from recall_lab.checks import require
from recall_lab.mixer.layer import Layer


def hybrid(
    *,
    pattern: Sequence[str],
    first: Callable[..., Layer],
    second: Callable[..., Layer],
    third: Callable[..., Layer] | None = None,
) -> list[Callable[..., Layer]]:
    """The constructors of the layers' mixers, in the order of `pattern`, from the lowest layer up.

    A model takes this list in place of a single constructor; with more layers than the pattern has entries it repeats
    the pattern: [first, second] with 3 layers gives first, second, first.
    Raises ValueError for a pattern that is empty or holds anything but the names of the given mechanisms.
    """
    given = {name: make for name, make in {"first": first, "second": second, "third": third}.items() if make}
    fits = len(pattern) > 0 and set(pattern) <= given.keys()
    require(fits, f"pattern={list(pattern)}: must be a list of one or more of {', '.join(given)}")
    return [given[name] for name in pattern]
