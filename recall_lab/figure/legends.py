"""Legends: beside the panels of a figure, or below the panel of a figure of one column's width."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.transforms import blended_transform_factory

from recall_lab.figure import style


def height(labels: Iterable[str], title: str = "") -> float:
    """Height in inches that a legend beside the panels needs for these labels and this title."""
    return 0.25 + 0.145 * sum(text.count("\n") + 1 for text in (*labels, _wrapped(title)))


def line(look: style.Look, label: str, dashes: Literal["-", "--", ":"] = "-") -> Line2D:
    """The handle of a series."""
    return Line2D([], [], color=look.colour, marker=look.marker, markersize=3.5, linestyle=dashes, label=label)


def series(ax: Axes, labels: Mapping[str, str], shown: Mapping[str, style.Look], title: str = "") -> None:
    """Adds the legend of a row of panels, to the right of all panels and level with `ax`: series → label."""
    add(ax, [line(shown[name], label) for name, label in labels.items()], title)


def add(ax: Axes, handles: Sequence[Artist], title: str = "") -> None:
    """Adds a legend to the right of all panels, level with `ax`. The panels leave room for the widest one.

    In a figure of one column's width it is below the panel instead, and makes the figure higher.
    """
    made = style.figure_of(ax)
    engine = made.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    added = _legend(made, handles, title)
    if made.get_figwidth() == style.COLUMN:
        size = _size(added)
        if 2 * size[0] < style.COLUMN and len(handles) > 2:
            added.remove()
            added = _legend(made, handles, title, 2)
            size = _size(added)
        total = 0.75 * style.COLUMN + size[1]
        made.set_figheight(total)
        engine.set(rect=(0, size[1] / total, 1, 1 - size[1] / total))
        added.set_bbox_to_anchor((0.01, size[1] / total), made.transFigure)
        return
    left = 1 - (max(_size(one)[0] for one in made.legends) + 0.1) / made.get_figwidth()
    engine.set(rect=(0, 0, left, 1))
    added.set_bbox_to_anchor((left, 1.02), blended_transform_factory(made.transFigure, ax.transAxes))


def _legend(made: Figure, handles: Sequence[Artist], title: str, columns: int = 1) -> Legend:
    added = made.legend(
        handles=handles, title=_wrapped(title) or None, ncols=columns, loc="upper left", borderaxespad=0, frameon=False,
        fontsize="small", title_fontsize="small", alignment="left",
    )  # fmt: skip
    added.set_in_layout(False)  # its height must not stretch the row of panels
    return added


def _wrapped(title: str) -> str:
    """The title with one line for each statement in it."""
    return title.replace("; ", "\n")


def _size(added: Legend) -> tuple[float, float]:
    """Width and height in inches."""
    made = added.get_figure(root=True)
    assert isinstance(made, Figure)
    extent = added.get_window_extent(FigureCanvasAgg(made).get_renderer())
    return extent.width / made.dpi, extent.height / made.dpi
