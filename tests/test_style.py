"""The style of figures: colours and markers, order of series, axes, notes and legends."""

import numpy as np
import pandas as pd
import pytest
from conftest import names
from matplotlib.colors import to_hex, to_rgb

from recall_lab.figure import base, style


def oklab(colour) -> np.ndarray:
    """Coordinates in the OKLab space, whose distances are roughly perceptual (Ottosson 2020)."""
    c = np.array(to_rgb(colour))
    c = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    cone = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]) @ c
    return np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]) @ np.cbrt(cone)


def lightness(look: style.Look) -> float:
    return oklab(look.colour)[0]


def test_a_mechanism_has_its_fixed_look():
    every = style.looks({*names("mixer"), *style.FIXED})
    assert len(set(every.values())) == len(every)
    assert to_hex(every["softmax"].colour) == "#111111"
    assert style.looks(["linear", "softmax"])["linear"] == style.looks(["linear"])["linear"]
    assert style.looks(["linear heads=2"])["linear heads=2"] == style.looks(["linear"])["linear"]


def test_settings_of_a_mechanism_get_lighter_with_their_value():
    series = [f"delta_rule beta={beta:g}" for beta in (1, 0.05, 0.5, 0.1, 16, 8, 32, 2)]
    found = style.looks(series)
    assert list(found) == [f"delta_rule beta={beta}" for beta in ("0.05", "0.1", "0.5", "1", "2", "8", "16", "32")]
    shades = [lightness(look) for look in found.values()]
    assert np.all(np.diff(shades) > 0.03)
    assert len({look.marker for look in found.values()}) == 8


def test_variants_and_two_settings_look_different():
    series = [
        "gated_linear",
        "gated_linear/fixed_decay",
        "gated_linear heads=2 d_key=8",
        "gated_linear heads=2 d_key=16",
    ]
    found = style.looks(series)
    assert len({look.marker for look in found.values()}) == 4
    assert len({look.colour for look in found.values()}) == 4


def test_unknown_mechanisms_have_colours_far_from_all_others():
    unknown = [f"mine{number}" for number in range(len(style.OTHERS))]
    found = style.looks([*unknown, *style.FIXED])
    points = {name: oklab(look.colour) for name, look in found.items()}
    nearest = [min(np.linalg.norm(points[one] - points[other]) for other in points if other != one) for one in unknown]
    assert min(nearest) > 0.07
    assert len({found[name].marker for name in unknown}) == len(unknown)
    many = style.looks([f"mine{number}" for number in range(60)])
    assert len(set(many.values())) == 60


def test_order_is_that_of_mechanisms_then_of_numbers():
    series = ["zzz", "rnn", "softmax", "linear d_key=32", "linear d_key=8", "linear d_key=16", "linear", "linear x=b"]
    assert style.ordered(series) == [
        "softmax", "linear", "linear d_key=8", "linear d_key=16", "linear d_key=32", "linear x=b", "rnn", "zzz",
    ]  # fmt: skip
    decays = [f"gated_linear log_decay={x}" for x in ("-0.1054", "-0.01005", "0", "1e-05", "-0.0305")]
    assert [name.partition("=")[2] for name in style.ordered(decays)] == [
        "-0.1054",
        "-0.0305",
        "-0.01005",
        "0",
        "1e-05",
    ]


def test_blocks_hold_at_most_ten_series():
    series = [f"linear d_key={number}" for number in range(1, 24)]
    found = style.blocks(series)
    assert [len(block) for block in found] == [8, 7, 8]
    assert [name for block in found for name in block] == series
    assert style.blocks(["linear"]) == [["linear"]]
    four = [f"{mixer} heads={heads}" for mixer in ("softmax", "linear", "delta_rule") for heads in (1, 2, 4, 8)]
    assert style.blocks(four) == [four[:8], four[8:]]
    assert style.blocks([]) == []


@pytest.mark.parametrize(
    ("runs", "low", "words"),
    [
        ([1, 1], 0.5, "one seed"),
        ([1, 1], 0.4, "one seed; band: 95 % interval over answers"),
        ([2, 2], 0.4, "mean of 2 seeds; band: range"),
        ([1, 2], 0.4, "mean of 1 to 2 seeds; band: range"),
        ([8, 8], 0.4, "mean of 8 seeds; band: 95 %"),
    ],
)
def test_replicates_in_words(runs, low, words):
    """For a single seed there is no band over seeds, and the note mentions none."""
    points = pd.DataFrame({"runs": runs, "low": low, "mean": 0.5, "high": 0.5})
    assert base.replicates(points, "band") == words
    assert ";" not in base.replicates(points)


def test_parameters_that_vary_at_one_point_of_the_axes():
    cells = pd.DataFrame({"task.length": [64, 64, 128], "task.pairs": [4, 8, 16], "task.haystack": "noise", "value": 1})
    assert base.free(cells, ["task.length"]) == ["task.pairs"]
    assert base.free(cells, ["task.pairs"]) == []
    panels = base.facets(cells, ["task.length", "task.haystack"])
    assert list(panels) == ["length = 64, haystack = noise", "length = 128, haystack = noise"]
    assert [len(part) for part in panels.values()] == [2, 1]
    assert list(base.facets(cells, [])) == [""]


def test_axis_of_a_parameter():
    """log₂ where values span a factor of 8, linear where they do not or hold zero; few enough ticks to be read."""
    _, axes = style.grid(1, 3, 9, 3)
    style.number_axis(axes[0, 0], [4, 8, 16, 32], "pairs", trained=[4, 8])
    style.number_axis(axes[0, 1], [0, 0.25, 1], "depth")
    style.length_axis(axes[0, 2], range(1, 257))
    assert [ax.get_xscale() for ax in axes[0]] == ["log", "linear", "log"]
    assert list(axes[0, 0].get_xticks()) == [4, 8, 16, 32]
    assert [text.get_text() for text in axes[0, 0].texts] == ["trained on"]
    assert list(axes[0, 1].get_xticks()) == [0, 0.25, 1]
    assert len(axes[0, 2].get_xticks()) <= 15
    assert axes[0, 0].get_xlabel() == "pairs"


def test_legends_do_not_stretch_the_panels_and_stay_right_of_them():
    with style.style():
        made, axes = style.grid(2, 2, 10, 6)
        series = [f"linear a_setting_with_a_long_name={number}" for number in range(10)]
        looks = style.looks(series)
        for row in axes:
            style.legend(row[-1], {name: name for name in series}, looks, "title")
        made.canvas.draw()
        boxes = [ax.get_window_extent() for ax in axes.flat]
        assert max(box.height for box in boxes) - min(box.height for box in boxes) < 1
        for legend in made.legends:
            extent = legend.get_window_extent()
            assert extent.x0 >= max(box.x1 for box in boxes)
            assert extent.x1 <= made.bbox.x1
