"""Figures: each module draws from a table, with a function `draw` that yields names and figures.

The names begin with that of the module, so that a claim or a card that names a figure has only its module draw.
"""

import pkgutil

from recall_lab.files import OWN


def names() -> list[str]:
    """The modules of this folder, and of figure/ in the user's own folder, which become importable from here too."""
    __path__[1:] = [str(folder / "figure") for folder in OWN]  # not those of a folder that was in use before
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
