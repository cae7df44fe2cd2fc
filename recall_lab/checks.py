"""Checks of input: each raises ValueError with one line that states what was given and what is allowed.

`name` is the name that the user knows the value by ("train.steps", "heads"); the message starts with `name=value`.
"""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)


def whole_number(name: str, value: Any, least: int = 1) -> None:
    """Raises ValueError unless value is an integer of at least `least`; True, False and 2.0 are not integers."""
    fits = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
    require(fits, f"{name}={value!r}: must be a whole number of at least {least}")


def number(name: str, value: Any, least: float | int | None = None, above: float | int | None = None) -> None:
    """Raises ValueError unless value is a finite number of at least `least`, or greater than `above`."""
    fits = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    fits = fits and (least is None or float(value) >= least) and (above is None or float(value) > above)
    limit = f" of at least {least:g}" if least is not None else f" above {above:g}" if above is not None else ""
    require(fits, f"{name}={value!r}: must be a number{limit}")


def share(name: str, value: Any) -> None:
    """Raises ValueError unless value is a number from 0 to 1."""
    fits = isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) <= 1
    require(fits, f"{name}={value!r}: must be a number from 0 to 1")


def choice(name: str, value: Any, options: Iterable[Any]) -> None:
    """Raises ValueError unless value is one of the options."""
    options = list(options)
    require(value in options, f"{name}={value!r}: must be one of {', '.join(map(str, options))}")


def flag(name: str, value: Any) -> None:
    """Raises ValueError unless value is True or False."""
    require(isinstance(value, bool), f"{name}={value!r}: must be true or false")
