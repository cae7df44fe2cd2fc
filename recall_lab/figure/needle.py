"""Needle in a haystack: accuracy by depth and length, one heat map per series and haystack."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from recall_lab.figure import base, heatmap, style
from recall_lab.results import summarise

DEPTH, LENGTH = "task.depth", "task.length"


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Yields ("needle", figure) if needle was tested at several depths: heat maps of depth × length, one column per
    series, one row per haystack and combination of other parameters that vary.

    Cells: mean accuracy over seeds in per cent. All heat maps have the same cells, blank where a series was not tested.
    White line: the longest length in training.
    """
    if not {DEPTH, LENGTH} <= set(table):
        return
    table = table[(table["task"] == "needle") & table[LENGTH].notna()]
    tested = table[table[DEPTH].notna() & (table["metric"] == "accuracy") & (table["split"] == "test")]
    if tested[DEPTH].nunique() < 2:
        return
    rows = base.facets(tested, base.free(tested, [DEPTH, LENGTH]))
    points = summarise(tested, ["series", DEPTH, LENGTH], ("accuracy",))
    depths, lengths = sorted(tested[DEPTH].unique().tolist()), sorted(tested[LENGTH].unique().tolist())
    trained = table[table["split"] == "validation"].groupby("series")[LENGTH].max()
    parts = base.blocks(tested["series"], heatmap.across(len(lengths)))
    columns = max(map(len, parts))
    with style.style():
        height = 0.8 + len(parts) * len(rows) * (0.2 * len(depths) + 0.25)
        made, axes = style.grid(len(parts) * len(rows), columns, height, width=style.PAGE)
        for ax, name, part in heatmap.panels(axes, parts, rows, "depth (%)"):
            own = summarise(part, ["series", DEPTH, LENGTH], ("accuracy",))
            grid = own.pivot(index=DEPTH, columns=LENGTH, values="mean").reindex(index=depths, columns=lengths)
            heatmap.cells(ax, grid.rename(index=lambda depth: 100 * depth))
            if name in trained:
                ax.axvline(sum(n <= trained[name] for n in lengths), color="white", linewidth=2)
        for block, names in enumerate(parts):
            for ax, name in zip(axes[block * len(rows)], names, strict=False):
                ax.set_title(name.replace("/", "\n").replace(" ", "\n"), fontsize="medium")
            for ax in axes[(block + 1) * len(rows) - 1][: len(names)]:
                ax.set_xlabel("length n")
        heatmap.colour_bar(made, axes)
        made.suptitle(
            f"needle: accuracy by depth and length, {base.replicates(points)}; white line: longest length in training",
        )
    yield "needle", made
