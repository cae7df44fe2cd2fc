"""The mixers that the figures of a page are about: their series have full colours, all others are pale."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_MIXERS: ContextVar[Collection[str]] = ContextVar("mixers", default=())


@contextmanager
def emphasis(mixers: Collection[str]) -> Iterator[None]:
    """A context in which these mixers are emphasised: drawn after all others, that is on top of them."""
    token = _MIXERS.set(mixers)
    try:
        yield
    finally:
        _MIXERS.reset(token)


def emphasised(series: str) -> bool:
    """Whether a series ("MIXER", "MIXER key=value …" or "hybrid(PARTS) …") is one of an emphasised mixer."""
    return any(f"{series} ".startswith((f"{mixer} ", f"{mixer}(")) for mixer in _MIXERS.get())


def toned(series: str, colour: tuple[float, float, float]) -> tuple[float, float, float]:
    """The colour of a series: mixed with white where other series are emphasised."""
    if not _MIXERS.get() or emphasised(series):
        return colour
    red, green, blue = (0.6 + 0.4 * part for part in colour)
    return red, green, blue
