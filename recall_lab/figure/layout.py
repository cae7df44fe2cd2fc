"""The layout of a figure, computed once before it is written, without tick labels that touch."""

from collections.abc import Container
from itertools import pairwise
from typing import Literal

import numpy as np
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, FuncFormatter

GAP = 2
"""Least distance between two labels of an axis, in pixels at 100 per inch."""


def arrange(made: Figure) -> None:
    """Computes the layout, keeps it for all formats, and removes tick labels that would touch. The ticks remain.

    On a crowded axis labels are kept from the last one on, those of major ticks first: each that is far enough from all
    kept before to leave room for the widest. Evenly spaced ticks thus show every second, third … label; where they are
    not evenly spaced, the first label is kept as well.
    """
    made.draw_without_rendering()
    made.set_layout_engine("none")
    for ax in made.axes:
        if ax.axison:
            _thin(ax.xaxis)
            _thin(ax.yaxis)


def extents(axis: Axis, which: Literal["major", "minor", "both"] = "both") -> dict[float, tuple[float, float]]:
    """Value → where its label begins and ends along the axis, in pixels, in their order on the page.

    Labels out of view are not drawn, and of panels with a common axis only the outer one shows labels.
    """
    along = 0 if isinstance(axis, XAxis) else 1
    low, high = sorted(axis.get_view_interval())
    margin = 1e-9 * (high - low)
    found = {}
    for label in axis.get_ticklabels(which=which):
        value = float(label.get_position()[along])
        if label.get_text() and label.get_visible() and low - margin <= value <= high + margin:
            start, end = label.get_window_extent().get_points()[:, along]
            found[value] = (float(start), float(end))
    return dict(sorted(found.items(), key=lambda item: sum(item[1])))


def _thin(axis: Axis) -> None:
    found = extents(axis)
    if all(later[0] - sooner[1] >= GAP for sooner, later in pairwise(found.values())):
        return
    apart = max(end - start for start, end in found.values()) + GAP
    middle = {value: (start + end) / 2 for value, (start, end) in found.items()}
    kept: set[float] = set()
    major, minor = (list(reversed(extents(axis, which))) for which in ("major", "minor"))
    steps = np.diff([middle[value] for value in major])
    even = np.allclose(steps, steps[:1], atol=1)
    for value in (*major, *minor) if even else (*major[:1], *major[-1:], *major, *minor):
        if all(abs(middle[value] - middle[other]) >= apart for other in kept):
            kept.add(value)
    axis.set_major_formatter(_only(kept, axis.get_major_formatter(), axis.get_majorticklocs()))
    axis.set_minor_formatter(_only(kept, axis.get_minor_formatter(), axis.get_minorticklocs()))


def _only(kept: Container[float], before: Formatter, values: np.ndarray) -> Formatter:
    """A formatter with the texts and the offset of another, at the values in `kept` only."""
    every = values.tolist()
    words = {value: text for value, text in zip(every, before.format_ticks(every), strict=True) if value in kept}
    after = FuncFormatter(lambda value, _: words.get(value, ""))
    after.set_offset_string(before.get_offset())
    return after
