"""Retrieval versus length: how accuracy holds as the sequence grows, one figure a task."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import style
from recall_lab.results import summarise


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """(name, figure) for each task of the table: accuracy per scored token over n, a line a series.

    Band: 95 % bootstrap interval over runs. The legend gives the state carried at the longest length, in elements.
    """
    for task, part in table.groupby("task"):
        part = part[part["task.length"].notna()]
        test = part[part["split"] == "test"]
        points = summarise(part, ["series", "task.length"])
        state = test[test["metric"] == "state_elements"]
        with style.style():
            made, ax = style.figure()
            for name in style.ordered(points["series"]):
                line = points[points["series"] == name].sort_values("task.length")
                colour, marker = style.look(name)
                own = state[state["series"] == name]
                longest = own.loc[own["task.length"].idxmax()]
                label = f"{name}  ({longest['value']:,.0f} carried at n={longest['task.length']:.0f})"
                x = line["task.length"]
                ax.plot(x, line["mean"], color=colour, marker=marker, markersize=5, label=label, clip_on=False)
                ax.fill_between(x, line["low"], line["high"], color=colour, alpha=0.18, linewidth=0)
            trained = part.loc[part["split"] == "validation", "task.length"]
            style.length_axis(ax, points["task.length"], trained)
            continuous = (test["metric"] == "r2").any()
            style.accuracy_axis(ax, 0 if continuous else test.loc[test["metric"] == "chance", "value"].max())
            ax.set_ylabel("R² of the answer" if continuous else "accuracy per scored token")
            ax.set_title(f"{task}: retrieval versus length", pad=18)
            ax.legend(
                title=f"state in numbers; {style.seeds(points['runs'])}, band 95 %", frameon=False,
                loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize="small", title_fontsize="small",
            )  # fmt: skip
        yield f"retrieval_{task}", made
