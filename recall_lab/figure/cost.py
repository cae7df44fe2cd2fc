"""Cost versus sequence length, on log-log axes: a power law is a straight line whose slope is its exponent."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import base, legends, style
from recall_lab.results import average
from recall_lab.theory import fits

PANELS = {
    "prefill_flops": "FLOPs of prefill",
    "decode_flops": "FLOPs of one decode step",
    "state_bytes": "state size (bytes)",
    "prefill_seconds": "time of prefill (s)",
    "decode_seconds": "time of one decode step (s)",
}


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("cost", figure) if the probe cost was run: one panel per kind of cost, summed over layers, at the largest
    d_key. The legend lists the fitted exponents of n in the order of the panels."""
    if not {"length", "d_key"} <= set(table):
        return
    rows = table[table["metric"].isin(PANELS) & table["length"].notna()]
    if rows.empty:
        return
    rows = base.by_width(rows[rows["d_key"] == rows["d_key"].max()])
    total = base.totals(rows, ["run", "series", "metric", "length"], ["value"])
    points = average(total, ["series", "metric", "length"])
    panels = [metric for metric in PANELS if metric in set(total["metric"])]
    looks = style.looks(total["series"])
    labels = {name: f"{name}: {_exponents(points, name, panels)}" for name in looks}
    title = f"exponents of n, in panel order\n{base.replicates(points)}, d_key = {rows['d_key'].max():.0f}"
    parts = base.blocks(looks)
    lines = 2 if len(panels) > 3 else 1
    columns = -(-len(panels) // lines)
    height = max(1.9 * lines, *(legends.height(part, title) for part in parts))
    with style.style():
        made, axes = style.grid(lines * len(parts), columns, height * len(parts), sharex=True)
        for ax in axes.flat:
            ax.set_axis_off()
        for block, names in enumerate(parts):
            for ax, metric in zip(axes[block * lines : (block + 1) * lines].flat, panels, strict=False):
                here = points[points["metric"] == metric]
                ax.set_axis_on()
                style.lines(ax, here, "length", {name: looks[name] for name in names}, bars=False)
                style.length_axis(ax, points["length"])
                ax.set_yscale("log")
                ax.set_ylim(*_limits(here["mean"]))
                ax.set_title(PANELS[metric], fontsize="medium")
                ax.tick_params(labelbottom=True)
            legends.series(axes[block * lines, -1], {name: labels[name] for name in names}, looks, title)
    yield "cost", made


def _limits(values: pd.Series) -> tuple[float, float]:
    """The same logarithmic range in every panel of one kind of cost."""
    positive = values[values > 0]
    return (positive.min() / 1.6, positive.max() * 1.6) if len(positive) else (0.5, 2.0)


def _exponents(points: pd.DataFrame, name: str, panels: list[str]) -> str:
    """The fitted exponents of a series in the order of the panels; – where there is none."""
    texts = []
    for metric in panels:
        line = points[(points["series"] == name) & (points["metric"] == metric)]
        usable = line["length"].nunique() > 1 and (line["mean"] > 0).all()
        slope = fits.exponent(line["length"].to_numpy(), line["mean"].to_numpy())[0] if usable else None
        texts.append("–" if slope is None else f"{slope + 0.0:.2f}".replace("-0.00", "0.00"))
    return "  ".join(texts)
