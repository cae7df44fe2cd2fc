"""Updates: accuracy over the number of rebindings per key, which separates adding values from overwriting them."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import base, legends, style
from recall_lab.results import summarise
from recall_lab.theory import linear_attention

NEEDED = {"task.length", "task.pairs", "task.updates"}


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("updates", figure) if several numbers of updates were tested with equal numbers of keys: accuracy over
    the mean number of rebindings (new values) per key, one panel per number of keys and length.

    Bars: interval over seeds. Dashed: a mechanism that gives all values of a key the same weight.
    """
    if not set(table) >= NEEDED:
        return
    table = table[(table["task"] == "updates") & table["task.length"].notna()]
    test = table[(table["split"] == "test") & (table["metric"] == "accuracy")]
    several = test.groupby(["task.length", "task.pairs"])["task.updates"].nunique() > 1
    if not several.any():
        return
    cell = pd.MultiIndex.from_frame(table[["task.length", "task.pairs"]])
    table = table[cell.isin(several.index[several]) | (table["split"] == "validation")]
    table = table.assign(ratio=table["task.updates"] / table["task.pairs"])
    points = summarise(table, ["series", "task.length", "task.pairs", "ratio"], ("accuracy",))
    chance = table.loc[table["metric"] == "chance", "value"].max()
    looks = style.looks(points["series"])
    cells = list(points.groupby(["task.length", "task.pairs"]))
    parts = base.blocks(looks)
    note = f"{base.replicates(points, 'bars')}\ndashed: equal weight on all\nvalues of a key\ndotted: chance"
    height = max(2.3, *(legends.height(names, note) for names in parts))
    with style.style():
        made, axes = style.grid(len(parts), len(cells), height * len(parts) + 0.2, sharey=True)
        for row, names in zip(axes, parts, strict=True):
            for ax, ((length, pairs), part) in zip(row, cells, strict=True):
                ratio = np.linspace(0, part["ratio"].max(), 200)
                law = linear_attention.superposed_recall(pairs * ratio, pairs)
                ax.plot(ratio, law, color="0.4", linestyle="--", linewidth=1, zorder=1)
                style.lines(ax, part, "ratio", {name: looks[name] for name in names})
                style.accuracy_axis(ax, None if pd.isna(chance) else float(chance))
                ax.set_xlabel("mean number of rebindings per key")
                ax.set_title(f"{pairs:.0f} keys, n = {length:.0f}", fontsize="medium")
            row[0].set_ylabel("accuracy per scored token")
            legends.series(row[-1], {name: name for name in names}, looks, note)
        made.suptitle("updates: recall of the latest value of a key")
    yield "updates", made
