"""Effective attention side by side: the weights of several mechanisms on the same sequence."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from recall_lab.figure import style

ACROSS = 4
"""Most panels per row."""


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("effective_attention_TASK", figure) per task: A of the first sequence of the smallest seed.

    Queries run downwards, tokens to the right; one panel per series and head, layers below each other. Signed weights
    have a diverging colour map centred at zero, scaled by the 99.5th percentile of |A| in each panel. Circles: the
    position that holds the answer to a query; triangles at the right: queries that have an answer.
    """
    if not {"query", "token"} <= set(table):
        return
    rows = table[table["metric"].isin(["weight", "influence_weight"]) & table["query"].notna()]
    for task, part in rows.groupby("task"):
        yield f"effective_attention_{task}", _figure(str(task), part[part["seed"] == part["seed"].min()])


def _figure(task: str, part: pd.DataFrame) -> Figure:
    panels = [
        (name, head)
        for name in style.ordered(part["series"])
        for head in sorted(part.loc[part["series"] == name, "head"].unique())
    ]
    layers = sorted(part["layer"].unique().tolist())
    lines = -(-len(panels) // ACROSS)  # per layer
    columns = -(-len(panels) // lines)
    with style.style():
        rows, height = lines * len(layers), (style.PAGE - 1) / max(columns, 2)
        made, axes = style.grid(rows, columns, height * rows + 0.8, sharex=True, sharey=True, width=style.PAGE)
        for ax in axes.flat:
            ax.set_axis_off()
        for row, layer in zip(range(0, len(axes), lines), layers, strict=True):
            for ax, (name, head) in zip(axes[row : row + lines].flat, panels, strict=False):
                here = part[(part["series"] == name) & (part["head"] == head) & (part["layer"] == layer)]
                if here.empty:
                    continue
                ax.set_axis_on()
                _panel(ax, here[here["run"] == here["run"].iloc[0]])
                heads = len({h for n, h in panels if n == name})
                ax.set_title(name + (f", head {head:.0f}" if heads > 1 else ""), fontsize="small")
            for ax in axes[row : row + lines, 0]:
                ax.set_ylabel("query position" + (f" (layer {layer:.0f})" if len(layers) > 1 else ""))
        for ax in [ax for ax in axes.flat if ax.axison][-columns:]:
            ax.set_xlabel("token position")
            ax.tick_params(labelbottom=True)
        bar = made.colorbar(
            ScalarMappable(Normalize(-1, 1), "RdBu_r"), ax=list(axes.flat), shrink=0.7, ticks=[-1, 0, 1]
        )
        bar.ax.set_yticklabels(["−", "0", "+"])
        bar.set_label("weight (scaled per panel)")
        marked = (part["source"] >= 0).any() and not (part["source"] >= 0).all()
        title = f"{task}: effective attention" + ("\ncircles: position of the answer" if marked else "")
        if "block" in part and part["block"].max() > 1:
            title += f"\ncells: blocks of {part['block'].max():.0f} × {part['block'].max():.0f} positions"
        made.suptitle(title, fontsize="medium")
    return made


def _panel(ax: Axes, run: pd.DataFrame) -> None:
    """Draws the weights as an image. A cell is one pair of positions, or of blocks if the probe thinned the matrix."""
    block = int(run["block"].iloc[0]) if "block" in run and run["block"].notna().all() else 1
    cell = run[["query", "token"]].astype(int) // block
    size = int(cell.to_numpy().max()) + 1
    matrix = np.full((size, size), np.nan)
    matrix[cell["query"], cell["token"]] = run["value"]
    limit = max(np.nanquantile(np.abs(matrix), 0.995), 1e-12)
    edge = size * block - 0.5
    ax.imshow(
        matrix / limit, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest", aspect="equal",
        extent=(-0.5, edge, edge, -0.5),
    )  # fmt: skip
    answered = run.drop_duplicates("query")
    answered = answered[answered["source"] >= 0]
    # Where most positions are queries, marking all of them would hide the weights.
    if len(answered) <= size / 2:
        ax.scatter(answered["source"], answered["query"], s=14, facecolors="none", edgecolors="black", linewidths=0.6)
        ax.scatter(
            np.full(len(answered), edge + block), answered["query"], s=9, marker="<", color="black", clip_on=False
        )
    ax.set_xlim(-0.5, edge)
    ax.set_ylim(edge, -0.5)
    for side in ("top", "right"):
        ax.spines[side].set_visible(True)
