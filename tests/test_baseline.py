"""Figures of small fixed tables, compared with the images in tests/baseline.

The images have no text and no legend, so that they depend neither on fonts nor on their hinting; what figures say is
tested elsewhere. To make an image anew after a deliberate change, delete it and run this file: the test writes it and
fails once. Look at the new image before committing it.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.testing.compare import compare_images
from matplotlib.text import Text
from matplotlib.ticker import NullFormatter
from tables import named, scores

from recall_lab.figure import capacity, learning_rate, needle, retrieval, style, updates

BASELINE = Path(__file__).parent / "baseline"
TOLERANCE = 2.0
"""Largest root mean square difference of two images, of 255: less than a shade out of order makes."""

MIXERS = ("softmax", "linear", "gated_linear", "delta_rule", "gated_delta")


def spread(table: pd.DataFrame, width: float = 0.06) -> pd.DataFrame:
    """The table with the accuracies of the seeds 0, 1, 2 apart by `width`."""
    shifted = (table["value"] + width * (table["seed"] - 1)).clip(0, 1)
    return table.assign(value=table["value"].mask(table["metric"] == "accuracy", shifted))


def over_length() -> Figure:
    cells = [{"length": length, "data": data} for data in (2, 8) for length in (16, 32, 64, 128, 256)]
    fall = {mixer: number + 1 for number, mixer in enumerate(MIXERS)}
    table = scores("selective_copying", cells, lambda m, c: 1 / (1 + fall[m] * c["length"] * c["data"] / 2000),
                   MIXERS, seeds=(0, 1, 2))  # fmt: skip
    return dict(retrieval.draw(named(spread(table))))["retrieval_selective_copying"]


def shades() -> Figure:
    """Six settings of one mechanism, in the order of their numbers."""
    parts = [scores("mqar", [{"length": n} for n in (16, 64, 256)], lambda m, c, d=d: min(1, 2 * d / c["length"]),
                    ["linear"], **{"mixer.d_key": d}) for d in (128, 4, 64, 8, 32, 16)]  # fmt: skip
    return dict(retrieval.draw(named(*parts)))["retrieval_mqar"]


def rates() -> Figure:
    best = {mixer: 0.003 * 2**number for number, mixer in enumerate(MIXERS)}
    parts = [
        scores("mqar", [{"length": 64}], lambda m, c, rate=rate: float(np.exp(-(np.log(rate / best[m]) ** 2) / 20)),
               MIXERS, seeds=(0, 1, 2), **{"train.lr": rate}) for rate in (0.001, 0.003, 0.01, 0.03)
    ]  # fmt: skip
    parts = [spread(part, 0.1) for part in parts]
    return dict(learning_rate.draw(named(*parts)))["learning_rate_mqar"]


def rebindings() -> Figure:
    cells = [{"length": 128, "pairs": pairs, "updates": m} for pairs in (4, 8) for m in (0, 4, 8, 16)]
    table = scores("updates", cells, lambda m, c: 0.9 if m == "delta_rule" else 1 / (1 + c["updates"] / c["pairs"]))
    return dict(updates.draw(named(table)))["updates"]


def heat_map() -> Figure:
    cells = [{"length": n, "depth": d, "haystack": h} for n, d, h in
             product((64, 256, 1024), (0.0, 0.5, 1.0), ("noise", "repeat"))]  # fmt: skip
    table = scores("needle", cells, lambda m, c: (0.2 + c["depth"]) / 1.2 * (64 / c["length"]) ** (m == "linear"),
                   ("softmax", "linear", "delta_rule"))  # fmt: skip
    return dict(needle.draw(named(table)))["needle"]


def read_out() -> Figure:
    factor = {"softmax": 8, "linear": 1, "delta_rule": 2, "based": 4}
    rows = [
        {"run": f"{mixer}{width}{seed}", "mixer": mixer, "task": "oracle", "seed": seed, "metric": metric,
         "value": value, "count": 4096, "pairs": float(pairs), "oracle.d_key": float(width), "oracle.candidates": 64.0}
        for mixer, width, seed, pairs in product(factor, (16, 32), (0, 1, 2),
                                                 (4, 8, 16, 32, 64, 128))
        for load in (pairs / width / factor[mixer],)
        for metric, value in (("top1", 1 / (1 + load / (2 + seed))), ("error", load / (1 + seed)))
    ]  # fmt: skip
    return dict(capacity.draw(named(pd.DataFrame(rows))))["capacity"]


def without_text(made: Figure) -> Figure:
    """The figure with its panels arranged as if nothing were written in it."""
    for legend in made.legends:
        legend.remove()
    for ax in made.axes:
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(NullFormatter())
            axis.set_minor_formatter(NullFormatter())
    for text in made.findobj(Text):
        text.set_text("")
    made.set_figheight(0.6 * made.get_figwidth())
    made.get_layout_engine().set(rect=(0, 0, 1, 1))
    return made


@pytest.mark.parametrize("draw", [over_length, shades, rates, rebindings, heat_map, read_out], ids=lambda d: d.__name__)
def test_a_figure_is_its_baseline(draw: Callable[[], Figure], tmp_path):
    expected, actual = BASELINE / f"{draw.__name__}.png", tmp_path / f"{draw.__name__}.png"
    with style.style():
        made = without_text(draw())
        made.savefig(actual, dpi=60, metadata={"Software": None})
    if not expected.exists():
        expected.parent.mkdir(exist_ok=True)
        expected.write_bytes(actual.read_bytes())
        pytest.fail(f"{expected} was missing and has been written: look at it, and run this test again")
    copy = tmp_path / "expected.png"  # compare_images writes its difference beside this file
    copy.write_bytes(expected.read_bytes())
    assert compare_images(str(copy), str(actual), TOLERANCE) is None
