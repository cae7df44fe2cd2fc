"""Dynamic access: how many directions of weights a query can choose among, and how near it comes to any one token."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from recall_lab import theory
from recall_lab.figure import style
from recall_lab.results import average

LABELS = {
    "rank": "rank of the query → weights map",
    "one_hot_residual": "one-hot residual, mean over tokens",
}


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Rank and one-hot residual over the tokens in the history, a row of panels a key width; grey: what a
    read-out linear in the query is bound to, min(n, d_key) and 1 − d_key/n."""
    if "tokens" not in table:
        return
    rows = table[table["metric"].isin(LABELS) & table["tokens"].notna()]
    if rows.empty:
        return
    widths = sorted(rows["d_key"].dropna().unique())
    with style.style():
        shown = style.alike(rows, ["metric", "d_key", "tokens"])
        made, axes = style.figure(
            9.0, style.beside(3.3 * len(widths) + 0.5, shown), nrows=len(widths), ncols=2, squeeze=False, sharex=True
        )
        size = style.nested(list(shown))
        for width, pair in zip(widths, axes, strict=True):
            part = rows[rows["d_key"] == width]
            tokens = np.geomspace(part["tokens"].min(), part["tokens"].max(), 200)
            bounds = {
                "rank": (theory.access_rank(tokens, width), f"min(n, {width:.0f})"),
                "one_hot_residual": (theory.one_hot_residual(tokens, width), f"1 − {width:.0f}/n"),
            }
            for ax, metric in zip(pair, LABELS, strict=True):
                points = average(part[part["metric"] == metric], ["series", "tokens"])
                bound, text = bounds[metric]
                ax.plot(tokens, bound, color="0.55", linewidth=4, alpha=0.45, zorder=1)
                ax.text(
                    0.02, 0.97, f"grey: linear in q, {text}", transform=ax.transAxes, va="top", fontsize="small",
                    color="0.35",
                )  # fmt: skip
                for name in shown:
                    line = points[points["series"] == name].sort_values("tokens")
                    colour, marker = style.look(name)
                    ax.plot(
                        line["tokens"],
                        line["mean"],
                        color=colour,
                        marker=marker,
                        markersize=size[name],
                        markerfacecolor="none",
                        linewidth=1,
                        alpha=0.85,
                    )
                style.length_axis(ax, points["tokens"])
                ax.set_xlabel("tokens in the history, n" if width == widths[-1] else "")
                ax.set_ylabel(LABELS[metric])
                ax.set_title(f"d_key = {width:.0f}")
            pair[0].set_yscale("log", base=2)
            pair[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            pair[1].set_ylim(-0.03, 1.13)
        style.legend(made, shown)
    yield "dynamic_access", made
