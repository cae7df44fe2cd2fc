"""The look of figures: colours, markers and order of series, panels, axes, lines and legends."""

import colorsys
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import blended_transform_factory

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
    "random_k": ("#7d8a97", "."),
    "stickbreaking_attn": ("#4b1e00", "v"),
    "nsa": ("#9600ff", "p"),
    "dsa": ("#b4a5ff", "*"),
    "path_attn": ("#003c00", "^"),
    "deltaformer": ("#4b004b", "D"),
    "hybrid": ("#a0522d", "3"),
}
"""Colour and marker of the known mechanisms, in the order in which legends list them."""

OTHERS = (
    "#080891", "#da25f4", "#910808", "#6489f7", "#91caca", "#325367", "#7b2bab", "#f76476", "#469174", "#cb0b83",
    "#2525f4", "#0bcb83",
)  # fmt: skip
"""Colours for other mechanisms, in alphabetical order: far (in OKLab) from the colours in FIXED and from each other."""

MARKERS = "osv^D<>PXd*ph8H"

MOST = 10
"""Most series per panel; further ones get a panel of their own."""

FEW = 50
"""Least number of answers for which an interval is drawn: a wider one would cover the panel."""

Colour = tuple[float, float, float]

Share = bool | Literal["row", "col"]
"""Which panels share an axis: all, those in a row or in a column, or none."""


class Look(NamedTuple):
    """How a series is drawn."""

    colour: Colour
    marker: str


def mechanism(series: str) -> str:
    """The mechanism in a series' name "MIXER key=value …", where MIXER may be "mechanism/variant"."""
    return re.split("[ /]", series, maxsplit=1)[0]


def rank(series: str) -> tuple[int, str, str, list[tuple[str, int, float, str]]]:
    """Sort key of a series: mechanism in the order of FIXED, others by name; then variant; then settings."""
    name = mechanism(series)
    known = list(FIXED)
    variant, *settings = re.split(r" (?=[^ =]+=)", series[len(name) :])
    values = []
    for setting in settings:
        key, _, value = setting.partition("=")
        try:
            values.append((key, 0, float(value), ""))
        except ValueError:
            values.append((key, 1, 0.0, value))
    return (known.index(name) if name in FIXED else len(known), name, variant, values)


def ordered(series: Iterable[str]) -> list[str]:
    """The distinct names, in the order in which legends list them (see `rank`)."""
    return sorted(set(series), key=rank)


def looks(series: Iterable[str]) -> dict[str, Look]:
    """Colour and marker of every series of a figure.

    A mechanism has its fixed colour and marker. Several series of one mechanism share its hue, get lighter in the order
    of the legend, and differ in their markers. Mechanisms without a fixed colour get one of OTHERS.
    """
    names = ordered(series)
    unknown = [name for name in dict.fromkeys(map(mechanism, names)) if name not in FIXED]
    found = {}
    for name in dict.fromkeys(map(mechanism, names)):
        own = [one for one in names if mechanism(one) == name]
        index = unknown.index(name) if name in unknown else 0
        colour, marker = FIXED.get(name, (OTHERS[index % len(OTHERS)], MARKERS[index % len(MARKERS)]))
        markers = [marker, *(other for other in MARKERS if other != marker)]
        for number, one in enumerate(own):
            found[one] = Look(_shade(colour, number, len(own)), markers[number % len(markers)])
    return found


def _shade(colour: str, number: int, count: int) -> Colour:
    """The colour itself for a single series; for one of several, its hue at a lightness from 0.2 to 0.68."""
    hue, light, saturation = colorsys.rgb_to_hls(*mpl.colors.to_rgb(colour))
    if count > 1:
        light = 0.2 + 0.48 * number / (count - 1)
    return colorsys.hls_to_rgb(hue, light, saturation)


