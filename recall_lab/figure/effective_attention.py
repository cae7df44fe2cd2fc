"""Effective attention side by side: the weights of several mechanisms on the same sequence."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import style

ACROSS = 6
"""Panels in a row, before the next is begun."""


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """A (query down, token across) of the first sequence: a panel a series and head, a row a layer, for each task.

    Signed, on one diverging map centred at nought, scaled by each panel's 99.5th percentile; open circles: the place
    that holds the answer of an asking query, which a tick at the right marks.
    """
    if not {"query", "token"} <= set(table):
        return
    rows = table[table["metric"].isin(["weight", "influence_weight"]) & table["query"].notna()]
    for task, part in rows.groupby("task"):
        part = part[part["seed"] == part["seed"].min()]
        panels = [(name, head) for name in style.ordered(part["series"]) for head in sorted(
            part.loc[part["series"] == name, "head"].unique())]  # fmt: skip
        layers = sorted(part["layer"].unique())
        columns = min(len(panels), ACROSS)
        lines = -(-len(panels) // columns)  # of each layer
        with style.style():
            made, axes = style.figure(
                2.5 * columns + 0.9, 2.7 * lines * len(layers) + 0.4, nrows=lines * len(layers), ncols=columns,
                squeeze=False, sharex=True, sharey=True,
            )  # fmt: skip
            image = None
            for ax in axes.flat:
                ax.set_axis_off()
            for row, layer in zip(range(0, len(axes), lines), layers, strict=True):
                for ax, (name, head) in zip(axes[row : row + lines].flat, panels, strict=False):
                    here = part[(part["series"] == name) & (part["head"] == head) & (part["layer"] == layer)]
                    if here.empty:
                        continue
                    ax.set_axis_on()
                    image = _panel(ax, here[here["run"] == here["run"].iloc[0]])
                    heads = len({h for n, h in panels if n == name})
                    ax.set_title(name + (f", head {head:.0f}" if heads > 1 else ""), fontsize="small")
                for ax in axes[row : row + lines, 0]:
                    ax.set_ylabel("query at" + (f" (layer {layer:.0f})" if len(layers) > 1 else ""))
            for ax in axes[-1]:
                ax.set_xlabel("token")
            bar = made.colorbar(image, ax=axes, shrink=0.7, ticks=[-1, 0, 1])
            bar.ax.set_yticklabels(["−", "0", "+"])
            bar.set_label("weight, over its panel's largest")
            marked = (part["source"] >= 0).any() and not (part["source"] >= 0).all()
            made.suptitle(f"{task}: effective attention" + ("; circles: where the answer stands" if marked else ""))
        yield f"effective_attention_{task}", made


def _panel(ax, run: pd.DataFrame):
    size = int(run["query"].max()) + 1
    matrix = np.full((size, size), np.nan)
    query, token = run["query"].astype(int).to_numpy(), run["token"].astype(int).to_numpy()
    matrix[query, token] = run["value"]
    limit = max(np.nanquantile(np.abs(matrix), 0.995), 1e-12)
    image = ax.imshow(matrix / limit, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest", aspect="equal")
    asks = run.drop_duplicates("query")
    asks = asks[asks["source"] >= 0]
    # Where every place asks, marking all would hide what they look at.
    if len(asks) <= size / 2:
        ax.scatter(asks["source"], asks["query"], s=14, facecolors="none", edgecolors="black", linewidths=0.6)
        ax.scatter(np.full(len(asks), size + 0.5), asks["query"], s=9, marker="<", color="black", clip_on=False)
    ax.set_xlim(-0.5, size - 0.5)
    ax.set_ylim(size - 0.5, -0.5)
    for side in ("top", "right"):
        ax.spines[side].set_visible(True)
    return image
