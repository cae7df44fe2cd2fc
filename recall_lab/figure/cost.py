"""Cost against length, on axes where a power law is a line and its exponent a slope."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from recall_lab import theory
from recall_lab.figure import style
from recall_lab.results import average

PANELS = {
    "prefill_flops": "FLOPs of a segment",
    "decode_flops": "FLOPs of one decoded token",
    "state_bytes": "bytes carried",
    "prefill_seconds": "seconds of a segment",
    "decode_seconds": "seconds of one decoded token",
}


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """One panel a kind of cost, all layers together, at the largest width of a key; in the legend the
    fitted exponents of n, in the order of the panels."""
    if "length" not in table:
        return
    rows = table[table["metric"].isin(PANELS) & table["length"].notna()]
    if rows.empty:
        return
    rows = rows[rows["d_key"] == rows["d_key"].max()]
    total = rows.groupby(["run", "series", "metric", "length"])["value"].sum().reset_index()
    panels = [metric for metric in PANELS if metric in set(total["metric"])]
    with style.style():
        lines = 2 if len(panels) > 3 else 1
        columns = -(-len(panels) // lines)
        made, axes = style.figure(3.6 * columns + 1.4, 3.0 * lines + 0.9, nrows=lines, ncols=columns, squeeze=False)
        shown = style.ordered(total["series"])
        slopes: dict[str, list[str]] = {name: [] for name in shown}
        for ax, metric in zip(axes.flat, panels, strict=False):
            points = average(total[total["metric"] == metric], ["series", "length"])
            for name in shown:
                line = points[points["series"] == name].sort_values("length")
                colour, marker = style.look(name)
                ax.plot(line["length"], line["mean"], color=colour, marker=marker, markersize=4, linewidth=1.2)
                usable = len(line) > 1 and (line["mean"] > 0).all()
                slope = theory.exponent(line["length"].to_numpy(), line["mean"].to_numpy())[0] if usable else None
                slopes[name].append("–" if slope is None else f"{slope + 0.0:.2f}".replace("-0.00", "0.00"))
            style.length_axis(ax, points["length"])
            ax.set_yscale("log")
            ax.set_title(PANELS[metric], fontsize="medium")
        for ax in list(axes.flat)[len(panels) :]:
            ax.set_axis_off()
        labels = {name: f"{name}: {'  '.join(slopes[name])}" for name in shown}
        style.legend(made, labels, "exponents of n, panel by panel", loc="outside lower center", ncols=3)
    yield "cost", made
