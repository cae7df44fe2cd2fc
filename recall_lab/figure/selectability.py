"""Selectability: the share of random subsets of the past tokens that some query can select."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import base, legends, style
from recall_lab.results import average


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("selectability", figure) if dynamic_access tried subsets: the share of them that some query selects, over
    their size, at the largest number of tokens, one panel per d_key. Bars: interval."""
    if "subset" not in table:
        return
    rows = table[(table["metric"] == "selectable") & table["subset"].notna()]
    rows = base.by_width(rows, "oracle.pairs")
    if rows.empty:
        return
    rows = rows[rows["tokens"] == rows.groupby("d_key")["tokens"].transform("max")]
    widths = sorted(rows["d_key"].dropna().unique().tolist())
    shown = base.alike(rows, ["d_key", "subset"])
    looks = style.looks(shown)
    points = average(rows, ["series", "d_key", "subset"])
    note = base.replicates(points, "bars")
    parts = base.blocks(shown)
    height = max(2.3, *(legends.height([shown[name] for name in part], note) for part in parts))
    with style.style():
        made, axes = style.grid(len(parts), len(widths), height * len(parts), sharey=True)
        for row, part in zip(axes, parts, strict=True):
            size = style.nested(part)
            for ax, width in zip(row, widths, strict=True):
                here = points[points["d_key"] == width]
                for name in part:
                    line = here[here["series"] == name].sort_values("subset")
                    ax.plot(
                        line["subset"], line["mean"], color=looks[name].colour, marker=looks[name].marker,
                        markersize=size[name], markerfacecolor="none", linewidth=1.2, clip_on=False,
                    )  # fmt: skip
                    ax.vlines(line["subset"], line["low"], line["high"], color=looks[name].colour, alpha=0.5)
                style.length_axis(ax, points["subset"])
                style.accuracy_axis(ax)
                ax.set_xlabel("size of the subset")
                tokens = rows.loc[rows["d_key"] == width, "tokens"].max()
                ax.set_title(f"d_key = {width:.0f}, {tokens:.0f} tokens")
            row[0].set_ylabel("share selectable")
            legends.series(row[-1], {name: shown[name] for name in part}, looks, note)
    yield "selectability", made
