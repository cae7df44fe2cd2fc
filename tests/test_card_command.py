"""`recall-lab card`: what is asked for, the page of finished runs, and a tiny card from the runs to the page."""

import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from command_line import SERIAL, recall
from sweep_folder import write
from test_page import check_structure

from recall_lab import card as cards
from recall_lab import results, table_files
from recall_lab.cli import card, experiments
from recall_lab.contract.base import Finding
from recall_lab.files import use
from recall_lab.messages import ERRORS, one_line


def test_a_request():
    asked = card.request(["mixer=linear,gla", "size=large", "root=out"], None)
    assert (asked.mixers, asked.options, asked.settings, asked.root) == (["linear", "gla"], [], ["size=large"], "out")
    plain, other = (card.request(["mixer=gla", *words], None).folder for words in ([], ["device=cpu"]))
    assert plain == other == Path("outputs/card/gla")
    assert re.fullmatch(r"outputs/card/gla-\w{4}", card.request(["mixer=gla", "seed=0"], None).folder.as_posix())
    variant = card.request(["mixer=gated_linear", "mixer.decay=0.9"], None)
    assert (variant.suffix, variant.folder) == ("/decay=0.9", Path("outputs/card/gated_linear-decay-0.9"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a card needs a mechanism: mixer=NAME"),
        (["size=large"], "a card needs a mechanism"),
        (["mixer=linear", "name=mine"], "name has no effect"),
        (["mixer=gated_linear", "mixer.decay=0.9,0.99"], "mixer.decay=0.9,0.99: must be one value"),
    ],
)
def test_requests_that_are_refused(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        card.card(words)


def test_collecting_takes_folders_only():
    with pytest.raises(ValueError, match="mixer=linear: has no effect with --collect"):
        card.collect(["outputs/quickstart"], ["mixer=linear"])


def test_unknown_mixers_and_options_are_refused_before_anything_runs(mine):
    with pytest.raises(ERRORS) as error:
        card.card(["mixer=lineer"], mine)
    assert "lineer" in one_line(error.value)
    with pytest.raises(ERRORS) as error:
        card.card(["mixer=linear", "mixer.headz=2"], mine)
    assert "mixer.headz" in one_line(error.value)
    assert not Path("outputs").exists()


def test_a_setting_without_effect_is_refused(empty_folder):
    Path("mine").mkdir()
    Path("mine/card.yaml").write_text("parts: [{title: Load, experiment: capacity}]", "utf-8")
    with pytest.raises(ValueError, match=r"task\.pairs has no effect"):
        card.card(["mixer=linear", "task.pairs=3"], "mine")


def test_the_oracle_is_not_given_options_that_it_ignores():
    found = experiments.effective(["capacity", "quickstart"], ["mixer.output_norm=true"], None, ["mixer=linear"])
    assert found == {"capacity": [], "quickstart": ["mixer.output_norm=true"]}


NUMBERS = [cards.Number(name="longest", metric="accuracy", where={"task.length": 64})]
EXPERIMENT = """# @package _global_
# A tiny experiment.
defaults: [override /task: mqar]
name: tiny
task: {vocab: 32}
model: {d_model: 16, layers: 1}
train: {steps: 4, lr: studied, validate_every: 2, tokens: 128, validation_sequences: 8, cells: [{length: 16, pairs: 2}]}
test: {tokens: 64, sequences: 4, cells: [{length: 16, pairs: 2}, {length: 32, pairs: 4}]}
hydra: {mode: MULTIRUN, sweeper: {params: {train.lr: studied, mixer: "softmax,linear", seed: "0,1"}}}
"""
ORACLE = """# @package _global_
defaults: [override /oracle: random, override /probe: [state_retention]]
name: pairs
oracle: {pairs: 8, reads: 16, candidates: 16}
probe: {state_retention: {after: [1.0], read: all, lags: []}}
hydra: {mode: MULTIRUN, sweeper: {params: {mixer: "softmax,linear", oracle.d_key: "4,8"}}}
"""
CARD = """
beside: [softmax, linear]
here: {pairs: [linear]}
settings: {pairs: [oracle.d_key=8]}
parts:
  - {title: Load, text: Pairs., experiment: pairs, figures: [capacity], numbers: [{name: top-1, metric: top1}]}
  - title: Recall
    experiment: tiny
    figures: [retrieval]
    numbers: [{name: accuracy at n=32, metric: accuracy, where: {task.length: 32}}]
"""


@pytest.fixture
def mine(empty_folder, monkeypatch):
    """A folder with a tiny card; runs are done in this process, and the package's table is a file of the test's."""
    for name, text in (("experiment/tiny", EXPERIMENT), ("experiment/pairs", ORACLE), ("card", CARD)):
        path = Path("mine", f"{name}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(experiments, "launch", lambda words: recall(*words, SERIAL))
    monkeypatch.setattr(cards, "TABLE", Path("card.parquet"))
    monkeypatch.setattr(card, "examined", lambda words, _: [(words[0], [])])
    use("mine")
    return "mine"


def test_the_page_of_finished_runs(mine, monkeypatch, capsys):
    """Nothing is run: there are results of one experiment of two, and one check and one run have failed."""
    broken = Finding(False, "off by 1", "causality")
    monkeypatch.setattr(card, "examined", lambda words, _: [(words[0], [broken, Finding(True, "", "heads")])])
    monkeypatch.setattr(card, "run_one", lambda job, *_: ["experiment pairs: exit status 1"] * (job.name == "pairs"))
    for seed in (0, 1):
        write(Path("outputs/card/linear/tiny"), seed=seed)
    write(Path("outputs/card/linear/tiny"), mixer="delta_rule")  # for comparison, on this machine
    spec = replace(cards.read(), parts=[replace(one, numbers=NUMBERS) for one in cards.read().parts])
    monkeypatch.setattr(cards, "read", lambda *_: spec)
    assert card.card(["mixer=linear"], mine) == 1
    text = Path("outputs/card/linear/report.html").read_text("utf-8")
    found = check_structure(text)
    assert [image["alt"].partition(":")[0] for image in found.images] == ["retrieval_mqar"]
    for part in ("1 checks hold, 1 failed", "causality: off by 1", "experiment pairs: exit status 1",
                 "there are no results of this experiment", "0.074"):  # fmt: skip
        assert part in text, part
    assert "experiment pairs: exit status 1" in capsys.readouterr().err
    assert "td:nth-of-type(-n+1)" in text  # one column stands out
    _, number = pd.read_csv("outputs/card/linear/card.csv").to_dict("records")
    assert (number["part"], number["mean"], number["runs"], number["git"]) == ("Recall", pytest.approx(0.074), 2, 1)
    with pytest.raises(ValueError, match="no experiment has results"):
        card.card(["mixer=gla"], mine)


def test_a_learning_rate_is_searched_once_per_task(mine, monkeypatch):
    """The first experiment with a task tries three rates with the first seed; the next one has the best of them."""
    second = EXPERIMENT.replace("name: tiny", "name: other").replace("task: mqar", "task: updates")
    Path("mine/experiment/other.yaml").write_text(second.replace("seed:", "task: 'updates,mqar', seed:"), "utf-8")
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(card, "run_one", lambda job, *_: started.append((job.name, *job.words)) or [])
    monkeypatch.setattr(card, "_scores", lambda *_: [(("mqar", "gla"), {0.003: 0.1, 0.01: 0.2, 0.03: 0.9})])
    asked, spec, rates = card.request(["mixer=gla"], mine), cards.read(), {}
    for name, settings in (("tiny", {}), ("other", {"task": "task=mqar"}), ("tiny", {"train.lr": "train.lr=0.1"})):
        assert card._run(name, settings, asked, spec, rates) == []
    words = ("mixer=gla", "task=mqar", "train.lr=0.03")
    tried = ("tiny", "mixer=gla", "seed=0", "train.lr=0.003,0.01,0.03")
    assert started == [tried, ("tiny", *words), ("other", *words), ("tiny", "mixer=gla", "train.lr=0.1")]
    assert rates == {("mqar", "gla"): 0.03}


def rates_of(folder: str) -> dict[float, set[int]]:
    table = results.collect(Path(folder, "tiny"))
    return {rate: set(part["seed"]) for rate, part in table.groupby("train.lr")}


@pytest.mark.slow
def test_a_tiny_card(mine, capsys):
    """Without the package's table; then a table of built-in mechanisms is made and shown beside."""
    assert card.card(["mixer=gla"], mine) == 0
    folder = "outputs/card/gla"
    tried = rates_of(folder)
    assert len(tried) == 3
    assert sorted(map(len, tried.values())) == [1, 1, 2]
    page = Path(folder, "report.html").read_text("utf-8")
    check_structure(page)
    assert "no results of built-in mechanisms" in page
    numbers = pd.read_csv(Path(folder, "card.csv"))
    assert set(numbers.loc[numbers["number"] == "top-1", "series"]) == {"gla", "linear"}
    assert set(numbers.loc[numbers["part"] == "Recall", "series"]) == {"gla"}
    capsys.readouterr()
    assert card.card(["mixer=gla"], mine) == 0
    assert len(rates_of(folder)) == 3
    assert capsys.readouterr().out.count("finished  ") == 0

    assert recall("--config-dir", mine, "experiment=tiny", "report=false", SERIAL) == 0
    table_files.write(cards.collect(["outputs/tiny"], cards.read().experiments), cards.TABLE)
    assert card.card(["mixer=gated_linear", "mixer.decay=0.9", "mixer.output_norm=true"], mine) == 0
    folder = "outputs/card/gated_linear-decay-0.9-output_norm-true"
    assert len(rates_of(folder)) == 1
    numbers = pd.read_csv(Path(folder, "card.csv"))
    variant = "gated_linear/decay=0.9,output_norm=true"
    assert set(numbers.loc[numbers["part"] == "Recall", "series"]) == {variant, "linear", "softmax"}
    assert set(numbers.loc[numbers["series"] == "softmax", "origin"]) == {cards.PACKAGE}
    page = Path(folder, "report.html").read_text("utf-8")
    check_structure(page)
    for text in (f"Memory card: {variant}", "from the package's table", "Pairs."):
        assert text in page, text
    assert Path(folder, "figure/tiny-retrieval_mqar.png").exists()
    assert "| Recall | accuracy at n=32 |" in Path(folder, "report.md").read_text("utf-8")
