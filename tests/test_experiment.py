"""The experiments: both sizes compose and fit their tasks, sweeps parse, and small ones run to their figures."""

import sys

import hydra
import numpy as np
import pandas as pd
import pytest
from conftest import CONF, config, names
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from recall_lab import run
from recall_lab.figure import needle, recall_phase_diagram, retrieval, selective_copying, updates, window_coverage
from recall_lab.job import identity
from recall_lab.task.mqar import MQAR
from recall_lab.theory import budget, linear_attention
from recall_lab.train import test_cells as grid
from recall_lab.train import training_cells

OURS = ("needle", "recall_phase_diagram", "selective_copying", "state_tracking", "updates", "window_coverage")
SIZES = ("small", "large")


def resolved(*overrides: str) -> dict:
    return OmegaConf.to_container(config(*overrides), resolve=True)


def sweep(name: str, size: str) -> dict[str, list[str]]:
    """Setting → values of an experiment's own sweep."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        composed = hydra.compose("config", [f"experiment={name}", f"size={size}"], return_hydra_config=True)
    params = [f"{key}={value}" for key, value in composed.hydra.sweeper.params.items()]
    return {
        override.key_or_group: list(override.sweep_string_iterator())
        for override in OverridesParser.create().parse_overrides(params)
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OURS)
def test_every_job_composes_and_its_cells_fit_its_task(name, size):
    swept = sweep(name, size)
    for number in range(max(map(len, swept.values()))):
        # Every value of every setting in one job at least.
        job = [f"{key}={values[number % len(values)]}" for key, values in swept.items()]
        whole = resolved(f"experiment={name}", f"size={size}", *job)
        task = hydra.utils.instantiate(whole["task"])
        training = hydra.utils.instantiate(whole["train"], _convert_="all")
        testing = hydra.utils.instantiate(whole["test"], _convert_="all")
        trained = training_cells(task, training.cells)
        longest = max(task.at(**cell).length for cell in trained)
        assert max(task.at(**cell).length for cell in grid(task, testing.cells, trained)) > longest
        hydra.utils.instantiate(whole["mixer"])(d_model=whole["model"]["d_model"])


@pytest.mark.parametrize("name", OURS)
def test_large_is_larger(name):
    small, large = (resolved(f"experiment={name}", f"size={size}") for size in SIZES)
    assert large["train"]["steps"] > small["train"]["steps"]
    assert large["train"]["tokens"] > small["train"]["tokens"]
    few, many = (sweep(name, size) for size in SIZES)
    assert few.keys() == many.keys()
    assert sum(map(len, many.values())) > sum(map(len, few.values()))


def test_a_size_names_a_run_by_its_numbers_alone():
    small, large = ({**resolved(f"size={size}"), "choice": {}} for size in SIZES)
    assert identity(small) == identity(large)
    small, large = (resolved("experiment=needle", f"size={size}") for size in SIZES)
    assert identity(small) != identity(large)
    assert identity({**large, "size": "small"}) == identity(large)


def test_a_size_that_does_not_exist():
    with pytest.raises(Exception, match="size=huge: one of small, large"):
        resolved("experiment=needle", "size=huge")


def test_a_grid_as_a_product():
    task = MQAR(length=64, pairs=2)
    product = {"length": [16, 32], "pairs": [2, 4]}
    assert training_cells(task, product) == [
        {"length": 16, "pairs": 2}, {"length": 16, "pairs": 4}, {"length": 32, "pairs": 2}, {"length": 32, "pairs": 4},
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"cell \{'length': 16, 'pairs': 8\}: .*at least 32"):
        training_cells(task, {"length": [16, 32], "pairs": [2, 8]})
    with pytest.raises(ValueError, match="a list of values, of which every combination is a cell"):
        training_cells(task, {"length": []})


@pytest.mark.parametrize("variant", sorted(CONF.glob("mixer/*/*.yaml")), ids=lambda path: path.stem)
def test_a_variant_of_a_mixer_is_the_mixer_with_other_settings(variant):
    mechanism = variant.parent.name
    assert mechanism in names("mixer")
    plain, other = (resolved(f"mixer={name}")["mixer"] for name in (mechanism, f"{mechanism}/{variant.stem}"))
    assert plain.keys() == other.keys()
    assert plain["_target_"] == other["_target_"]
    assert plain != other


def test_what_a_memory_that_adds_recalls():
    rng = np.random.default_rng(0)
    again = rng.binomial(6, 1 / 4, size=200_000)
    assert abs(linear_attention.superposed_recall(6, 4) - np.mean(1 / (again + 1))) < 0.003
    assert linear_attention.superposed_recall(0, 4) == pytest.approx(1)


def test_window_reach_by_brute_force():
    """A position that sees key and value through the convolution, and lies in the window of the query."""
    key, value = 20, 21
    for width in (0, 1, 2, 3, 4):
        for window in (1, 4, 9):
            for query in range(24, 60):
                places = [s for s in range(query + 1) if s - width < key <= s and s - width < value <= s]
                found = any(query - window < s <= query for s in places)
                assert found == (query - value < budget.window_reach(window, width))


def test_the_law_of_the_figure_counts_distances():
    facts = {"task.vocab": 256, "task.length": 64, "task.pairs": 8, "task.gap_exponent": 0.01,
             "mixer.budget": 16, "mixer.short_conv": 4}  # fmt: skip
    batch = MQAR(length=64, pairs=8).sample(4000, np.random.default_rng(5))
    age = batch.age[batch.scored]
    for reach, law in zip((16, 18), window_coverage._law(facts), strict=True):
        covered = (age < reach).mean()
        assert law == pytest.approx(covered + (1 - covered) * 2 / 256, abs=0.01)


TINY = ["train.steps=2", "train.validate_every=2", "train.tokens=128", "train.validation_sequences=4", "test.tokens=1",
        "test.sequences=4", "hydra/launcher=basic"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "overrides", "figure"),
    [
        ("window_coverage", ["mixer.budget=4,8", "mixer.short_conv=2", "seed=0"], "window_coverage"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("needle", ["mixer=linear", "test.cells.length=[128]", "test.cells.depth=[0,1]", "seed=0"], "needle"),
                ("recall_phase_diagram", ["mixer=linear", "mixer.d_key=2,4", "seed=0"], "recall_phase_diagram"),
                ("updates", ["mixer=linear", "seed=0,1"], "updates"),
                ("selective_copying", ["mixer=linear,delta_rule", "seed=0"], "selective_copying"),
                ("state_tracking", ["mixer=delta_rule/neg_eigval,rnn", "seed=0"], "retrieval_state_tracking"),
            )
        ),
    ],
)
def test_a_tiny_one_runs_to_its_figure(name, overrides, figure, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    run.Claim.folder = None
    assert run.main([f"experiment={name}", *TINY, *overrides]) == 0
    assert {f"{figure}.png", f"{figure}.svg"} <= {
        path.name for path in (tmp_path / "outputs" / name / "figure").iterdir()
    }


def table(task: str, cells: list[dict], accuracy, **facts) -> pd.DataFrame:
    """Two runs each of linear and delta_rule with accuracy(mixer, cell) in every cell; the first cell trained on."""
    rows = []
    for mixer in ("linear", "delta_rule"):
        for seed in (0, 1):
            for number, cell in enumerate(cells):
                own = {"run": f"{mixer}{seed}{facts}", "mixer": mixer, "series": mixer, "task": task, **facts,
                       **{f"task.{name}": value for name, value in cell.items()}}  # fmt: skip
                values = {"accuracy": accuracy(mixer, cell), "chance": 0.1, "state_elements": 9.0}
                splits = ("test", "validation") if number == 0 else ("test",)
                rows += [{**own, "split": s, "metric": m, "value": v} for s in splits for m, v in values.items()]
    return pd.DataFrame(rows)


def numbers(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_needle_heatmap():
    cells = [
        {"haystack": h, "length": n, "depth": d} for h in ("repeat", "noise") for n in (64, 256) for d in (0, 0.5, 1)
    ]
    shown = table("needle", cells, lambda mixer, cell: cell["depth"] if mixer == "linear" else 0.25)
    ((name, figure),) = needle.draw(shown)
    assert name == "needle"
    assert numbers(figure.axes[0]) == ["0", "0", "50", "50", "100", "100"]
    assert numbers(figure.axes[1]) == ["25"] * 6
    assert [figure.axes[0].get_title(), figure.axes[1].get_title()] == ["linear", "delta_rule"]
    assert {ax.images[0].get_clim() for ax in figure.axes[:4]} == {(0, 100)}
    figure.canvas.draw()
    assert not list(needle.draw(shown[shown["task.depth"] == 0]))


def test_phase_diagram():
    cells = [{"vocab": 256, "length": 4 * pairs, "pairs": pairs} for pairs in (4, 16, 64)]
    by_width = [table("mqar", cells, lambda mixer, cell, d=d: d / 100, **{"mixer.d_key": d}) for d in (8, 16, 32)]
    ((_, figure),) = recall_phase_diagram.draw(pd.concat(by_width))
    linear = figure.axes[0]
    assert numbers(linear) == ["8", "16", "32"] * 3
    capacity = linear_attention.capacity(32, 32, 128)
    assert 64 < capacity < 256
    # The solid line leaves the diagram at its top, at the width whose capacity is the most that was asked.
    solid, dashed = linear.lines[:2]
    assert 1 < solid.get_xdata()[-1] < 2
    assert np.interp(1, dashed.get_xdata(), dashed.get_ydata()) == pytest.approx(1, abs=0.02)
    figure.canvas.draw()
    assert not list(recall_phase_diagram.draw(by_width[0]))


def test_updates_by_rebindings():
    cells = [{"length": 128, "pairs": pairs, "updates": updates} for pairs in (4, 8) for updates in (0, 4, 8)]
    shown = table("updates", cells, lambda mixer, cell: 1.0 if mixer == "delta_rule" else 1 / (1 + cell["updates"]))
    ((_, figure),) = updates.draw(shown)
    few, many = figure.axes
    lines = {line.get_label(): line for line in many.lines}
    assert lines["linear"].get_xdata().tolist() == [0, 0.5, 1]
    assert np.allclose(lines["linear"].get_ydata(), [1, 1 / 5, 1 / 9])
    assert few.get_title() == "4 keys"
    figure.canvas.draw()
    assert not list(updates.draw(shown[shown["task.updates"] == 0]))


def test_selective_copying_both_ways():
    cells = [{"length": n, "data": m} for n in (32, 64, 128) for m in (2, 8)]
    shown = table("selective_copying", cells, lambda mixer, cell: cell["data"] / cell["length"])
    ((_, figure),) = selective_copying.draw(shown)
    assert [ax.get_title() for ax in figure.axes] == ["data = 2", "data = 8", "", "n = 32", "n = 64", "n = 128"]
    assert np.allclose(figure.axes[1].lines[0].get_ydata(), [8 / 32, 8 / 64, 8 / 128])
    assert np.allclose(figure.axes[5].lines[0].get_ydata(), [2 / 128, 8 / 128])
    figure.canvas.draw()
    assert not list(selective_copying.draw(shown[shown["task.data"] == 2]))


def test_retrieval_has_a_panel_for_each_word():
    parts = [
        table(
            "state_tracking", [{"length": n, "group": group} for n in (4, 8)], lambda mixer, cell, a=a: a, group=group
        )
        for group, a in (("parity", 1.0), ("s3", 0.5))
    ]
    ((_, figure),) = retrieval.draw(pd.concat(parts))
    assert [ax.get_title() for ax in figure.axes] == [
        "state_tracking, parity: retrieval versus length", "state_tracking, s3: retrieval versus length",
    ]  # fmt: skip
    assert [ax.lines[0].get_ydata().tolist() for ax in figure.axes] == [[1, 1], [0.5, 0.5]]
    (legend,) = figure.legends
    assert "2 runs a point" in legend.get_title().get_text()
    figure.canvas.draw()
