"""Capacity: what memories of random keys and values give back as they fill, on the lines that theory draws."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from recall_lab import theory
from recall_lab.figure import style
from recall_lab.results import average

SUMS = ("linear", "gated_linear", "gla", "mamba2", "log_linear")
DELTAS = ("delta_rule", "gated_delta", "kda", "rwkv7")
BUDGETS = ("window", "sink_window", "heavy_hitter", "merging")

ASSUMED = {"keys": "random", "centered": False, "passes": 1, "overwrites": 0}
ASSUMED |= {"gates.write": 1, "gates.a": 1, "gates.level": 1, "gates.skip": 0}
"""Settings of the oracle at which the laws hold; decay and β are theirs to vary."""


def draw(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Top-1 and error of keyed read-outs by the oracle over n/d_key, a column of panels a width; lines: theory."""
    rows = style.readings(table)
    if rows.empty:
        return
    widths = sorted(rows["oracle.d_key"].unique())
    with style.style():
        shown = style.alike(rows, ["metric", "oracle.d_key", "pairs"])
        made, axes = style.figure(
            3.1 * len(widths) + 1.6, style.beside(6.4, shown), nrows=2, ncols=len(widths), squeeze=False, sharex=True
        )
        for column, width in enumerate(widths):
            part = rows[rows["oracle.d_key"] == width]
            for row, metric in enumerate(("top1", "error")):
                ax = axes[row][column]
                points = average(part[part["metric"] == metric], ["series", "pairs"])
                for name in shown:
                    line = points[points["series"] == name].sort_values("pairs")
                    if line.empty:
                        continue
                    colour, marker = style.look(name)
                    law = _law(part[part["series"] == name].iloc[0], metric)
                    x = line["pairs"] / width
                    # Points on a law are not joined: the line through them is the prediction.
                    joined = {"linestyle": "none" if law else "-", "linewidth": 0.7}
                    ax.plot(x, line["mean"], color=colour, marker=marker, markersize=4.5, clip_on=False, **joined)
                    ax.vlines(x, line["low"], line["high"], color=colour, linewidth=1, alpha=0.6)
                    if law:
                        n = np.unique(np.geomspace(line["pairs"].min(), line["pairs"].max(), 24).astype(int))
                        ax.plot(n / width, law(n), color=colour, linewidth=1.6, alpha=0.75, zorder=1.5)
                _axes(ax, points["pairs"] / width, metric)
            axes[0][column].set_title(f"d_key = {width:.0f}")
            axes[1][column].set_xlabel("pairs / d_key")
        axes[0][0].set_ylabel("top-1 of the read-out")
        axes[1][0].set_ylabel("squared error, over ‖v‖²")
        candidates = sorted(rows["oracle.candidates"].unique())
        among = " or ".join(f"{value:.0f}" for value in candidates)
        runs = style.seeds(rows.groupby(["series", "pairs", "oracle.d_key"])["run"].nunique())
        title = f"points: measured, {runs},\namong {among} values;\nthick lines: theory"
        style.legend(made, shown, title)
    yield "capacity", made


def _axes(ax, load: pd.Series, metric: str) -> None:
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(sorted(2.0 ** np.unique(np.round(np.log2(load))))))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}"))
    if metric == "top1":
        style.accuracy_axis(ax)
    else:
        ax.set_yscale("symlog", linthresh=0.1, linscale=0.4)
        ax.set_ylim(-0.01, None)
        ax.yaxis.set_major_locator(FixedLocator([0, 0.1, 0.3, 1, 3, 10]))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.axvline(1, color="0.85", linewidth=1, zorder=0)


def _law(run: pd.Series, metric: str):
    """The closed form n → metric for a run's mechanism and gates, averaged over ages; None where there is none."""
    mixer, d, values = run["mixer"], int(run["oracle.d_key"]), int(run["oracle.candidates"])
    d_value = int(_or(run, "oracle.d_value", d))
    if any(_or(run, f"oracle.{name}", value) != value for name, value in ASSUMED.items()):
        return None
    decay = float(np.exp(_or(run, "oracle.gates.log_decay", 0.0)))
    if mixer in SUMS and decay == 1:
        return {
            "top1": lambda n: theory.top1(1.0, (n - 1) / d, n - 1, d, d_value, values),
            "error": lambda n: theory.linear_error(n, d),
        }[metric]
    if mixer in SUMS:
        return {
            "top1": lambda n: _mean(lambda m, n: theory.decay_top1(m, n, d, d_value, values, decay), n),
            "error": lambda n: _mean(lambda m, n: theory.decay_error(m, n, d, decay), n),
        }[metric]
    if mixer in DELTAS and decay == 1:
        beta = float(_or(run, "oracle.gates.beta", 1.0))
        return {
            "top1": lambda n: _mean(lambda m, n: theory.delta_top1(m, n, d, d_value, values, beta), n),
            "error": lambda n: _mean(lambda m, n: theory.delta_error(m, n, d, beta), n),
        }[metric]
    if mixer == "mesa" and decay == 1 and metric == "error":
        return lambda n: theory.least_squares_error(n, d)
    if mixer in BUDGETS and metric == "top1" and "mixer.budget" in run and not pd.isna(run["mixer.budget"]):
        return lambda n: theory.static_recall(run["mixer.budget"], n)
    return None


def _mean(law, counts: np.ndarray) -> np.ndarray:
    """The law averaged over at most 32 ages, evenly spread, of each n."""
    ages = [((np.arange(min(n, 32)) + 0.5) * n / min(n, 32)).astype(int) for n in counts.tolist()]
    return np.array([np.mean(law(age, n)) for age, n in zip(ages, counts.tolist(), strict=True)])


def _or(run: pd.Series, name: str, default):
    """The run's setting, or the default where it has none."""
    return default if name not in run or pd.isna(run[name]) else run[name]
