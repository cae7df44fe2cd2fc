"""Sliding windows on mqar: measured accuracy against the coverage law, which has no free parameter."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from recall_lab import theory
from recall_lab.figure import style
from recall_lab.results import summarise
from recall_lab.task.mqar import MQAR

CELL = ["task.vocab", "task.length", "task.pairs", "task.gap_exponent"]
SEQUENCES = 8000
"""Drawn of every cell for the law's distances: a standard error of the coverage of at most .003 with 4 pairs."""


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """(name, figure) for one-layer windows on mqar: accuracy over w beside its law, and accuracy against the law.

    The law: an answer is covered, or guessed among V/2 values. Pairs can be read at the value's place or, through a
    short convolution of c, up to c − 2 places later, so that a trained window lies between the law at w and the law
    at w + c − 2: the band. Bars: interval over runs.
    """
    if "mixer.budget" not in table:
        return
    table = table[(table["mixer"] == "window") & (table["task"] == "mqar") & (table["model.layers"] == 1)]
    points = summarise(table, ["mixer.short_conv", "mixer.budget", *CELL], ("accuracy",))
    if points.empty or points["mixer.budget"].nunique() < 2:
        return
    points["law"] = [_law(facts)[0] for facts in points.to_dict("records")]
    convolutions = sorted(points["mixer.short_conv"].unique())
    cells = points[CELL].drop_duplicates().sort_values(CELL).to_records(index=False).tolist()
    with style.style():
        made, axes = style.figure(5.2 * len(convolutions), 7.6, nrows=2, ncols=len(convolutions), squeeze=False)
        palette = style.shades(len(cells))
        for column, width in enumerate(convolutions):
            part = points[points["mixer.short_conv"] == width]
            over, against = axes[:, column]
            for cell, colour in zip(cells, palette, strict=True):
                own = part[(part[CELL] == list(cell)).all(axis=1)].sort_values("mixer.budget")
                grid = np.unique(np.geomspace(own["mixer.budget"].min(), own["mixer.budget"].max(), 40).round())
                facts = dict(zip(CELL, cell, strict=True)) | {"mixer.short_conv": width}
                law, late = np.array([_law(facts | {"mixer.budget": w}) for w in grid]).T
                label = f"n={cell[1]:.0f}, {cell[2]:.0f} pairs"
                over.plot(grid, law, color=colour, linewidth=1)
                over.fill_between(grid, law, late, color=colour, alpha=0.18, linewidth=0)
                error = [own["mean"] - own["low"], own["high"] - own["mean"]]
                look = {"color": colour, "marker": "o", "markersize": 5, "linestyle": "none", "capsize": 2}
                over.errorbar(own["mixer.budget"], own["mean"], error, label=label, **look)
                against.errorbar(own["law"], own["mean"], error, **look)
            against.axline((0, 0), slope=1, color="0.5", linewidth=1, zorder=0)
            style.length_axis(over, part["mixer.budget"])
            over.set_xlabel("window w, in tokens with the current one")
            over.set_title(f"short convolution of c = {width:.0f}")
            against.set_xlabel("coverage law at w")
            for ax in (over, against):
                style.accuracy_axis(ax)
                ax.set_ylabel("accuracy per scored token")
        made.legend(
            *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False,
            title=f"lines: the law at w; bands: up to w + c − 2; points: {style.seeds(points['runs'], 'bars')}",
            fontsize="small", title_fontsize="small",
        )  # fmt: skip
    yield "window_coverage", made


def _law(facts: dict) -> tuple[float, float]:
    """Expected accuracy where pairs are read at the value's place, and as late as the convolution allows."""
    distance, chance = _distances(*(facts[name] for name in CELL))
    reach = theory.window_reach(facts["mixer.budget"], np.array([2, facts["mixer.short_conv"]]))
    covered = theory.window_coverage(distance, reach)
    early, late = covered + (1 - covered) * chance
    return float(early), float(late)


@cache
def _distances(
    vocab: float | int, length: float | int, pairs: float | int, gap_exponent: float | int
) -> tuple[np.ndarray, float]:
    """Distances between queries and values of a cell, and the chance level."""
    task = MQAR(vocab=int(vocab), length=int(length), pairs=int(pairs), gap_exponent=gap_exponent)
    batch = task.sample(SEQUENCES, np.random.default_rng(0))
    return batch.age[batch.scored], task.chance
