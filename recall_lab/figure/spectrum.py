"""The spectrum of a matrix memory: over how many directions it spreads what it holds."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import style
from recall_lab.results import average


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Singular values of S over their sum, and its effective rank as it fills; one figure a task, its widest key."""
    if "index" not in table:
        return
    kinds = ["singular_value", "effective_rank"]
    rows = table[table["metric"].isin(kinds)]
    for task, part in rows.groupby("task"):
        part = part[part["d_key"] == part["d_key"].max()]
        layers = sorted(part["layer"].unique())
        with style.style():
            shown = style.alike(part[part["metric"] == "effective_rank"], ["layer", "place"])
            made, axes = style.figure(
                8.6, style.beside(3.3 * len(layers) + 0.6, shown), nrows=len(layers), ncols=2, squeeze=False
            )
            for layer, (left, right) in zip(layers, axes, strict=True):
                here = part[part["layer"] == layer]
                last = here[(here["metric"] == "singular_value") & (here["place"] == here["place"].max())]
                values, ranks = (
                    average(last, ["series", "index"]),
                    average(here[here["metric"] == "effective_rank"], ["series", "place"]),
                )
                for name in shown:
                    colour, marker = style.look(name)
                    line = values[values["series"] == name]
                    left.plot(line["index"], line["mean"].clip(lower=1e-9), color=colour, linewidth=1.3)
                    line = ranks[ranks["series"] == name].sort_values("place")
                    right.plot(
                        line["place"],
                        line["mean"],
                        color=colour,
                        marker=marker,
                        markersize=5,
                        markerfacecolor="none",
                        linewidth=1.2,
                    )
                left.set_yscale("log")
                left.set_ylim(max(1e-6, values["mean"][values["mean"] > 0].min() / 2), None)
                left.set_xlabel("singular value, largest first")
                left.set_ylabel("σ / Σσ" + (f", layer {layer:.0f}" if len(layers) > 1 else ""))
                style.length_axis(right, ranks["place"])
                right.set_xlabel("tokens seen")
                right.set_ylabel("effective rank of S")
                right.set_ylim(0, None)
            made.suptitle(f"{task}: spectrum of the state, {last['place'].max():.0f} tokens")
            style.legend(made, shown)
        yield f"spectrum_{task}", made
