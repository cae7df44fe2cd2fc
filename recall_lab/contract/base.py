"""The results of contract checks. A check is a pure function of a mixer, or of a task, that returns a `Finding`."""

import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any


class NotApplicableError(Exception):
    """Raised by a check that does not apply to its subject; the message is the reason."""


class BrokenError(Exception):
    """Raised by a check that cannot go on, because its subject breaks the contract; the message says how."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    holds   whether the contract holds; None: the check is not applicable
    detail  what was measured and where, or why the check is not applicable
    check   name of the check, which `examine` fills in
    """

    holds: bool | None
    detail: str
    check: str = ""

    @property
    def failed(self) -> bool:
        return self.holds is not None and not self.holds


Check = Callable[..., Finding]


def title(check: Check) -> str:
    """The name of a check: that of its function, in words."""
    return check.__name__.replace("_", " ")


def examine(checks: Iterable[Check], *subject: Any) -> Iterator[Finding]:
    """Yields the finding of each check on one subject. A check that raises an unexpected exception has failed."""
    for check in checks:
        try:
            finding = check(*subject)
        except NotApplicableError as reason:
            finding = Finding(None, f"not applicable: {reason}")
        except BrokenError as fault:
            finding = Finding(False, str(fault))
        except Exception as error:  # a user's own code may raise anything
            finding = Finding(False, raised(error))
        yield replace(finding, check=title(check))


def raised(error: Exception) -> str:
    """An exception as one line, with the innermost source line outside installed packages."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    frames = [f for f in frames if not f.filename.startswith("<")]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


@dataclass(frozen=True)
class Deviation:
    """A relative error, its limit, and what was compared."""

    error: float
    limit: float
    where: str

    @property
    def share(self) -> float:
        """error / limit; infinite where the error is NaN."""
        return math.inf if math.isnan(self.error) else self.error / self.limit


def within_limits(deviations: Iterable[Deviation]) -> Finding:
    """Whether all errors are within their limits. The detail names the error that is largest relative to its limit."""
    worst = max(deviations, key=lambda deviation: deviation.share)
    detail = f"largest relative error {worst.error:.1e} (allowed {worst.limit:.0e}): {worst.where}"
    return Finding(worst.share <= 1, detail)
