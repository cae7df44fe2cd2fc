"""The spectrum of a matrix state: its singular values and its effective rank."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recall_lab.figure import base, legends, style
from recall_lab.results import average


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("spectrum_TASK", figure) per task, at its largest d_key: singular values of S divided by their sum at the
    last position measured, and the effective rank of S over the number of tokens so far. Means over seeds."""
    if not {"index", "position"} <= set(table):
        return
    rows = base.by_width(table[table["metric"].isin(["singular_value", "effective_rank"])], "oracle.pairs")
    for task, part in rows.groupby("task"):
        part = part[part["d_key"] == part["d_key"].max()]
        last = part[(part["metric"] == "singular_value") & (part["position"] == part["position"].max())]
        ranks = part[part["metric"] == "effective_rank"]
        if not last.empty and not ranks.empty:
            yield f"spectrum_{task}", _figure(str(task), last, ranks)


def _figure(task: str, last: pd.DataFrame, ranks: pd.DataFrame) -> Figure:
    layers = sorted(ranks["layer"].unique().tolist())
    shown = base.alike(ranks, ["layer", "position"])
    looks = style.looks(shown)
    values, points = average(last, ["series", "layer", "index"]), average(ranks, ["series", "layer", "position"])
    parts = base.blocks(shown)
    note = base.replicates(points)
    height = max(2.2 * len(layers), *(legends.height([shown[name] for name in one], note) for one in parts))
    with style.style():
        made, axes = style.grid(len(layers) * len(parts), 2, height * len(parts) + 0.2, sharex="col", sharey="col")
        for block, names in enumerate(parts):
            for (left, right), layer in zip(axes[block * len(layers) :], layers, strict=False):
                for name in names:
                    _singular_values(left, values[(values["series"] == name) & (values["layer"] == layer)], looks[name])
                    line = points[(points["series"] == name) & (points["layer"] == layer)].sort_values("position")
                    right.plot(
                        line["position"], line["mean"], color=looks[name].colour, marker=looks[name].marker,
                        markersize=4, markerfacecolor="none", linewidth=1.2,
                    )  # fmt: skip
                left.set_yscale("log")
                left.set_ylabel("σ / Σσ" + (f", layer {layer:.0f}" if len(layers) > 1 else ""))
                style.length_axis(right, points["position"])
                right.set_ylabel("effective rank of S")
                right.set_ylim(0, None)
            legends.series(axes[block * len(layers), 1], {name: shown[name] for name in names}, looks, note)
        axes[0, 0].set_ylim(max(1e-6, values["mean"][values["mean"] > 0].min() / 2), None)
        for ax in axes[:, 1]:
            ax.set_xlabel("")
        axes[-1, 0].set_xlabel("singular value, largest first")
        axes[-1, 1].set_xlabel("number of tokens so far")
        made.suptitle(f"{task}: spectrum of the state, d_key = {ranks['d_key'].max():.0f}")
    return made


def _singular_values(ax: Axes, line: pd.DataFrame, look: style.Look) -> None:
    line = line.sort_values("index")
    ax.plot(line["index"], line["mean"].clip(lower=1e-9), color=look.colour, linewidth=1.3)
