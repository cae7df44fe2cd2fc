"""Studied learning rates: the file, the runs that read it, and the study that extends its grid."""

import shutil
from pathlib import Path

import pytest
import yaml
from command_line import UNTRAINED, recall, run_folders
from conftest import CONF
from hydra import compose, initialize_config_dir

from recall_lab.cli import base, rates
from recall_lab.folders import read_config

TEXTS = {path.stem: path.read_text("utf-8") for path in sorted((CONF / "experiment").glob("*.yaml"))}
OTHERS = ("\nselect: []", "\ntrain: {steps: 1,")
TRAINED = [name for name, text in TEXTS.items() if "\ntrain:" in text and not any(x in text for x in OTHERS)]
"""The experiments that train, without those that study another setting at one rate, or take a single step."""


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of rates.yaml that a test may change."""
    path = tmp_path / "rates.yaml"
    shutil.copy(base.RATES, path)
    for module in (base, rates):
        monkeypatch.setattr(module, "RATES", path)
    return path


@pytest.mark.parametrize(
    ("scores", "chosen", "following"),
    [
        ({0.003: 0.2, 0.01: 0.5, 0.03: 0.4}, 0.01, None),
        ({0.003: 0.2, 0.01: 0.5, 0.03: 0.6}, 0.03, 0.1),
        ({0.003: 0.7, 0.01: 0.5, 0.03: 0.6}, 0.003, 0.001),
        ({0.001: 0.7, 0.003: 0.5, 0.01: 0.5}, 0.001, 0.0003),
        ({0.003: 1.0, 0.01: 1.0, 0.03: 0.9995}, 0.01, None),  # equally good: the middle one
        ({0.003: 0.5, 0.01: 1.0, 0.03: 1.0}, 0.01, None),
        ({0.3: 0.5, 3.0: 0.6}, 3.0, None),  # the end of all grids
        ({0.01: 0.5}, 0.01, None),
    ],
)
def test_the_best_rate_and_the_next_to_try(scores, chosen, following):
    assert rates.best(scores) == chosen
    assert rates.beyond(scores) == following


def peak(mixer: str, rate: float) -> float:
    """A score whose best rate is 0.001 for softmax, 0.01 for linear, 0.1 for all others."""
    best = {"softmax": -3, "linear": -2}.get(mixer, -1)
    return 0.9 - abs(float(f"{rate:.0e}".partition("e")[2]) + (0.5 if f"{rate:g}"[-1] == "3" else 0) - best) / 10


def test_a_study_extends_its_grid_until_the_best_rate_is_an_inner_one(copied, monkeypatch, capsys):
    tried: dict[str, list[float]] = {mixer: [] for mixer in ("softmax", "linear", "rnn")}

    def trained(words):
        given = dict(word.split("=", 1) for word in words if "=" in word)
        assert given["experiment"] == "updates"
        assert given["seed"] == "0"
        for mixer in given.get("mixer", "softmax,linear,rnn").split(","):
            tried[mixer] += map(float, given["train.lr"].split(","))
        return 0

    def scores(folder):
        assert folder.name == "rates_updates"
        return {("updates", mixer): {rate: peak(mixer, rate) for rate in own} for mixer, own in tried.items()}

    monkeypatch.setattr(rates, "validation_scores", scores)
    monkeypatch.setattr("recall_lab.report.make", lambda folder: type("Made", (), {"text": "the report"}))
    assert rates.study(["updates"], ["seed=0"], trained) == 0
    assert {mixer: sorted(own) for mixer, own in tried.items()} == {
        "softmax": [0.0003, 0.001, 0.003, 0.01, 0.03],
        "linear": [0.003, 0.01, 0.03],
        "rnn": [0.003, 0.01, 0.03, 0.1, 0.3],
    }
    before = yaml.safe_load(base.RATES.read_text("utf-8"))
    own = base.read_rates()
    assert own["updates"] == {**before["updates"], "softmax": 0.001, "linear": 0.01, "rnn": 0.1}
    assert copied.read_text("utf-8").startswith("# task: mixer: learning rate.")
    assert "the report" in capsys.readouterr().out


def test_only_experiments_that_train_are_studied():
    with pytest.raises(
        ValueError, match=r"capacity: must be an experiment with train.lr=studied: .*copying, .*needle, "
    ):
        rates.study(["capacity"], [], lambda words: 0)


def test_the_rate_of_a_task_and_a_mixer(copied, capsys):
    rates.write({"updates": {"linear": 0.05, "delta_rule": 0.02, "delta_rule/neg_eigval": 0.07}})
    for mixer, rate in (("linear", 0.05), ("delta_rule", 0.02), ("delta_rule/neg_eigval", 0.07)):
        assert base.studied_rate("updates", mixer) == rate
    assert base.studied_rate("updates", "gated_linear/fixed_decay") == 0.01  # that of gated_linear
    assert capsys.readouterr().err == ""
    assert base.studied_rate("updates", "kda") == base.DEFAULT_RATE
    assert "kda on updates was not studied: train.lr=0.01" in capsys.readouterr().err


def test_every_run_of_a_sweep_has_the_rate_of_its_own_mixer(copied, empty_folder):
    """The settings of a sweep are composed with the default mixer first, whose rate must not become that of all."""
    rates.write({"mqar": {"softmax": 0.04, "linear": 0.05, "delta_rule": 0.02}})
    small = ["task=mqar", "task.length=16", "task.pairs=4", *UNTRAINED]
    sweep = ["-m", "experiment=quickstart", "mixer=softmax,linear,delta_rule", "seed=0", "name=rated", "report=false"]
    assert recall(*sweep, *small) == 0
    configs = map(read_config, run_folders("rated"))
    found = {config["choice"]["mixer"]: config["train"]["lr"] for config in configs}
    assert found == {"softmax": 0.04, "linear": 0.05, "delta_rule": 0.02}


@pytest.mark.parametrize("name", TRAINED)
def test_every_trained_experiment_uses_studied_rates_and_sweeps_rates_in_its_large_size(name):
    grids = []
    for size in ("small", "large"):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("config", [f"experiment={name}", f"size={size}"], return_hydra_config=True)
        grids.append(composed.hydra.sweeper.params["train.lr"])
        mixers = str(composed.hydra.sweeper.params.get("mixer", "window")).split(",")
    assert grids[0] == base.STUDIED
    assert {0.003, 0.01, 0.03} <= set(map(float, grids[1].split(",")))
    task = str(composed.task._target_).split(".")[-2]
    if (CONF.parent / "outputs" / "reference" / f"rates_{name}").exists():
        assert set(mixers) <= set(base.read_rates()[task])


@pytest.mark.slow
def test_a_grid_is_extended_by_workers_of_a_command_of_its_own(empty_folder):
    """Workers of the first command, if they were used again, would look for that command's journal."""
    tiny = ["model.d_model=8", "train.steps=1", "train.tokens=64", "train.validation_sequences=1", "mixer=linear"]
    for seeds in ("0,1", "2,3"):
        assert base.launch(["-m", f"seed={seeds}", "report=false", "hydra.launcher.n_jobs=2", *tiny]) == 0
    assert len(list(Path("outputs/main").glob("*/rows.json"))) == 4
