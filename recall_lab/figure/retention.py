"""Retention: what is left of a pair as others are written after it, by its age."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import style
from recall_lab.results import average


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Top-1 and cosine of keyed read-outs by age, at the fullest load; triangles: where a curve first falls to a half.

    One figure a task (the oracle counts as one) and key width.
    """
    if not {"age", "d_key"} <= set(table):  # another probe may know ages too
        return
    rows = table[table["metric"].isin(["top1_by_age", "cosine_by_age"]) & table["age"].notna()]
    for (task, width), part in rows.groupby(["task", "d_key"]):
        part = part[part["place"] == part["place"].max()]
        layers = sorted(part["layer"].unique())
        with style.style():
            shown = style.alike(part, ["metric", "layer", "age"])
            made, axes = style.figure(
                11.5, style.beside(3.4 * len(layers) + 0.6, shown), nrows=len(layers), ncols=2, squeeze=False
            )
            for layer, pair in zip(layers, axes, strict=True):
                for ax, metric in zip(pair, ("top1_by_age", "cosine_by_age"), strict=True):
                    here = part[(part["metric"] == metric) & (part["layer"] == layer)]
                    points = average(here, ["series", "age"])
                    for name in shown:
                        line = points[points["series"] == name].sort_values("age")
                        colour, marker = style.look(name)
                        age = line["age"] + 1
                        ax.plot(
                            age, line["mean"], color=colour, marker=marker, markersize=3.5, linewidth=1.2, clip_on=False
                        )
                        ax.fill_between(age, line["low"], line["high"], color=colour, alpha=0.15, linewidth=0)
                        half = _half(age.to_numpy(), line["mean"].to_numpy())
                        if half is not None:
                            ax.plot(
                                [half, half],
                                [0, line["mean"].iloc[0] / 2],
                                color=colour,
                                linewidth=0.8,
                                linestyle=":",
                                zorder=1,
                            )
                            ax.plot(half, 0, marker="v", color=colour, markersize=5, clip_on=False)
                    ax.set_xscale("log", base=2)
                    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
                    style.accuracy_axis(ax)
                    ax.set_xlabel("tokens since the pair, its own counted")
                    label = {"top1_by_age": "top-1 of the read-out", "cosine_by_age": "cosine of read-out and value"}[
                        metric
                    ]
                    ax.set_ylabel(label + (f", layer {layer:.0f}" if len(layers) > 1 else ""))
            pairs = part["pairs"].max()
            made.suptitle(f"{task}: retention by age, {pairs:.0f} pairs, d_key = {width:.0f}")
            style.legend(made, shown, "triangles: half-life")
        yield f"retention_{task}_d{width:.0f}", made


def _half(age: np.ndarray, value: np.ndarray) -> float | None:
    """Age at which the curve first falls to half of where it starts, between points in the logarithm; None if never."""
    level = value[0] / 2
    below = np.flatnonzero(value < level)
    if not below.size or below[0] == 0:
        return None
    i = below[0]
    part = (value[i - 1] - level) / (value[i - 1] - value[i])
    return float(np.exp(np.log(age[i - 1]) + part * np.log(age[i] / age[i - 1])))
