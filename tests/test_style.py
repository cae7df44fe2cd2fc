"""The style of figures: colours and markers, order of series, axes, notes and legends."""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from conftest import names
from matplotlib.colors import to_hex, to_rgb
from tables import touching

from recall_lab.figure import base, layout, legends, style


def oklab(colour, vision=((1, 0, 0), (0, 1, 0), (0, 0, 1))) -> np.ndarray:
    """Coordinates in the OKLab space, whose distances are roughly perceptual (Ottosson 2020)."""
    c = np.array(to_rgb(colour))
    c = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    c = np.clip(np.array(vision) @ c, 0, 1)
    cone = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]) @ c
    return np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]) @ np.cbrt(cone)


REDUCED = {  # Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
}


@pytest.mark.parametrize("vision", REDUCED)
def test_the_mechanisms_compared_most_differ_for_the_colour_blind(vision):
    found = style.looks(["softmax", "linear", "gated_linear", "delta_rule", "gated_delta"])
    seen = [oklab(look.colour, REDUCED[vision]) for look in found.values()]
    assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) > 0.08


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
    found = base.blocks(series)
    assert [len(block) for block in found] == [8, 7, 8]
    assert [name for block in found for name in block] == series
    assert base.blocks(["linear"]) == [["linear"]]
    four = [f"{mixer} heads={heads}" for mixer in ("softmax", "linear", "delta_rule") for heads in (1, 2, 4, 8)]
    assert base.blocks(four) == [four[:8], four[8:]]
    eleven = [f"mixer{letter}" for letter in "abcdefghijk"]
    assert [len(block) for block in base.blocks(eleven)] == [6, 5]
    assert base.blocks([]) == []


@pytest.mark.parametrize(
    ("runs", "low", "words"),
    [
        ([1, 1], 0.5, "one seed"),
        ([1, 1], 0.4, "one seed; bars: 95 % interval over answers"),
        ([2, 2], 0.4, "mean of 2 seeds; bars: range"),
        ([1, 2], 0.4, "mean of 1 to 2 seeds; bars: range"),
        ([8, 8], 0.4, "mean of 8 seeds; bars: 95 % interval"),
    ],
)
def test_replicates_in_words(runs, low, words):
    """For a single seed there are no bars over seeds, and the note mentions none."""
    points = pd.DataFrame({"runs": runs, "low": low, "mean": 0.5, "high": 0.5})
    assert base.replicates(points, "bars") == words
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
    _, axes = style.grid(1, 3, 3)
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
        made, axes = style.grid(2, 2, 4)
        series = [f"linear a_setting_with_a_long_name={number}" for number in range(10)]
        looks = style.looks(series)
        for row in axes:
            legends.series(row[-1], {name: name for name in series}, looks, "title")
        made.canvas.draw()
        boxes = [ax.get_window_extent() for ax in axes.flat]
        assert max(box.height for box in boxes) - min(box.height for box in boxes) < 1
        for legend in made.legends:
            extent = legend.get_window_extent()
            assert extent.x0 >= max(box.x1 for box in boxes)
            assert extent.x1 <= made.bbox.x1


def test_the_legend_of_a_single_panel_is_below_it():
    """A single panel has the width of one column of a paper; the legend makes the figure higher."""
    heights = []
    for count in (1, 10):
        with style.style():
            made, axes = style.grid(1, 1, 3)
            looks = style.looks(f"linear a_setting_with_a_long_name={number}" for number in range(count))
            legends.series(axes[0, 0], {name: name for name in looks}, looks, "title")
            made.canvas.draw()
        panel, (legend,) = axes[0, 0].get_tightbbox(), made.legends
        assert made.get_figwidth() == style.COLUMN
        assert legend.get_window_extent().y1 <= panel.y0 + 1
        assert legend.get_window_extent().y0 >= -1
        heights.append(panel.height)
    assert abs(heights[0] - heights[1]) < 2


