"""Phase diagram of recall: accuracy over the number of pairs and the width of a key, with the predicted capacity."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recall_lab.figure import base, heatmap, style
from recall_lab.results import summarise
from recall_lab.theory import linear_attention

WIDTH, PAIRS = "mixer.d_key", "task.pairs"


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("recall_phase_diagram", figure) if mqar was tested at several numbers of pairs and several d_key: one
    heat map per series with the mean accuracy over seeds in per cent.

    Red, for a state of fixed size: capacity with random keys and V/2 candidates, of linear attention (solid) and of
    least squares, n = d_key (dashed). Trained keys can exceed both. White: the largest number of pairs in training.
    """
    if not {WIDTH, PAIRS, "task.vocab"} <= set(table):
        return
    table = base.by_width(table[(table["task"] == "mqar") & table[WIDTH].notna()])
    tested = table[(table["metric"] == "accuracy") & (table["split"] == "test")]
    if tested.empty or tested[WIDTH].nunique() < 2 or tested[PAIRS].nunique() < 2:
        return
    rows = base.facets(tested, base.free(tested, [WIDTH, PAIRS]))
    points = summarise(tested, ["series", WIDTH, PAIRS], ("accuracy",))
    parts = base.blocks(tested["series"], min(3, heatmap.across(tested[WIDTH].nunique())))
    columns = max(map(len, parts))
    with style.style():
        made, axes = style.grid(len(parts) * len(rows), columns, 0.6 + 2 * len(parts) * len(rows), width=style.PAGE)
        widths, pairs = (np.array(sorted(tested[name].unique().tolist()), float) for name in (WIDTH, PAIRS))
        for ax, name, part in heatmap.panels(axes, parts, rows, "pairs"):
            own = summarise(part, ["series", PAIRS, WIDTH], ("accuracy",))
            grid = own.pivot(index=PAIRS, columns=WIDTH, values="mean").reindex(index=pairs, columns=widths)
            heatmap.cells(ax, grid)
            _lines(ax, table[table["series"] == name], widths, pairs)
            ax.set_xlabel("d_key")
            ax.set_title(name, fontsize="medium")
        heatmap.colour_bar(made, axes)
        made.suptitle(
            f"mqar: accuracy by pairs and width of a key, {base.replicates(points)}; white: most pairs in training\n"
            "red: capacity for random keys, of linear attention (solid) and of least squares (dashed)",
            fontsize="medium",
        )
    yield "recall_phase_diagram", made


def _lines(ax: Axes, run: pd.DataFrame, widths: np.ndarray, pairs: np.ndarray) -> None:
    """Draws the largest number of pairs in training and, for a state of fixed size, the predicted capacities."""
    trained = run.loc[run["split"] == "validation", PAIRS].max()
    if not pd.isna(trained):
        ax.axhline((pairs <= trained).sum(), color="white", linewidth=2)
    state = run[run["metric"] == "state_elements"].groupby(WIDTH)["value"].nunique()
    if state.empty or (state > 1).any():
        return
    fine = np.geomspace(widths[0], widths[-1], 200)
    laws = [(fine, "--")]
    if "mixer.d_value" not in run or (run["mixer.d_value"].fillna(run[WIDTH]) == run[WIDTH]).all():
        laws.append((np.asarray(linear_attention.capacity(fine, fine, run["task.vocab"].max() / 2)), "-"))
    for capacity, style_of_line in laws:
        # Cell i spans i to i + 1, so its centre, i + 1/2, has the value of its row or column.
        x = np.interp(np.log(fine), np.log(widths), np.arange(len(widths)) + 0.5)
        y = np.interp(np.log(np.maximum(capacity, 1e-9)), np.log(pairs), np.arange(len(pairs)) + 0.5, -9, 99)
        inside = (y >= 0) & (y <= len(pairs))
        ax.plot(x[inside], y[inside], color="#ff3b30", linestyle=style_of_line, linewidth=1.6)
