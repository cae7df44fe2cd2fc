"""`recall-lab status`: one line for each run of a sweep, also while another process runs it."""

from pathlib import Path

from recall_lab import overview
from recall_lab.messages import counted


def status(folder: str) -> str:
    """The state, progress, accuracy, time left and size of every run in a sweep's folder, and totals.

    Raises folders.ForeignFolder where this is not a sweep's folder.
    """
    path = Path(folder)
    found = overview.entries(path)
    sizes = {each.name: overview.size(path / each.name) for each in found}
    rows = [[*overview.line(each), overview.bytes_in_words(sizes[each.name])] for each in found]
    together = overview.bytes_in_words(sum(sizes.values()))
    total = f"{counted(len(found), 'run')}: {overview.totals(found)}; {together} on disk"
    return "\n".join([*overview.columns(rows), total])
