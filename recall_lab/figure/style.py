"""What figures share: a mechanism's fixed colour, marker and place, the length axis, the note on seeds."""

import colorsys
import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from recall_lab.results import interval_name

FIXED = {
    "softmax": ("#111111", "o"),
    "forgetting": ("#6b6b6b", "s"),
    "linear": ("#1f77b4", "v"),
    "based": ("#17a2c4", "p"),
    "gated_linear": ("#2ca02c", "^"),
    "gla": ("#7fb800", "<"),
    "mamba2": ("#0b7a3b", ">"),
    "delta_rule": ("#d62728", "D"),
    "gated_delta": ("#ff7f0e", "d"),
    "kda": ("#e377c2", "P"),
    "rwkv7": ("#9467bd", "X"),
    "mesa": ("#8c1d6b", "*"),
    "log_linear": ("#3b4cc0", "h"),
    "rnn": ("#8c564b", "1"),
    "lstm": ("#c49c94", "2"),
    "window": ("#bcbd22", "|"),
    "sink_window": ("#937a00", "_"),
    "heavy_hitter": ("#b8860b", "x"),
    "merging": ("#d2a679", "+"),
    "top_k": ("#4c4cff", "H"),
    "paged": ("#00b3b3", "8"),
    "hybrid": ("#a0522d", "3"),
}
"""Colour and marker of the known mechanisms, in the order of a legend. Others get theirs from their name."""

MARKERS = "osv^D<>PXd*ph8H"


def mechanism(series: str) -> str:
    """The mechanism in a series' name, which goes on with its variant (`/…`) and settings (` …`)."""
    return re.split("[ /]", series)[0]


def look(series: str) -> tuple[tuple[float, float, float], str]:
    """Colour and marker of a series: the mechanism's own, its further settings in shades of it."""
    name = mechanism(series)
    setting = series.removeprefix(name).lstrip("/ ")
    number = int(hashlib.sha256(name.encode()).hexdigest(), 16)
    if name in FIXED:
        colour, marker = FIXED[name]
    else:
        colour, marker = colorsys.hls_to_rgb(number % 360 / 360, 0.45, 0.65), MARKERS[number % len(MARKERS)]
    hue, light, saturation = colorsys.rgb_to_hls(*mpl.colors.to_rgb(colour))
    if setting:
        shift = int(hashlib.sha256(setting.encode()).hexdigest(), 16) % 1000 / 1000
        light = 0.2 + 0.55 * shift
        marker = MARKERS[int(1000 * shift) % len(MARKERS)]
    return colorsys.hls_to_rgb(hue, light, saturation), marker


def ordered(series: Iterable[str]) -> list[str]:
    """In the order of every legend: known mechanisms first, then the rest by name."""
    known = list(FIXED)
    return sorted(set(series), key=lambda s: (known.index(m) if (m := mechanism(s)) in FIXED else len(known), s))


@contextmanager
def style() -> Iterator[None]:
    """The look of every figure while it is drawn, and while it is saved: the same figure then gives the same svg."""
    with (
        sns.axes_style("ticks"),
        sns.plotting_context("notebook", font_scale=0.9),
        mpl.rc_context(
            {"svg.hashsalt": "recall_lab", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
        ),
    ):
        yield


def figure(width: float | int = 7.2, height: float | int = 4.4, **axes: int) -> tuple[Figure, Axes | np.ndarray]:
    """A figure outside pyplot, so that making many keeps none alive."""
    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots(**axes)


def length_axis(
    ax: Axes, lengths: Iterable[float | int], trained: Iterable[float | int] = (), note: str = "lengths trained on"
) -> None:
    """A log₂ axis ticked at the tested lengths, the span of the training lengths shaded, with a note above it."""
    lengths, trained = sorted(set(lengths)), sorted(set(trained))
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(lengths))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    shown = [*lengths, *trained]
    ax.set_xlim(min(shown) / 2**0.25, max(shown) * 2**0.25)
    if trained:
        ax.axvspan(trained[0] / 2**0.12, trained[-1] * 2**0.12, color="0.93", zorder=0, label="_trained")
        ax.text(
            (trained[0] * trained[-1]) ** 0.5, 1.01, note, transform=ax.get_xaxis_transform(),
            ha="center", va="bottom", fontsize="small", color="0.45",
        )  # fmt: skip
    ax.set_xlabel("sequence length n")


