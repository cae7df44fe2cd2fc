"""Training curves: validation accuracy over steps, a line a run."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import style


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """(name, figure) for each task: validation accuracy of every run over its training steps."""
    curves = table[(table["split"] == "validation") & (table["metric"] == "curve_accuracy")]
    for task, part in curves.groupby("task"):
        with style.style():
            made, ax = style.figure()
            for name in style.ordered(part["series"]):
                colour, marker = style.look(name)
                for number, (_, run) in enumerate(part[part["series"] == name].groupby("run")):
                    label = name if number == 0 else f"_{name}"
                    ax.plot(run["step"], run["value"], color=colour, marker=marker, markersize=3.5, label=label)
            style.accuracy_axis(ax)
            ax.set_xlabel("training step")
            ax.set_ylabel("validation accuracy (mean over cells)")
            ax.set_title(f"{task}: training curves, a line a run")
            ax.legend(frameon=False, fontsize="small")
        yield f"training_{task}", made
