"""Tasks: accuracy over the sequence length, one panel per task."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import base
from recall_lab.figure.score_panels import LENGTH, PANELS, draw_panels

EVERY_TASK = True


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("tasks", figure) if several tasks were tested in one cell per length, at several lengths: accuracy per
    scored token over n.

    One line per series, with the intervals over seeds as bars. The legend gives the size of the state at the longest
    sequence.
    """
    table = table[table["metric"].isin(("accuracy", "chance", "state_elements"))]
    if LENGTH not in table:
        return
    table = table[table[LENGTH].notna()]
    panels = {str(task): rows for task, rows in table.groupby("task") if _over_length(rows)}
    if 1 < len(panels) <= PANELS:
        yield "tasks", draw_panels("several tasks", LENGTH, panels)


def _over_length(rows: pd.DataFrame) -> bool:
    """Whether there is one tested cell at each of several lengths."""
    test = rows[(rows["split"] == "test") & (rows["metric"] == "accuracy")]
    return test[LENGTH].nunique() > 1 and not base.free(test, [LENGTH])
