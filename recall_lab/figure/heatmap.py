"""Heat maps of accuracy with the number in every cell."""

from collections.abc import Iterator

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recall_lab.figure import style


def cells(ax: Axes, table: pd.DataFrame) -> None:
    """Draws shares in per cent with their numbers, the first row of the table at the bottom. NaN gives a blank cell."""
    sns.heatmap(
        100 * table, ax=ax, vmin=0, vmax=100, cmap="viridis", annot=True, fmt=".0f", cbar=False,
        annot_kws={"fontsize": 6},
        xticklabels=[f"{value:g}" for value in table.columns], yticklabels=[f"{value:g}" for value in table.index],
    )  # fmt: skip
    ax.invert_yaxis()
    ax.set(xlabel="", ylabel="")
    ax.tick_params(length=0, rotation=0)


def across(cells: int) -> int:
    """How many heat maps with this number of columns fit side by side."""
    return int((style.PAGE - 1.3) / (0.2 * cells + 0.2))


def panels(
    axes: np.ndarray, blocks: list[list[str]], rows: dict[str, pd.DataFrame], label: str
) -> Iterator[tuple[Axes, str, pd.DataFrame]]:
    """Each panel with its series and its rows: a column per series, a line per title in `rows`, block below block.

    The title, the label and the ticks of the y axis stand at the left of each line; panels without a series stay empty.
    """
    for ax in axes.flat:
        ax.set_axis_off()
    for block, names in enumerate(blocks):
        for line, (title, part) in zip(axes[block * len(rows) :], rows.items(), strict=False):
            for ax, name in zip(line, names, strict=False):
                ax.set_axis_on()
                yield ax, name, part[part["series"] == name]
                if ax is not line[0]:
                    ax.set_yticklabels([])
            line[0].set_ylabel(f"{title}\n{label}".strip())


def colour_bar(made: Figure, axes: np.ndarray) -> None:
    """Adds the colour bar of `cells`."""
    mappable = mpl.cm.ScalarMappable(mpl.colors.Normalize(0, 100), "viridis")
    made.colorbar(mappable, ax=list(axes.flat), label="accuracy (%)", shrink=0.6)
