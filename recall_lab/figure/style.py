"""The look of figures: colours, markers and order of series, panels, axes and lines."""

import colorsys
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation, Transform

from recall_lab.figure.emphasis import emphasised, toned

FIXED = {
    "softmax": ("#111111", "o"),
    "forgetting": ("#6b6b6b", "s"),
    "linear": ("#1f77b4", "v"),
    "based": ("#17a2c4", "p"),
    "gated_linear": ("#009e73", "^"),
    "gla": ("#7fb800", "<"),
    "mamba2": ("#0b7a3b", ">"),
    "delta_rule": ("#d62728", "D"),
    "gated_delta": ("#ff7f0e", "d"),
    "kda": ("#e377c2", "P"),
    "rwkv7": ("#9467bd", "X"),
    "mesa": ("#8c1d6b", "*"),
    "log_linear": ("#3b4cc0", "h"),
    "rnn": ("#a0705f", "1"),
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
    "module": ("#5a5a2a", "4"),
}
"""Colour and marker of the known mechanisms, in the order in which legends list them."""

OTHERS = (
    "#080891", "#da25f4", "#910808", "#6489f7", "#91caca", "#325367", "#7b2bab", "#f76476", "#122d4b", "#cb0b83",
    "#2525f4", "#0bcb83",
)  # fmt: skip
"""Colours for other mechanisms, in alphabetical order: far (in OKLab) from the colours in FIXED and from each other."""

MARKERS = "osv^D<>PXd*ph8H"

MOST = 10
"""Most series per panel; further ones get a panel of their own."""

FEW = 50
"""Least number of answers for which an interval is drawn: a wider one would cover the panel."""

COLUMN, PAGE = 3.3, 7.0
"""Widths of figures in inches, those of one column of a paper, for a single panel, and of two, for several panels."""

APART, WIDEST = 1.3, 6.0
"""Points (of print) between the bars of two series at the same x, and most points between the first and the last;
six and ten times as many where there is only one x."""

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


def rank(series: str) -> tuple[bool, int, str, str, list[tuple[str, int, float, str]]]:
    """Sort key of a series: emphasised last; mechanism in the order of FIXED, others by name; variant; settings."""
    name = mechanism(series)
    variant, *settings = re.split(r" (?=[^ =]+=)", series[len(name) :])
    values = []
    for setting in settings:
        key, _, value = setting.partition("=")
        try:
            values.append((key, 0, float(value), ""))
        except ValueError:
            values.append((key, 1, 0.0, value))
    return (emphasised(series), list(FIXED).index(name) if name in FIXED else len(FIXED), name, variant, values)


def ordered(series: Iterable[str]) -> list[str]:
    """The distinct names, in the order in which legends list them (see `rank`)."""
    return sorted(set(series), key=rank)


