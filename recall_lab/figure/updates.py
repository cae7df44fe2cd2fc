"""Updates: accuracy over rebindings, which tells memories that superpose from those that overwrite, and over age."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recall_lab import theory
from recall_lab.figure import style
from recall_lab.results import average, summarise

RARE = 200
"""Answers that a point needs, over all runs of a series, to be drawn."""


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """(name, figure) where several numbers of updates were tested: accuracy over updates a key, a panel for each
    number of pairs; and, where the probe retrieval was asked by them, over how often the asked key itself was bound
    again and over the age of its latest value, all cells together.

    Band: interval over runs. Dashed: the law of a memory that only adds, 1/(m+1) for a key that was
    bound m times again, and its mean over m (theory.superposed_recall).
    """
    table = table[(table["task"] == "updates") & table["task.length"].notna()]
    if "task.updates" not in table or table["task.updates"].nunique() < 2:
        return
    points = summarise(
        table.assign(ratio=table["task.updates"] / table["task.pairs"]),
        ["series", "task.pairs", "ratio"],
        ("accuracy",),
    )
    chance = table.loc[table["metric"] == "chance", "value"].max()
    sizes = sorted(points["task.pairs"].unique())
    factors = [name for name in ("rebindings", "age") if (table["metric"] == f"accuracy_by_{name}").any()]
    panels = len(sizes) + len(factors)
    with style.style():
        made, axes = style.figure(2 + 3.4 * panels, 4.4, ncols=panels, squeeze=False, sharey=True)
        for ax, pairs in zip(axes[0], sizes, strict=False):
            part = points[points["task.pairs"] == pairs]
            ratio = np.linspace(0, part["ratio"].max(), 200)
            _law(ax, ratio, theory.superposed_recall(pairs * ratio, pairs))
            style.lines(ax, part, "ratio")
            ax.set_xlabel("rebindings a key, in the mean")
            ax.set_title(f"{pairs:.0f} keys", fontsize="medium")
        for ax, factor in zip(axes[0, len(sizes) :], factors, strict=True):
            part = _pooled(table, factor)
            style.lines(ax, part, factor)
            if factor == "age":
                ax.set_xscale("log", base=2)
                ax.set_xlabel("age of the latest value, in tokens")
            else:
                times = np.arange(part[factor].max() + 1)
                _law(ax, times, 1 / (1 + times))
                ax.set_xlabel("rebindings of the asked key")
            ax.set_title(f"by {factor}", fontsize="medium")
        for ax in axes[0]:
            style.accuracy_axis(ax, chance, note=ax is axes[0, -1])
        axes[0, 0].set_ylabel("accuracy per scored token")
        made.suptitle(
            f"updates: the latest value of a key, n={table.loc[table['split'] == 'test', 'task.length'].max():.0f}"
        )
        made.legend(
            *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False,
            fontsize="small", title=f"{style.seeds(points['runs'], 'band')}; dashed: a memory that only adds",
            title_fontsize="small",
        )  # fmt: skip
    yield "updates", made


def _law(ax: Axes, x: np.ndarray, y: np.ndarray) -> None:
    ax.plot(x, y, color="0.4", linestyle="--", linewidth=1, zorder=1)


def _pooled(table: pd.DataFrame, factor: str) -> pd.DataFrame:
    """Accuracy of each series by a factor (age in octaves), all answers of a run together."""
    rows = table[table["metric"] == f"accuracy_by_{factor}"]
    level = 2 ** np.floor(np.log2(rows[factor])) if factor == "age" else rows[factor]
    rows = rows.assign(right=rows["value"] * rows["count"], **{factor: level})
    sums = rows.groupby(["series", factor, "run"])[["right", "count"]].sum().reset_index()
    sums = sums[sums.groupby(["series", factor])["count"].transform("sum") >= RARE]
    return average(sums.assign(value=sums["right"] / sums["count"]), ["series", factor])
