"""Figures: each module draws from a table, with a function `draw` that yields names and figures."""

import pkgutil

from recall_lab.files import OWN


def names() -> list[str]:
    """The modules of this folder, and of figure/ in the user's own folder, which become importable from here too."""
    for folder in OWN:
        if str(folder / "figure") not in __path__:
            __path__.append(str(folder / "figure"))
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