def looks(series: Iterable[str]) -> dict[str, Look]:
    """Colour and marker of every series of a figure.

    A mechanism has its fixed colour and marker. Several series of one mechanism share its hue, get lighter in the order
    of the legend, and differ in their markers. Mechanisms without a fixed colour get one of OTHERS. Beside emphasised
    series, the others are pale.
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
            found[one] = Look(toned(one, _shade(colour, number, len(own))), markers[number % len(markers)])
    return found


def _shade(colour: str, number: int, count: int) -> Colour:
    """The colour itself for a single series; for one of several, its hue at a luma (Rec. 601) from 0.16 to 0.66."""
    hue, light, saturation = colorsys.rgb_to_hls(*mpl.colors.to_rgb(colour))
    if count > 1:
        lights = np.linspace(0, 1, 101)
        luma = [np.dot(colorsys.hls_to_rgb(hue, one, saturation), (0.299, 0.587, 0.114)) for one in lights]
        light = float(np.interp(0.16 + 0.5 * number / (count - 1), luma, lights))
    return colorsys.hls_to_rgb(hue, light, saturation)


@contextmanager
def style() -> Iterator[None]:
    """A context with matplotlib's settings, for drawing and for saving: equal figures then give equal files.

    Text has 6.7 to 8 points at the size of the figure. The font is the one that matplotlib brings along.
    """
    with (
        sns.axes_style("ticks"),
        sns.plotting_context("paper", font_scale=0.84),
        mpl.rc_context(
            {"svg.hashsalt": "recall_lab", "svg.fonttype": "none", "pdf.fonttype": 42, "font.sans-serif": "DejaVu Sans",
             "figure.titlesize": "medium", "axes.linewidth": 0.8, "xtick.major.size": 3, "ytick.major.size": 3,
             "xtick.major.width": 0.8, "ytick.major.width": 0.8, "axes.spines.top": False, "axes.spines.right": False}
        ),
    ):  # fmt: skip
        yield


def grid(
    rows: int, columns: int, height: float, sharex: Share = False, sharey: Share = False, width: float | None = None
) -> tuple[Figure, np.ndarray]:
    """A figure of rows × columns panels, and its axes as an array of that shape. Width and height are in inches; by
    default, a single panel has the width COLUMN, and several panels together have the width PAGE.

    It is made without pyplot, which would keep it in memory.
    """
    if width is None:
        width = COLUMN if rows == columns == 1 else PAGE
    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots(nrows=rows, ncols=columns, squeeze=False, sharex=sharex, sharey=sharey)


def log2_axis(ax: Axes, values: Iterable[float]) -> None:
    """Sets a log₂ x axis with ticks at the values, at most 15 of them."""
    ticks = sorted(set(values))
    apart = ticks[:1]
    for tick in ticks[1:]:
        if np.log2(tick / apart[-1]) > np.log2(ticks[-1] / ticks[0]) / 14:
            apart.append(tick)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(apart))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def length_axis(ax: Axes, lengths: Iterable[float], trained: Iterable[float] = ()) -> None:
    """Sets a log₂ x axis with ticks at the tested lengths; the range of lengths in training is shaded, under a note."""
    lengths, trained = sorted(set(lengths)), sorted(set(trained))
    log2_axis(ax, lengths)
    shown = [*lengths, *trained]
    ax.set_xlim(min(shown) / 2**0.25, max(shown) * 2**0.25)
    if trained:
        _trained(ax, trained[0] / 2**0.12, trained[-1] * 2**0.12, (trained[0] * trained[-1]) ** 0.5)
    ax.set_xlabel("sequence length n")


def number_axis(ax: Axes, values: Iterable[float], label: str, trained: Iterable[float] = ()) -> None:
    """Sets an x axis for a parameter of a task: log₂ if its values are positive and span a factor of 8, else linear."""
    values, trained = sorted(set(values)), sorted(set(trained))
    if values[0] > 0 and values[-1] >= 8 * values[0]:
        length_axis(ax, values, trained)
    else:
        margin = 0.03 * (values[-1] - values[0] or 1)
        ax.xaxis.set_major_locator(FixedLocator(values, nbins=8))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        if trained:
            middle = (trained[0] + trained[-1]) / 2
            _trained(ax, trained[0] - margin, trained[-1] + margin, middle)
    ax.set_xlabel(label)


def _trained(ax: Axes, low: float, high: float, middle: float) -> None:
    """Shades the range of values in training, with a note above it."""
    ax.axvspan(low, high, color="0.93", zorder=0, label="_trained")
    ax.text(
        middle, 1.0, "trained on", transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize="small",
        color="0.45",
    )  # fmt: skip


def same_range(axes: Sequence[Axes]) -> None:
    """Gives all panels the same x range, the smallest that contains every one; ticks are unchanged."""
    low, high = np.array([ax.get_xlim() for ax in axes]).T
    for ax in axes:
        ax.set_xlim(low.min(), high.max())


def accuracy_axis(ax: Axes, chance: float | None = None) -> None:
    """Sets a y axis from 0 to 1, with a dotted line at chance, whose value stands at its right end."""
    ax.set_ylim(-0.02, 1.03)
    if chance is None:
        return
    ax.axhline(chance, color="0.5", linestyle=":", linewidth=1, zorder=1)
    ax.text(
        1.01, chance, f"{chance:.2g}", transform=ax.get_yaxis_transform(), ha="left", va="center", fontsize="small",
        color="0.4",
    )  # fmt: skip


def lines(ax: Axes, points: pd.DataFrame, x: str, shown: Mapping[str, Look], bars: bool = True) -> dict[str, Transform]:
    """Draws one line per series in `shown` over the column `x` of averaged points, with the intervals as thin bars.

    Where there are bars, the series are shifted sideways by a few points of print, so that each bar can be seen.
    Returns the transform from data to pixels of each series that was drawn.
    """
    drawn: dict[str, Transform] = {}
    bars = bars and bool((points["high"] > points["low"]).any())
    apart, widest = (APART, WIDEST) if points[x].nunique() > 1 else (6 * APART, 10 * WIDEST)
    for number, (name, look) in enumerate(shown.items()):
        line = points[points["series"] == name].sort_values(x)
        if line.empty:
            continue
        curve = ax.plot(
            line[x], line["mean"], color=look.colour, marker=look.marker, label=name, clip_on=False, markersize=3.5
        )
        curve[0].set_linewidth(curve[0].get_linewidth() * (1 + emphasised(name) / 2))
        made: list[Artist] = [*curve]
        drawn[name] = ax.transData
        if bars:
            line = line[line["high"] > line["low"]]
            made.append(ax.vlines(line[x], line["low"], line["high"], color=look.colour, linewidth=0.8, clip_on=False))
            across = (number - (len(shown) - 1) / 2) * min(apart, widest / len(shown)) / 72
            drawn[name] += ScaledTranslation(across, 0, figure_of(ax).dpi_scale_trans)
            for one in made:  # later than drawn, so that the limits of the axes are those of the points
                one.set_transform(drawn[name])
    return drawn


def figure_of(ax: Axes) -> Figure:
    """The figure that the panel is in."""
    made = ax.get_figure(root=True)
    assert isinstance(made, Figure)
    return made


def nested(series: Sequence[str]) -> dict[str, float]:
    """Series → marker size, decreasing, so that several hollow markers at the same point are all visible."""
    return {name: 7 - 4.5 * number / max(1, len(series) - 1) for number, name in enumerate(series)}


def shades(count: int) -> list[Colour]:
    """`count` colours from light to dark, for ordered quantities rather than mechanisms."""
    return sns.color_palette("viridis_r", count + 1)[1:]
