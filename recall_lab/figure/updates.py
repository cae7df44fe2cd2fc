"""Updates: accuracy over the number of rebindings, which tells superposing memories from those that overwrite."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from recall_lab import theory
from recall_lab.figure import style
from recall_lab.results import summarise


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """(name, figure) where several numbers of updates were tested: accuracy over updates a key, a panel for each
    number of pairs. Band: interval over runs. Dashed: the law of a memory that only adds, E 1/(m+1)
    for a key that was bound m times again (theory.superposed_recall)."""
    table = table[(table["task"] == "updates") & table["task.length"].notna()]
    if "task.updates" not in table or table["task.updates"].nunique() < 2:
        return
    table = table.assign(ratio=table["task.updates"] / table["task.pairs"])
    points = summarise(table, ["series", "task.pairs", "ratio"], ("accuracy",))
    chance = table.loc[table["metric"] == "chance", "value"].max()
    sizes = sorted(points["task.pairs"].unique())
    lengths = table.loc[table["split"] == "test", "task.length"]
    with style.style():
        made, axes = style.figure(2.4 + 4.4 * len(sizes), 4.6, ncols=len(sizes), squeeze=False, sharey=True)
        for ax, pairs in zip(axes[0], sizes, strict=True):
            part = points[points["task.pairs"] == pairs]
            style.lines(ax, part, "ratio")
            ratio = np.linspace(0, part["ratio"].max(), 200)
            ax.plot(
                ratio,
                theory.superposed_recall(pairs * ratio, pairs),
                color="0.4",
                linestyle="--",
                linewidth=1,
                zorder=1,
            )
            ax.set_xlabel("rebindings a key")
            ax.set_title(f"{pairs:.0f} keys")
            style.accuracy_axis(ax, chance, note=ax is axes[0, -1])
        axes[0, 0].set_ylabel("accuracy per scored token")
        made.suptitle(f"updates: the latest value, n={lengths.min():.0f}")
        made.legend(
            *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False,
            fontsize="small", title=f"{style.seeds(points['runs'], 'band')}; dashed: a memory that only adds",
            title_fontsize="small",
        )  # fmt: skip
    yield "updates", made
