"""Retention: how well a pair is recalled, versus its age, as others are written after it."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recall_lab.figure import base, laws, legends, style
from recall_lab.results import average

LABELS = {"top1": "top-1 of the read-out", "cosine": "cosine of read-out and value"}


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("retention_TASK_dWIDTH", figure) per task (the oracle counts as one) and d_key: top-1 and cosine of keyed
    read-outs versus age, at the last position measured.

    Bars: interval, for points with at least `style.FEW` answers. Dashed: closed form, for runs of the oracle that have
    one. Triangles on the x axis, filled: half-life, the age at which the measured curve first falls below half of its
    first value; hollow: predicted lifetime of a pair.
    """
    if not {"age", "d_key", "position"} <= set(table):
        return
    metrics = [f"{metric}_by_age" for metric in LABELS]
    rows = table[table["metric"].isin(metrics) & table["age"].notna()]
    for (task, width), part in base.by_width(rows, "oracle.pairs").groupby(["task", "d_key"]):
        part = part[part["position"] == part["position"].max()]
        yield f"retention_{task}_d{width:.0f}", _figure(part, f"{task}: retention by age, d_key = {width:.0f}")


def _figure(part: pd.DataFrame, title: str) -> Figure:
    layers = sorted(part["layer"].unique().tolist())
    shown = base.alike(part, ["metric", "layer", "age"])
    looks = style.looks(shown)
    points = average(part, ["series", "metric", "layer", "age"])
    answers = part.groupby(["series", "metric", "layer", "age"])["count"].sum().rename("answers").reset_index()
    points = points.merge(answers, on=["series", "metric", "layer", "age"])
    few = points["answers"] < style.FEW
    points.loc[few, ["low", "high"]] = np.nan
    points["age + 1"] = points["age"] + 1
    note = f"{'no bars: few answers' if few.all() else base.replicates(points[~few], 'bars')}\n"
    note += "dashed: theory\nfilled triangle: half-life\nhollow: predicted lifetime"
    parts = base.blocks(shown)
    height = max(2.3 * len(layers), *(legends.height([shown[name] for name in one], note) for one in parts))
    with style.style():
        made, axes = style.grid(len(layers) * len(parts), 2, height * len(parts) + 0.2, sharex=True, sharey=True)
        for block, names in enumerate(parts):
            for row, layer in zip(axes[block * len(layers) :], layers, strict=False):
                for ax, metric in zip(row, LABELS, strict=True):
                    here = points[(points["metric"] == f"{metric}_by_age") & (points["layer"] == layer)]
                    style.lines(ax, here, "age + 1", {name: looks[name] for name in names})
                    for name in names:
                        line = here[here["series"] == name].sort_values("age")
                        if not line.empty:
                            _half_life(ax, line, looks[name])
                            _law(ax, part, shown[name], metric, line["age"], looks[name])
                    ax.set_xscale("log", base=2)
                    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
                    style.accuracy_axis(ax)
                    ax.set_ylabel(LABELS[metric] + (f", layer {layer:.0f}" if len(layers) > 1 else ""))
            legends.series(axes[block * len(layers), 1], {name: shown[name] for name in names}, looks, note)
        for ax in axes[-1]:
            ax.set_xlabel("age + 1 (tokens since the pair)")
        made.suptitle(f"{title}, {part['pairs'].max():.0f} pairs")
    return made


def _half_life(ax: Axes, line: pd.DataFrame, look: style.Look) -> None:
    """Draws the triangle at the half-life of a series, with a dotted line up to its curve."""
    half = _half(line["age + 1"].to_numpy(), line["mean"].to_numpy())
    if half is not None:
        level = line["mean"].iloc[0] / 2
        ax.plot([half, half], [0, level], color=look.colour, linewidth=0.8, linestyle=":", zorder=1)
        ax.plot(half, 0, marker="v", color=look.colour, markersize=5, clip_on=False)


def _law(ax: Axes, part: pd.DataFrame, label: str, metric: str, age: pd.Series, look: style.Look) -> None:
    """Draws the closed form for runs of the oracle, over the measured ages, and the triangle at the lifetime."""
    law = laws.of_equal(part, label) if "oracle.d_key" in part and part["oracle.d_key"].notna().all() else None
    if law is None:
        return
    ages = np.unique(np.geomspace(age.min() + 1, age.max() + 1, 40).astype(int)) - 1
    predicted = law.by_age(metric, ages, int(part["pairs"].max()))
    if predicted is not None:
        ax.plot(ages + 1, predicted, color=look.colour, linewidth=1, linestyle="--", alpha=0.8, zorder=1.5)
    lifetime = law.lifetime()
    if metric == "top1" and lifetime is not None and lifetime <= age.max():
        ax.plot(lifetime + 1, 0, marker="v", color=look.colour, markersize=6, markerfacecolor="none", clip_on=False)


def _half(age: np.ndarray, value: np.ndarray) -> float | None:
    """Age at which the curve first falls below half of its first value, interpolated linearly in log(age).

    None if it never does, or if its first value is below 1/2.
    """
    level = value[0] / 2
    below = np.flatnonzero(value < level)
    if not below.size or value[0] < 0.5:
        return None
    i = below[0]
    part = (value[i - 1] - level) / (value[i - 1] - value[i])
    return float(np.exp(np.log(age[i - 1]) + part * np.log(age[i] / age[i - 1])))
