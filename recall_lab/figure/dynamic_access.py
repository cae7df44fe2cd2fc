"""Dynamic access: the rank of the weights over all queries, and how close a query comes to selecting one token."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recall_lab.figure import base, legends, style
from recall_lab.results import average
from recall_lab.theory import access

LABELS = {"rank": "rank, query to weights", "one_hot_residual": "one-hot residual"}


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("dynamic_access", figure) if that probe was run: rank and one-hot residual over the number of tokens in
    the history, one row of panels per d_key. Grey: min(n, d_key), the upper bound of the rank, and 1 − d_key/n, the
    lower bound of the residual, for any read-out that is linear in the query."""
    if "tokens" not in table:
        return
    rows = base.by_width(table[table["metric"].isin(LABELS) & table["tokens"].notna()], "oracle.pairs")
    if rows.empty:
        return
    widths = sorted(rows["d_key"].dropna().unique().tolist())
    shown = base.alike(rows, ["metric", "d_key", "tokens"])
    looks = style.looks(shown)
    points = average(rows, ["series", "metric", "d_key", "tokens"])
    parts = base.blocks(shown)
    note = f"points: {base.replicates(points)}\ngrey: bound for a read-out\nlinear in the query"
    height = max(2.1 * len(widths), *(legends.height([shown[name] for name in one], note) for one in parts))
    with style.style():
        made, axes = style.grid(len(widths) * len(parts), 2, height * len(parts), sharex=True, sharey="col")
        for block, names in enumerate(parts):
            size = style.nested(names)
            for row, width in zip(axes[block * len(widths) :], widths, strict=False):
                for ax, metric in zip(row, LABELS, strict=True):
                    here = points[(points["metric"] == metric) & (points["d_key"] == width)]
                    _bound(ax, metric, here["tokens"], width)
                    for name in names:
                        line = here[here["series"] == name].sort_values("tokens")
                        ax.plot(
                            line["tokens"], line["mean"], color=looks[name].colour, marker=looks[name].marker,
                            markersize=size[name], markerfacecolor="none", linewidth=1, alpha=0.85,
                        )  # fmt: skip
                    style.length_axis(ax, points["tokens"])
                    ax.set_xlabel("")
                    ax.set_ylabel(LABELS[metric])
                    ax.set_title(f"d_key = {width:.0f}")
            legends.series(axes[block * len(widths), 1], {name: shown[name] for name in names}, looks, note)
        for left, right in axes:
            left.set_yscale("log", base=2)
            left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            right.set_ylim(-0.03, 1.13)
        for ax in axes[-1]:
            ax.set_xlabel("tokens in the history, n")
    yield "dynamic_access", made


def _bound(ax: Axes, metric: str, tokens: pd.Series, width: float) -> None:
    """Draws the bound for a read-out that is linear in the query, with its formula."""
    n = np.geomspace(tokens.min(), tokens.max(), 200)
    bound, text = {
        "rank": (access.rank(n, width), f"min(n, {width:.0f})"),
        "one_hot_residual": (access.one_hot_residual(n, width), f"1 − {width:.0f}/n"),
    }[metric]
    ax.plot(n, bound, color="0.55", linewidth=4, alpha=0.45, zorder=1)
    ax.text(0.02, 0.97, f"grey: {text}", transform=ax.transAxes, va="top", fontsize="small", color="0.35")