def blocks(series: Iterable[str], most: int = MOST) -> list[list[str]]:
    """The ordered series in groups of at most `most`; only a mechanism with more series is split between groups."""
    parts: list[list[str]] = []
    for _, own in groupby(ordered(series), key=mechanism):
        names = list(own)
        count = -(-len(names) // most)
        edges = [round(len(names) * part / count) for part in range(count + 1)]
        for start, stop in pairwise(edges):
            if parts and len(parts[-1]) + stop - start <= most:
                parts[-1] += names[start:stop]
            else:
                parts.append(names[start:stop])
    return parts


@contextmanager
def style() -> Iterator[None]:
    """A context with matplotlib's settings, for drawing and for saving: equal figures then give equal svg files."""
    with (
        sns.axes_style("ticks"),
        sns.plotting_context("notebook", font_scale=0.9),
        mpl.rc_context(
            {"svg.hashsalt": "recall_lab", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
        ),
    ):
        yield


def grid(
    rows: int, columns: int, width: float, height: float, sharex: Share = False, sharey: Share = False
) -> tuple[Figure, np.ndarray]:
    """A figure of rows × columns panels, width and height in inches, and its axes as an array of that shape.

    It is made without pyplot, which would keep it in memory.
    """
    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots(nrows=rows, ncols=columns, squeeze=False, sharex=sharex, sharey=sharey)


def log2_axis(ax: Axes, values: Iterable[float]) -> None:
    """Sets a log₂ x axis with ticks at the values, except those whose labels would overlap."""
    ticks = sorted(set(values))
    apart = ticks[:1]
    for tick in ticks[1:]:
        if np.log2(tick / apart[-1]) > np.log2(ticks[-1] / ticks[0]) / 14:
            apart.append(tick)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(apart))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def length_axis(
    ax: Axes, lengths: Iterable[float], trained: Iterable[float] = (), note: str = "lengths trained on"
) -> None:
    """Sets a log₂ x axis with ticks at the tested lengths; the range of lengths in training is shaded, under a note."""
    lengths, trained = sorted(set(lengths)), sorted(set(trained))
    log2_axis(ax, lengths)
    shown = [*lengths, *trained]
    ax.set_xlim(min(shown) / 2**0.25, max(shown) * 2**0.25)
    if trained:
        _trained(ax, trained[0] / 2**0.12, trained[-1] * 2**0.12, (trained[0] * trained[-1]) ** 0.5, note)
    ax.set_xlabel("sequence length n")


def number_axis(ax: Axes, values: Iterable[float], label: str, trained: Iterable[float] = ()) -> None:
    """Sets an x axis for a parameter of a task: log₂ if its values are positive and span a factor of 8, else linear."""
    values, trained = sorted(set(values)), sorted(set(trained))
    if values[0] > 0 and values[-1] >= 8 * values[0]:
        length_axis(ax, values, trained, "trained on")
    else:
        margin = 0.03 * (values[-1] - values[0] or 1)
        ax.xaxis.set_major_locator(FixedLocator(values, nbins=8))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        if trained:
            middle = (trained[0] + trained[-1]) / 2
            _trained(ax, trained[0] - margin, trained[-1] + margin, middle, "trained on")
    ax.set_xlabel(label)


def _trained(ax: Axes, low: float, high: float, middle: float, note: str) -> None:
    """Shades the range of values in training, with a note above it."""
    ax.axvspan(low, high, color="0.93", zorder=0, label="_trained")
    ax.text(
        middle, 1.01, note, transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize="small",
        color="0.45",
    )  # fmt: skip


def same_range(axes: Sequence[Axes]) -> None:
    """Gives all panels the same x range, the smallest that contains every one; ticks are unchanged."""
    low, high = np.array([ax.get_xlim() for ax in axes]).T
    for ax in axes:
        ax.set_xlim(low.min(), high.max())


def accuracy_axis(ax: Axes, chance: float | None = None, note: bool = True) -> None:
    """Sets a y axis from 0 to 1, with a dotted line at chance and, if `note`, its value as text at the left end."""
    ax.set_ylim(-0.02, 1.03)
    if chance is None:
        return
    ax.axhline(chance, color="0.5", linestyle=":", linewidth=1, zorder=1)
    if note:
        ax.text(
            0.01, chance, f"chance {chance:.2g}", transform=ax.get_yaxis_transform(), ha="left", va="bottom",
            fontsize="small", color="0.4", zorder=1,
        )  # fmt: skip


def lines(ax: Axes, points: pd.DataFrame, x: str, shown: Mapping[str, Look], band: bool = True) -> None:
    """Draws one line per series in `shown` over the column `x` of averaged points, with the interval as a band."""
    for name, look in shown.items():
        line = points[points["series"] == name].sort_values(x)
        if line.empty:
            continue
        ax.plot(line[x], line["mean"], color=look.colour, marker=look.marker, markersize=5, label=name, clip_on=False)
        if band:
            ax.fill_between(line[x], line["low"], line["high"], color=look.colour, alpha=0.18, linewidth=0)


def nested(series: Sequence[str]) -> dict[str, float]:
    """Series → marker size, decreasing, so that several hollow markers at the same point are all visible."""
    return {name: 10 - 7 * number / max(1, len(series) - 1) for number, name in enumerate(series)}


def legend_height(labels: Iterable[str], title: str = "") -> float:
    """Height in inches that `legend` needs for these labels and this title."""
    return 0.4 + 0.2 * sum(text.count("\n") + 1 for text in (*labels, title))


def legend(ax: Axes, labels: Mapping[str, str], shown: Mapping[str, Look], title: str = "") -> None:
    """Adds the legend of a row of panels, to the right of all panels and level with `ax`: series → label."""
    handles = [
        Line2D([], [], color=shown[name].colour, marker=shown[name].marker, markersize=5, label=label)
        for name, label in labels.items()
    ]
    legend_beside(ax, handles, title)


def legend_beside(ax: Axes, handles: Sequence[Artist], title: str = "") -> None:
    """Adds a legend to the right of all panels, level with `ax`. The panels leave room for the widest one."""
    made = ax.get_figure(root=True)
    assert isinstance(made, Figure)
    added = made.legend(
        handles=handles, title=title or None, loc="upper left", borderaxespad=0, frameon=False, fontsize="small",
        title_fontsize="small", alignment="left",
    )  # fmt: skip
    added.set_in_layout(False)  # its height must not stretch the row of panels
    renderer = FigureCanvasAgg(made).get_renderer()
    width = max(one.get_window_extent(renderer).width for one in made.legends) / made.dpi
    left = 1 - (width + 0.15) / made.get_figwidth()
    engine = made.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, 0, left, 1))
    added.set_bbox_to_anchor((left, 1.02), blended_transform_factory(made.transFigure, ax.transAxes))


def shades(count: int) -> list[Colour]:
    """`count` colours from light to dark, for ordered quantities rather than mechanisms."""
    return sns.color_palette("viridis_r", count + 1)[1:]
