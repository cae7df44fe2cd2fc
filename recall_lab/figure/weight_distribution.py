"""The share of the weight on the token that holds the answer (the target), versus the number of tokens."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recall_lab.figure import base, legends, style
from recall_lab.results import average
from recall_lab.theory import linear_attention, softmax

TARGET, OTHER = 100.0, 1.0
"""Scores of the target and of every other token in the panel by formula."""


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("weight_distribution_TASK_dWIDTH", figure) per task and d_key: the target's share of Σ|A| over the number
    n of tokens up to the query. Left: by formula for raw scores [100, 1, …, 1]; right: as measured.

    Measured: median and middle 90 % of the queries, each averaged over seeds. Dotted: theory for random unit keys,
    linear attention and softmax with logits √d_key k·q. Diamond: predicted n at which the share under softmax is 1/2.
    """
    if "tokens" not in table:
        return
    rows = table[(table["metric"] == "target_share_by_tokens") & table["tokens"].notna()]
    for (task, width), part in base.by_width(rows, "oracle.pairs").groupby(["task", "d_key"]):
        longest = part.groupby("run")["tokens"].transform("max")
        part = part[longest > 0.9 * longest.max()]
        yield f"weight_distribution_{task}_d{width:.0f}", _figure(part, f"{task}, d_key = {width:.0f}", float(width))


def _figure(part: pd.DataFrame, title: str, width: float) -> Figure:
    points = average(part, ["series", "statistic", "tokens"])
    looks = style.looks(points["series"])
    note = f"median and middle 90 % of queries\n{base.replicates(points)}\ndotted: theory"
    parts = base.blocks(looks)
    height = max(2.5, *(legends.height(names, note) for names in parts))
    with style.style():
        made, axes = style.grid(len(parts), 2, height * len(parts), sharey=True)
        for row, names in zip(axes, parts, strict=True):
            raw, measured = row
            _by_formula(raw)
            for name in names:
                line = points[points["series"] == name].pivot(index="tokens", columns="statistic", values="mean")
                colour, marker = looks[name]
                measured.plot(line.index, line["q50"], color=colour, marker=marker, markersize=3, linewidth=1.2)
                measured.fill_between(line.index, line["q05"], line["q95"], color=colour, alpha=0.08, linewidth=0)
            if "oracle.d_key" in part and part["oracle.d_key"].notna().any():
                _theory(measured, part, names, looks, width)
            measured.set_title(title)
            for ax in row:
                ax.set_xscale("log")
                ax.set_yscale("log")
                ax.set_ylim(1e-4, 1.5)
                ax.set_xlabel("tokens up to the query, n")
            legends.series(measured, {name: name for name in names}, looks, note)
    return made


def _by_formula(ax: Axes) -> None:
    """Draws the share of the target for scores [100, 1, …, 1]."""
    n = np.geomspace(1, 1e4, 200)
    for name, law in (("softmax", softmax.raw_share), ("linear", linear_attention.raw_share)):
        ax.plot(n, law(n, TARGET, OTHER), color=style.FIXED[name][0], label=name)
    ax.set_title(f"scores [{TARGET:.0f}, 1, …, 1], by formula")
    ax.set_ylabel("share of the target token in Σ|A|")
    ax.legend(frameon=False)


def _theory(ax: Axes, part: pd.DataFrame, names: list[str], looks: dict[str, style.Look], width: float) -> None:
    """Draws the theory for linear attention and softmax, which assumes the random keys of the oracle."""
    n = np.geomspace(1, part["tokens"].max(), 100)
    laws = {
        "linear": linear_attention.share(n, width),
        "softmax": softmax.mass(n, width, width**0.5),
    }
    for name in names:
        if name in laws:
            ax.plot(n, laws[name], ":", color=looks[name].colour, linewidth=1.4)
    half = float(softmax.half_mass(width))
    if "softmax" in names and half <= n[-1]:
        ax.plot(half, 0.5, "D", color=looks["softmax"].colour, markerfacecolor="none", markersize=5)
