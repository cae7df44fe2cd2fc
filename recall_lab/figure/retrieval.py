"""Retrieval versus length: how accuracy holds as the sequence grows, one figure a task."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recall_lab.figure import style
from recall_lab.results import SCORES, summarise


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """(name, figure) for each task of the table: accuracy per scored token over n, a line a series.

    A setting of the task that is a word and takes several values (`group`, `haystack`) gets a panel for each.
    Band: interval over runs. The legend gives the state carried at the longest length, in elements.
    """
    scored = table[table["metric"].isin(SCORES) & (table["split"] == "test")]
    for task in sorted(set(scored["task"])):
        part = table[(table["task"] == task) & table["task.length"].notna()]
        words = [c for c in part if c.startswith("task.") and pd.api.types.is_string_dtype(part[c].dropna())]
        words = [c for c in words if part[c].nunique() > 1]
        panels = list(part.groupby(words, sort=False)) if words else [((), part)]
        with style.style():
            made, axes = style.figure(2.4 + 4.8 * len(panels), 4.4, ncols=len(panels), squeeze=False, sharey=True)
            for (values, panel), ax in zip(panels, axes[0], strict=True):
                _panel(ax, panel)
                ax.set_title(", ".join([task, *values]) + ": retrieval versus length", pad=18)
            for ax in axes[0, 1:]:
                ax.set_ylabel("")
            entries = {
                label: handle for ax in axes[0] for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
            }
            runs = summarise(part, ["series", *words, "task.length"])["runs"]
            columns = max(1, int(made.get_figwidth() / (0.6 + 0.07 * max(map(len, entries)))))
            made.set_figheight(made.get_figheight() + 0.18 * (len(entries) // columns))
            made.legend(
                entries.values(), entries.keys(), title=f"state in numbers; {style.seeds(runs, 'band')}",
                loc="outside lower center", ncols=columns, frameon=False, fontsize="small", title_fontsize="small",
            )  # fmt: skip
        yield f"retrieval_{task}", made


def _panel(ax: Axes, part: pd.DataFrame) -> None:
    test = part[part["split"] == "test"]
    points = summarise(part, ["series", "task.length"])
    state = test[test["metric"] == "state_elements"]
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
