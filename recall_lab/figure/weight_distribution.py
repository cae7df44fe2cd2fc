"""How much weight the one right token keeps as others join it."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from recall_lab import theory
from recall_lab.figure import style

IMPORTANT, OTHER = 100.0, 1.0


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """The target's share of Σ|A| over the tokens in sight: for raw scores [100, 1, …, 1] by formula, and as measured.

    Measured: median over queries and the span of the middle 90 %, the mean of each over runs. Dotted: theory for random
    unit keys (linear; softmax with logits √d k·q). One figure a task and key width.
    """
    if "tokens" not in table:
        return
    rows = table[(table["metric"] == "target_share_by_tokens") & table["tokens"].notna()]
    for (task, width), part in rows.groupby(["task", "d_key"]):
        longest = part.groupby("run")["tokens"].transform("max")
        part = part[longest > 0.9 * longest.max()]
        with style.style():
            made, (raw, measured) = style.figure(10.5, 3.9, ncols=2, sharey=True)
            n = np.geomspace(1, 1e4, 200)
            for name, law in (("softmax", theory.raw_share_softmax), ("linear", theory.raw_share_linear)):
                raw.plot(n, law(n, IMPORTANT, OTHER), color=style.look(name)[0], label=name)
            raw.set_title(f"scores [{IMPORTANT:.0f}, 1, …, 1], by formula")
            raw.set_ylabel("share of the right token in Σ|A|")
            raw.legend(frameon=False)
            for name in style.ordered(part["series"]):
                line = part[part["series"] == name].pivot_table(index="tokens", columns="statistic", values="value")
                colour, marker = style.look(name)
                measured.plot(line.index, line["q50"], color=colour, marker=marker, markersize=4, linewidth=1.2)
                measured.fill_between(line.index, line["q05"], line["q95"], color=colour, alpha=0.08, linewidth=0)
            if "oracle.d_key" in part and part["oracle.d_key"].notna().any():
                seen = np.geomspace(1, part["tokens"].max(), 100)
                for name, share in (
                    ("linear", theory.linear_share(seen, width)),
                    ("softmax", theory.softmax_mass(seen, width, width**0.5)),
                ):
                    if name in set(part["mixer"]):
                        measured.plot(seen, share, ":", color=style.look(name)[0], linewidth=1.4)
            title = f"{task}, d_key = {width:.0f}"
            measured.set_title(title)
            for ax in (raw, measured):
                ax.set_xscale("log")
                ax.set_yscale("log")
                ax.set_ylim(1e-4, 1.5)
                ax.set_xlabel("tokens in sight, n")
            style.legend(made, style.ordered(part["series"]), "median, middle 90 % of queries;\ndotted: theory")
        yield f"weight_distribution_{task}_d{width:.0f}", made
