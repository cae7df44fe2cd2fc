"""Selectability: which share of random subsets of the past some query can single out."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import style
from recall_lab.results import average


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Share of subsets selected over their size, a panel a key width, of the most tokens there are."""
    if "subset" not in table:
        return
    rows = table[(table["metric"] == "selectable") & table["subset"].notna()]
    if rows.empty:
        return
    rows = rows[rows["tokens"] == rows.groupby("d_key")["tokens"].transform("max")]
    widths = sorted(rows["d_key"].dropna().unique())
    with style.style():
        shown = style.alike(rows, ["d_key", "subset"])
        made, axes = style.figure(
            3.2 * len(widths) + 1.5, style.beside(3.5, shown), ncols=len(widths), squeeze=False, sharey=True
        )
        size = style.nested(list(shown))
        for ax, width in zip(axes[0], widths, strict=True):
            points = average(rows[rows["d_key"] == width], ["series", "subset"])
            for name in shown:
                line = points[points["series"] == name].sort_values("subset")
                colour, marker = style.look(name)
                x = line["subset"]
                ax.plot(
                    x,
                    line["mean"],
                    color=colour,
                    marker=marker,
                    markersize=size[name],
                    markerfacecolor="none",
                    linewidth=1.2,
                    clip_on=False,
                )
                ax.vlines(x, line["low"], line["high"], color=colour, linewidth=1, alpha=0.5)
            style.length_axis(ax, points["subset"])
            style.accuracy_axis(ax)
            ax.set_xlabel("size of the subset")
            tokens = rows.loc[rows["d_key"] == width, "tokens"].max()
            ax.set_title(f"d_key = {width:.0f}, {tokens:.0f} tokens")
        axes[0][0].set_ylabel("share of subsets a query selects")
        style.legend(made, shown)
    yield "selectability", made
