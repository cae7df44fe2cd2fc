"""Selective copying: accuracy over the length and over the number of data tokens."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import style
from recall_lab.results import summarise


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """(name, figure) where several numbers of data tokens were tested: above over the length, one panel for each
    number of data; below over the data, one panel for each length. Bands: interval over runs."""
    table = table[table["task"] == "selective_copying"]
    if "task.data" not in table or table["task.data"].nunique() < 2:
        return
    points = summarise(table, ["series", "task.length", "task.data"], ("accuracy",))
    chance = table.loc[table["metric"] == "chance", "value"].max()
    trained = table[table["split"] == "validation"]
    with style.style():
        columns = max(points["task.length"].nunique(), points["task.data"].nunique())
        made, axes = style.figure(1 + 2.7 * columns, 6.4, nrows=2, ncols=columns, squeeze=False, sharey=True)
        for row, x, fixed, word in (
            (axes[0], "task.length", "task.data", "data"),
            (axes[1], "task.data", "task.length", "n"),
        ):
            values = sorted(points[fixed].unique())
            for ax in row[len(values) :]:
                ax.set_axis_off()
            for ax, value in zip(row, values, strict=False):
                part = points[points[fixed] == value]
                style.lines(ax, part, x)
                style.length_axis(ax, part[x], trained.loc[trained[fixed] == value, x], note="")
                style.accuracy_axis(ax, chance, note=ax is row[len(values) - 1])
                ax.set_title(f"{word} = {value:.0f}", fontsize="medium")
                ax.set_xlabel("sequence length n" if x == "task.length" else "data tokens")
            row[0].set_ylabel("accuracy per scored token")
        made.legend(
            *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False,
            fontsize="small", title=f"{style.seeds(points['runs'], 'band')}; shaded: trained on",
            title_fontsize="small",
        )  # fmt: skip
    yield "selective_copying", made
