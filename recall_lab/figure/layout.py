"""The layout of a figure, computed once before it is written, without tick labels that overlap."""

from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

GAP = 3
"""Least distance between two labels of an axis, in pixels at 100 per inch."""


def arrange(made: Figure) -> None:
    """Computes the layout, keeps it for all formats, and removes labels of logarithmic x axes that would overlap.

    The ticks remain. On a crowded axis only every second, third … label is kept, counted from the last.
    """
    made.draw_without_rendering()
    made.set_layout_engine("none")
    for ax in made.axes:
        if ax.axison and ax.get_xscale() == "log":
            _thin(ax)


def _thin(ax: Axes) -> None:
    shown = [label for label in ax.get_xticklabels() if label.get_text() and label.get_visible()]
    if not shown:  # panels with a common axis share the texts of its labels, which only the lowest panel shows
        return
    boxes = [label.get_window_extent() for label in shown]
    for every in range(1, len(shown) + 1):
        kept = list(range(len(shown) - 1, -1, -every))[::-1]
        if all(boxes[b].x0 - boxes[a].x1 >= GAP for a, b in pairwise(kept)):
            break
    words = {round(shown[i].get_position()[0], 9): shown[i].get_text() for i in kept}
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.get(round(value, 9), "")))