def test_bars_of_series_at_the_same_x_are_beside_each_other():
    """Each bar has its line's colour and interval; a series is shifted by the same distance as its bars."""
    points = pd.DataFrame(
        {"series": ["linear", "softmax"] * 2, "x": [1, 1, 2, 2], "mean": 0.5, "low": [0.2, 0.4, 0.5, 0.4],
         "high": [0.8, 0.6, 0.5, 0.6]}
    )  # fmt: skip
    with style.style():
        made, axes = style.grid(1, 1, 3)
        ax = axes[0, 0]
        shifts = style.lines(ax, points, "x", style.looks(points["series"]))
        made.canvas.draw()
    assert [[list(bar.vertices[:, 1]) for bar in bars.get_paths()] for bars in ax.collections] == [
        [[0.4, 0.6], [0.4, 0.6]],
        [[0.2, 0.8]],
    ]
    across = [line.get_transform().transform((1, 0.5))[0] for line in ax.lines]
    assert across == [bars.get_transform().transform((1, 0.5))[0] for bars in ax.collections]
    assert across == [shifts[name].transform((1, 0.5))[0] for name in ("softmax", "linear")]
    assert np.isclose(across[1] - across[0], style.APART / 72 * made.dpi)
    assert np.isclose(np.mean(across), ax.transData.transform((1, 0.5))[0])


@pytest.mark.parametrize(
    ("width", "labels"), [(4, "256 512 1024 2048 4096"), (1.4, "256 1024 4096"), (0.9, "512 4096")]
)
def test_labels_that_would_overlap_are_blank(width, labels):
    with style.style():
        made, axes = style.grid(1, 1, 2.0, width=width)
        style.log2_axis(axes[0, 0], [256, 512, 1024, 2048, 4096])
        axes[0, 0].set_xlim(200, 5000)
        layout.arrange(made)
        made.draw_without_rendering()
    assert " ".join(label.get_text() for label in axes[0, 0].get_xticklabels() if label.get_text()) == labels
    assert list(axes[0, 0].get_xticks()) == [256, 512, 1024, 2048, 4096]


def test_labels_of_a_linear_axis_that_would_touch_are_blank():
    """Of unevenly spaced ticks the ends are kept, then each that leaves room for the widest label."""
    with style.style():
        made, axes = style.grid(1, 2, 2.0, width=3.3)
        for ax in axes[0]:
            style.number_axis(ax, [0, 2, 4, 8, 16, 32, 48], "updates")
            ax.set_xlim(-1, 49)
        assert touching(made)
        layout.arrange(made)
        assert touching(made) == []
    shown = [label.get_text() for label in axes[0, 0].get_xticklabels()]
    assert shown == ["0", "", "", "8", "16", "32", "48"]
    assert list(axes[0, 0].get_xticks()) == [0, 2, 4, 8, 16, 32, 48]


def test_labels_of_minor_ticks_give_way_and_a_common_factor_stays():
    """A logarithmic y axis of less than two decades labels its minor ticks too."""
    with style.style():
        made, axes = style.grid(1, 2, 1.2)
        axes[0, 0].set(yscale="log", ylim=(2e-5, 7e-4))
        axes[0, 1].set(ylim=(0, 3e6), yticks=np.arange(0, 3.01e6, 2.5e5))
        assert touching(made)
        layout.arrange(made)
        assert touching(made) == []
        axis = axes[0, 0].yaxis
        assert [label.get_text() for label in axis.get_majorticklabels()][1] == r"$\mathdefault{10^{-4}}$"
        assert any(label.get_text() for label in axis.get_minorticklabels())
        assert axes[0, 1].yaxis.get_major_formatter().get_offset() == "1e6"


def test_panels_with_a_common_axis_keep_its_labels():
    with style.style():
        made, axes = style.grid(2, 1, 4.0, sharex=True)
        for ax in axes[:, 0]:
            style.log2_axis(ax, [16, 64, 256])
        layout.arrange(made)
        made.draw_without_rendering()
    assert [label.get_text() for label in axes[1, 0].get_xticklabels()] == ["16", "64", "256"]
