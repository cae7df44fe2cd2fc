"""Layers of different mechanisms in one model."""

from collections.abc import Callable, Sequence

from recall_lab.mixer.base import Mixer


def hybrid(
    *,
    pattern: Sequence[str],
    first: Callable[..., Mixer],
    second: Callable[..., Mixer],
    third: Callable[..., Mixer] | None = None,
) -> list[Callable[..., Mixer]]:
    """Layers of different mechanisms: what makes each layer's mixer, in the order of `pattern`, from the lowest up.

    Not a mixer itself but a list where a single mechanism is one maker; a model with more layers than the pattern has
    entries begins it again. [first, first, second] with 7 layers: 1 1 2 1 1 2 1.
    Raises ValueError for an empty pattern, or one that names anything but the mechanisms given.
    """
    given = {name: maker for name, maker in {"first": first, "second": second, "third": third}.items() if maker}
    if not pattern or not set(pattern) <= given.keys():
        raise ValueError(f"pattern={list(pattern)}: a list of {', '.join(given)}, at least one long")
    return [given[name] for name in pattern]
