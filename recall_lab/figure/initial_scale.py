"""Effect of the initial embedding's scale on training: validation accuracy, and steps until solved."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import base, legends, style
from recall_lab.results import SCORES, summarise

AXIS = "model.embedding_std"


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("initial_scale_TASK", figure) where models differ in the standard deviation of their initial embedding.

    Left: validation accuracy at the end of training, mean over the training cells. Right: training steps, which are
    fewer than train.steps where training stopped because every cell was solved.
    """
    if AXIS not in table or table[AXIS].nunique() < 2:
        return
    table = base.along(table[table[AXIS].notna()], AXIS)
    for task, rows in table.groupby("task"):
        accuracy = summarise(rows, ["series", AXIS], SCORES, split="validation")
        steps = summarise(rows, ["series", AXIS], ("steps",), split="validation")
        if len(accuracy) and len(steps):
            yield f"initial_scale_{task}", _figure(str(task), accuracy, steps)


def _figure(task: str, accuracy: pd.DataFrame, steps: pd.DataFrame) -> Figure:
    looks = style.looks(accuracy["series"])
    note = base.replicates(accuracy)
    with style.style():
        made, axes = style.grid(1, 2, max(2.4, legends.height(looks, note)), sharex=True)
        for ax, points, label in zip(
            axes[0],
            (accuracy, steps),
            ("validation accuracy", "training steps"),
            strict=True,
        ):
            style.lines(ax, points, AXIS, looks, bars=False)
            style.log2_axis(ax, points[AXIS])
            ax.set_xlabel("initial embedding: standard deviation")
            ax.set_ylabel(label)
        style.accuracy_axis(axes[0, 0])
        axes[0, 1].set_ylim(bottom=0)
        legends.series(axes[0, 1], {name: name for name in looks}, looks, note)
        axes[0, 0].set_title(f"{task}: accuracy at the end of training")
        axes[0, 1].set_title("steps, fewer where solved early")
    return made
