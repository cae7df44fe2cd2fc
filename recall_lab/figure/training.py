"""Training curves: validation accuracy over steps, one line per run."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import base, legends, style


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("training_TASK", figure) per task: validation accuracy of every run over its training steps."""
    curves = table[(table["split"] == "validation") & (table["metric"] == "curve_accuracy")]
    for task, part in curves.groupby("task"):
        looks = style.looks(part["series"])
        parts = base.blocks(looks)
        height = max(2.3, *(legends.height(names) for names in parts))
        with style.style():
            made, axes = style.grid(len(parts), 1, height * len(parts), sharex=True, sharey=True)
            for ax, names in zip(axes[:, 0], parts, strict=True):
                for name in names:
                    colour, marker = looks[name]
                    steps, values = _apart(part[part["series"] == name])
                    ax.plot(steps, values, color=colour, marker=marker, markersize=2.5, label=name)
                style.accuracy_axis(ax)
                ax.set_ylabel("validation accuracy, mean over cells")
                legends.series(ax, {name: name for name in names}, looks)
            axes[-1, 0].set_xlabel("training step")
            axes[0, 0].set_title(f"{task}: training curves, one line per run")
        yield f"training_{task}", made


def _apart(curves: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of all runs, with a NaN after each run, which breaks the line: a thousand lines take seconds."""
    curves = curves.sort_values(["run", "step"])
    ends = np.flatnonzero(curves["run"] != curves["run"].shift(-1)) + 1
    steps, values = (np.insert(curves[name].to_numpy(float), ends, np.nan) for name in ("step", "value"))
    return steps, values