def accuracy_axis(ax: Axes, chance: float | int | None = None, note: bool = True) -> None:
    """From 0 to 1, a dotted line at chance, with a note on it where there is room right of the axes."""
    ax.set_ylim(-0.02, 1.03)
    if chance is None:
        return
    ax.axhline(chance, color="0.5", linestyle=":", linewidth=1, zorder=1)
    if note:
        ax.text(
            1, chance, f" chance {chance:.2g}", transform=ax.get_yaxis_transform(), ha="left", va="center",
            fontsize="small", color="0.4",
        )  # fmt: skip


def lines(ax: Axes, points: pd.DataFrame, x: str) -> None:
    """A line a series over the column `x` of summarised points, the interval as a band."""
    for name in ordered(points["series"]):
        line = points[points["series"] == name].sort_values(x)
        colour, marker = look(name)
        ax.plot(line[x], line["mean"], color=colour, marker=marker, markersize=5, label=name, clip_on=False)
        ax.fill_between(line[x], line["low"], line["high"], color=colour, alpha=0.18, linewidth=0)


def heatmap(ax: Axes, grid: pd.DataFrame) -> AxesImage:
    """Per cents (0 to 100) as cells with their numbers, the first row at the bottom, ticked at the columns."""
    image = ax.imshow(grid.to_numpy(), origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=100)
    for (row, column), value in np.ndenumerate(grid.to_numpy()):
        if np.isfinite(value):
            colour = "black" if value > 60 else "white"
            ax.text(column, row, f"{value:.0f}", ha="center", va="center", color=colour, fontsize="small")
    ax.set_xticks(range(len(grid.columns)), [f"{value:g}" for value in grid.columns])
    ax.tick_params(length=0)
    return image


def alike(rows: pd.DataFrame, by: list[str], tolerance: float = 0.01) -> dict[str, str]:
    """Groups of series that coincide, their values equal at every point of `by`: the first of each group, in a legend's
    order, with a label that names them all. One line then stands for the group."""
    values = rows.pivot_table(index="series", columns=by, values="value")
    groups: dict[str, list[str]] = {}
    for name in ordered(rows["series"]):
        same = (
            first
            for first in groups
            if np.allclose(values.loc[name], values.loc[first], rtol=tolerance, atol=tolerance, equal_nan=True)
        )
        groups.setdefault(next(same, name), []).append(name)
    return {first: "\n= ".join(names) for first, names in groups.items()}


def nested(series: list[str]) -> dict[str, float]:
    """Marker sizes, the first series' the largest, so that hollow markers on the same point can all be seen."""
    return {name: 10 - 7 * place / max(1, len(series) - 1) for place, name in enumerate(series)}


def beside(height: float | int, series: list[str] | dict[str, str]) -> float:
    """The height of a figure, or more where the legend at its right needs it."""
    labels = series.values() if isinstance(series, dict) else series
    return max(float(height), 0.9 + 0.2 * sum(label.count("\n") + 1 for label in labels))


def legend(made: Figure, series: list[str] | dict[str, str], title: str = "", **where: str | int) -> None:
    """One legend for all panels: each series with its colour and marker, under its name or the label given with it; at
    the right unless `where` says otherwise."""
    handles = [Line2D([], [], color=look(name)[0], marker=look(name)[1], markersize=5) for name in series]
    made.legend(
        handles, list(series.values() if isinstance(series, dict) else series), title=title or None, frameon=False,
        fontsize="small", title_fontsize="small", alignment="left", **{"loc": "outside right upper"} | where,
    )  # fmt: skip


def readings(table: pd.DataFrame) -> pd.DataFrame:
    """The oracle's keyed read-outs, top-1 and error by key width and pairs; empty where the table has none."""
    if "oracle.d_key" not in table or "pairs" not in table:
        return table[:0]
    return table[table["metric"].isin(["top1", "error"]) & table["oracle.d_key"].notna() & table["pairs"].notna()]


def seeds(runs: Iterable[float | int], interval: str = "") -> str:
    """How many runs stand behind each point, in words, and what the interval over them is, drawn as that."""
    least, most = min(runs), max(runs)
    words = f"{least} run{'s' if most > 1 else ''} a point" if least == most else f"{least} to {most} runs a point"
    return f"{words}, {interval} {interval_name(runs)}" if interval else words


def shades(count: int) -> list[tuple[float, float, float]]:
    """That many colours in an order that can be seen, for what is a size and no mechanism."""
    return sns.color_palette("viridis_r", count + 1)[1:]
