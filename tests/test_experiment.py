"""The experiments: both sizes compose and fit their tasks, sweeps parse, and small ones run to their figures."""

import sys

import hydra
import numpy as np
import pytest
from conftest import CONF, config, names
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from recall_lab import report, results, run, theory
from recall_lab.figure import window_coverage
from recall_lab.job import identity
from recall_lab.task.mqar import MQAR
from recall_lab.train import test_cells as grid
from recall_lab.train import training_cells

OURS = ("needle", "recall_phase_diagram", "selective_copying", "state_tracking", "updates", "window_coverage")
SIZES = ("small", "large")


def resolved(*overrides: str) -> dict:
    return OmegaConf.to_container(config(*overrides), resolve=True)


def jobs(name: str, size: str) -> list[list[str]]:
    """The overrides of every job of an experiment's own sweep."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        composed = hydra.compose("config", [f"experiment={name}", f"size={size}"], return_hydra_config=True)
    sweep = [f"{key}={value}" for key, value in (composed.hydra.sweeper.params or {}).items()]
    combinations: list[list[str]] = [[]]
    for override in OverridesParser.create().parse_overrides(sweep):
        values = override.sweep_string_iterator() if override.is_sweep_override() else [override.value()]
        chosen = [f"{override.key_or_group}={value}" for value in values]
        combinations = [[*job, choice] for job in combinations for choice in chosen]
    return combinations


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OURS)
def test_every_job_composes_and_its_cells_fit_its_task(name, size):
    seen = set()
    for job in jobs(name, size):
        if job[-1] != "seed=0":
            assert job[-1].startswith("seed=")
            continue
        whole = resolved(f"experiment={name}", f"size={size}", *job)
        task = hydra.utils.instantiate(whole["task"])
        training = hydra.utils.instantiate(whole["train"], _convert_="all")
        testing = hydra.utils.instantiate(whole["test"], _convert_="all")
        trained = training_cells(task, training.cells)
        tested = grid(task, testing.cells, trained)
        assert trained
        longest = max(task.at(**cell).length for cell in trained)
        assert max(task.at(**cell).length for cell in tested) > longest
        seen.add((training.steps, whole["model"]["d_model"]))
        hydra.utils.instantiate(whole["mixer"])(d_model=whole["model"]["d_model"])
    assert len(seen) == 1


@pytest.mark.parametrize("name", OURS)
def test_large_is_larger(name):
    small, large = (resolved(f"experiment={name}", f"size={size}") for size in SIZES)
    assert large["train"]["steps"] > small["train"]["steps"]
    assert len(jobs(name, "large")) > len(jobs(name, "small"))


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
    for wrong in ({"length": 16}, {"length": []}):
        with pytest.raises(ValueError, match="a list of values, of which every combination is a cell"):
            training_cells(task, wrong)


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
    assert abs(theory.superposed_recall(6, 4) - np.mean(1 / (again + 1))) < 0.003
    assert theory.superposed_recall(0, 4) == pytest.approx(1)


def test_window_reach_by_brute_force():
    """A place that sees key and value through the convolution, and lies in the window of the query."""
    key, value = 20, 21
    for width in (0, 1, 2, 3, 4):
        for window in (1, 4, 9):
            for query in range(24, 60):
                places = [s for s in range(query + 1) if s - width < key <= s and s - width < value <= s]
                found = any(query - window < s <= query for s in places)
                assert found == (query - value < theory.window_reach(window, width))


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
    ("name", "overrides", "figures"),
    [
        ("needle", ["mixer=linear,delta_rule", "test.cells.length=[64,128]", "seed=0"], {"needle"}),
        ("window_coverage", ["mixer.budget=4,8", "seed=0"], {"window_coverage"}),
        ("recall_phase_diagram", ["mixer=linear", "mixer.d_key=2,4", "seed=0"], {"recall_phase_diagram"}),
        ("updates", ["mixer=linear", "seed=0,1"], {"updates"}),
        ("selective_copying", ["mixer=linear,delta_rule", "seed=0"], {"selective_copying"}),
        ("state_tracking", ["mixer=delta_rule/neg_eigval,rnn", "seed=0"], {"retrieval_state_tracking"}),
    ],
)
def test_a_tiny_one_runs_to_its_figure(name, overrides, figures, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    run.Claim.folder = None
    assert run.main([f"experiment={name}", *TINY, "report=false", *overrides]) == 0
    folder = tmp_path / "outputs" / name
    drawn = dict(report._figures(results.collect(folder)))
    assert figures <= set(drawn)
    for figure in drawn.values():
        figure.savefig(tmp_path / "figure.png", dpi=40)
