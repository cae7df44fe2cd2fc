"""Phase diagram of recall: accuracy over pairs and the width of the state, with theory's capacity."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from recall_lab import theory
from recall_lab.figure import style
from recall_lab.results import summarise


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """(name, figure) where mqar was tested at several numbers of pairs with several widths of key: a heatmap a
    mechanism, numbers the mean accuracy over runs in per cent.

    Lines, for keys and values of that width drawn at random and V/2 candidates: linear attention's capacity
    (solid), least squares' (n = d, dashed), where the state is of fixed size. Trained keys can
    do better than random ones.
    """
    if "mixer.d_key" not in table or "task.pairs" not in table:
        return
    table = table[(table["task"] == "mqar") & table["mixer.d_key"].notna()]
    points = summarise(table, ["mixer", "mixer.d_key", "task.pairs"], ("accuracy",))
    if points["mixer.d_key"].nunique() < 2 or points["task.pairs"].nunique() < 2:
        return
    mechanisms = style.ordered(points["mixer"])
    widths, pairs = (np.array(sorted(points[name].unique()), float) for name in ("mixer.d_key", "task.pairs"))
    trained = table.loc[table["split"] == "validation", "task.pairs"].max()
    candidates = table["task.vocab"].max() / 2
    state = table[table["metric"] == "state_elements"].groupby(["mixer", "mixer.d_key"])["value"]
    fixed = (state.nunique() == 1).groupby("mixer").all()
    fine = np.geomspace(widths[0], widths[-1], 200)
    with style.style():
        made, axes = style.figure(1.4 + 2.9 * len(mechanisms), 3.8, ncols=len(mechanisms), squeeze=False, sharey=True)
        for ax, mechanism in zip(axes[0], mechanisms, strict=True):
            own = points[points["mixer"] == mechanism]
            grid = own.pivot(index="task.pairs", columns="mixer.d_key", values="mean").reindex(
                index=pairs, columns=widths
            )
            image = style.heatmap(ax, 100 * grid)
            for capacity, line in ((theory.linear_capacity(fine, fine, candidates), "-"), (fine, "--")):
                if not fixed[mechanism]:
                    continue
                x, y = (np.interp(np.log(z), np.log(ticks), range(len(ticks)), -9, 99)
                        for z, ticks in ((fine, widths), (np.maximum(capacity, 1e-9), pairs)))  # fmt: skip
                inside = (y >= -0.5) & (y <= len(pairs) - 0.5)
                ax.plot(x[inside], y[inside], color="#ff3b30", linestyle=line, linewidth=1.6)
            ax.axhline((pairs <= trained).sum() - 0.5, color="white", linewidth=2)
            ax.set_yticks(range(len(pairs)), [f"{value:.0f}" for value in pairs])
            ax.set_xlabel("d_key = d_value")
            ax.set_title(mechanism, fontsize="medium")
        axes[0, 0].set_ylabel("pairs")
        made.colorbar(image, ax=axes, label="accuracy, %", shrink=0.8)
        made.suptitle(
            f"mqar: recall over pairs and state; {style.seeds(points['runs'])}, trained up to {trained:.0f} pairs\n"
            "red: capacity for random keys, of linear attention (solid) and of least squares (dashed)",
            fontsize="medium",
        )
    yield "recall_phase_diagram", made
