"""Heat maps of accuracy with the number in every cell."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def cells(ax: Axes, table: pd.DataFrame) -> None:
    """Draws shares in per cent with their numbers, the first row of the table at the bottom. NaN gives a blank cell."""
    sns.heatmap(
        100 * table, ax=ax, vmin=0, vmax=100, cmap="viridis", annot=True, fmt=".0f", cbar=False,
        annot_kws={"fontsize": "small"},
        xticklabels=[f"{value:g}" for value in table.columns], yticklabels=[f"{value:g}" for value in table.index],
    )  # fmt: skip
    ax.invert_yaxis()
    ax.set(xlabel="", ylabel="")
    ax.tick_params(length=0, rotation=0)


def colour_bar(made: Figure, axes: np.ndarray) -> None:
    """Adds the colour bar of `cells`."""
    mappable = mpl.cm.ScalarMappable(mpl.colors.Normalize(0, 100), "viridis")
    made.colorbar(mappable, ax=list(axes.flat), label="accuracy (%)", shrink=0.6)
