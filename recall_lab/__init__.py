"""recall_lab: find out what an attention mechanism can remember.

train_and_test  do one run, as the command line does
load            the table of a sweep's folder
open_run        the task and the trained model of a finished run
plot            the figures of one kind that a table allows
save_figures    all figures that a table allows, as files

They are imported when they are first used.
"""

from typing import Any

__all__ = ["load", "open_run", "plot", "save_figures", "train_and_test"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'recall_lab' has no attribute {name!r}")
    from recall_lab import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return __all__
