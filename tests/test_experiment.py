"""The experiments: both sizes compose and fit their tasks, sweeps parse, and tiny versions run to their figures."""

from pathlib import Path

import hydra
import pytest
from command_line import UNTRAINED, recall
from conftest import CONF, config, names
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from recall_lab.cli.base import DEFAULT_RATE, STUDIED
from recall_lab.data import test_cells as grid
from recall_lab.data import training_cells
from recall_lab.folders import identity
from recall_lab.task.mqar import MQAR

WITHIN = ("frontier", "frontier_based", "frontier_window")
"""Experiments whose small size is tested at the trained lengths."""
OURS = (
    *WITHIN,
    "copying",
    "needle",
    "needle_in_noise",
    "recall_phase_diagram",
    "selective_copying",
    "selective_gates",
    "state_tracking",
    "updates",
    "window_coverage",
)
SIZES = ("small", "large")


def resolved(*overrides: str) -> dict:
    """The settings as plain values, with a number in place of a studied learning rate."""
    settings = OmegaConf.to_container(config(*overrides), resolve=True)
    if settings["train"]["lr"] == STUDIED:
        settings["train"]["lr"] = DEFAULT_RATE
    return settings


def sweep(name: str, size: str) -> dict[str, list[str]]:
    """Setting → values, in the sweep of an experiment."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        composed = hydra.compose("config", [f"experiment={name}", f"size={size}"], return_hydra_config=True)
    params = [f"{key}={value}" for key, value in composed.hydra.sweeper.params.items()]
    return {
        override.key_or_group: list(override.sweep_string_iterator())
        if override.is_sweep_override()
        else [override.get_value_element_as_str()]
        for override in OverridesParser.create().parse_overrides(params)
    }


@pytest.mark.parametrize("size", [pytest.param(size, marks=[pytest.mark.slow] * (size == "large")) for size in SIZES])
@pytest.mark.parametrize("name", OURS)
def test_every_job_composes_and_its_cells_fit_its_task(name, size):
    swept = sweep(name, size)
    for number in range(max(map(len, swept.values()))):
        # Every value of every setting occurs in at least one job.
        job = [f"{key}={values[number % len(values)]}" for key, values in swept.items()]
        composed = resolved(f"experiment={name}", f"size={size}", *job)
        task = hydra.utils.instantiate(composed["task"])
        training = hydra.utils.instantiate(composed["train"], _convert_="all")
        testing = hydra.utils.instantiate(composed["test"], _convert_="all")
        trained = training_cells(task, training.cells)
        longest = max(task.at(**cell).length for cell in trained)
        tested = max(task.at(**cell).length for cell in grid(task, testing.cells, trained))
        assert tested == longest if name in WITHIN and size == "small" else tested > longest
        hydra.utils.instantiate(composed["mixer"])(d_model=composed["model"]["d_model"])


@pytest.mark.parametrize("name", OURS)
def test_the_large_size_is_larger(name):
    small, large = (resolved(f"experiment={name}", f"size={size}") for size in SIZES)
    assert large["train"]["steps"] > small["train"]["steps"]
    assert large["train"]["tokens"] > small["train"]["tokens"]
    few, many = (sweep(name, size) for size in SIZES)
    assert few.keys() == many.keys()
    assert sum(map(len, many.values())) > sum(map(len, few.values()))


def test_a_size_changes_the_identity_only_through_settings():
    small, large = ({**resolved(f"size={size}"), "choice": {}} for size in SIZES)
    assert identity(small) == identity(large)
    small, large = (resolved("experiment=needle", f"size={size}") for size in SIZES)
    assert identity(small) != identity(large)
    assert identity({**large, "size": "small"}) == identity(large)


def test_an_unknown_size_is_refused():
    with pytest.raises(Exception, match="size='huge': must be one of small, large"):
        resolved("experiment=needle", "size=huge")


def test_a_grid_as_a_product():
    task = MQAR(length=64, pairs=2)
    product = {"length": [16, 32], "pairs": [2, 4]}
    assert training_cells(task, product) == [
        {"length": 16, "pairs": 2}, {"length": 16, "pairs": 4}, {"length": 32, "pairs": 2}, {"length": 32, "pairs": 4},
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"cells: \{'length': 16, 'pairs': 8\}: .*at least 32"):
        training_cells(task, {"length": [16, 32], "pairs": [2, 8]})
    with pytest.raises(ValueError, match=r"cells.length=\[\]: must be a list of values"):
        training_cells(task, {"length": []})


@pytest.mark.parametrize("variant", sorted(CONF.glob("mixer/*/*.yaml")), ids=lambda path: path.stem)
def test_a_variant_of_a_mixer_is_the_mixer_with_other_settings(variant):
    mechanism = variant.parent.name
    assert mechanism in names("mixer")
    plain, other = (resolved(f"mixer={name}")["mixer"] for name in (mechanism, f"{mechanism}/{variant.stem}"))
    assert plain.keys() == other.keys()
    assert plain["_target_"] == other["_target_"]
    assert plain != other


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
                ("selective_copying", ["mixer=linear,delta_rule", "seed=0"], "retrieval_selective_copying_by_data"),
                ("copying", ["mixer=linear", "seed=0"], "retrieval_copying"),
                ("frontier", ["mixer=linear", "mixer.d_key=2,4", "seed=0"], "frontier_mqar"),
                ("frontier_window", ["mixer.budget=2,4", "seed=0"], "frontier_mqar"),
                ("state_tracking", ["mixer=delta_rule/neg_eigval,rnn", "seed=0"], "retrieval_state_tracking"),
            )
        ),
    ],
)
def test_a_tiny_experiment_runs_to_its_figure(name, overrides, figure, empty_folder):
    assert recall("-m", f"experiment={name}", *UNTRAINED, *overrides) == 0
    assert {f"{figure}.png", f"{figure}.svg"} <= {path.name for path in Path("outputs", name, "figure").iterdir()}
