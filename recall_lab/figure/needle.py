"""Needle in a haystack: accuracy by depth and length, a heatmap a mechanism and haystack."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import style
from recall_lab.results import summarise


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """(name, figure) where needles were tested at several depths: depth × length, small multiples, one colour scale.

    A number is the mean over runs of the accuracy in per cent; lengths beyond those trained stand right of the line.
    """
    if "task.depth" not in table:
        return
    table = table[table["task"] == "needle"].dropna(subset="task.length")
    tested = table[table["task.depth"].notna()]
    points = summarise(tested, ["series", "task.haystack", "task.depth", "task.length"], ("accuracy",))
    if points.empty or points["task.depth"].nunique() < 2:
        return
    mechanisms = style.ordered(points["series"])
    haystacks = list(dict.fromkeys(tested["task.haystack"]))
    trained = table.loc[table["split"] == "validation", "task.length"].max()
    with style.style():
        made, axes = style.figure(
            1.2 + 2.1 * len(mechanisms), 0.9 + 1.9 * len(haystacks), nrows=len(haystacks), ncols=len(mechanisms),
            squeeze=False, sharex=True, sharey=True,
        )  # fmt: skip
        for row, haystack in zip(axes, haystacks, strict=True):
            for ax, mechanism in zip(row, mechanisms, strict=True):
                own = points[(points["series"] == mechanism) & (points["task.haystack"] == haystack)]
                if own.empty:
                    ax.set_axis_off()
                    continue
                grid = own.pivot(index="task.depth", columns="task.length", values="mean")
                image = style.heatmap(ax, 100 * grid)
                ax.axvline((grid.columns <= trained).sum() - 0.5, color="white", linewidth=2)
            row[0].set_ylabel(f"{haystack}\ndepth, %")
            row[0].set_yticks(range(len(grid.index)), [f"{100 * depth:.0f}" for depth in grid.index])
        for ax, mechanism in zip(axes[0], mechanisms, strict=True):
            ax.set_title(mechanism.replace("/", "\n"), fontsize="medium")
        for ax in axes[-1]:
            ax.set_xlabel("length n")
        made.colorbar(image, ax=axes, label="accuracy, %", shrink=0.6)
        made.suptitle(
            f"needle: accuracy by depth and length; {style.seeds(points['runs'])}, trained up to n={trained:.0f}"
        )
    yield "needle", made
