"""Memory cards: the package's table, what is comparable, the numbers, and how their figures are drawn."""

import re
from dataclasses import replace

import pandas as pd
import pytest
from conftest import names
from sweep_folder import write
from tables import named, scores

from recall_lab import card as cards
from recall_lab import results, table_files
from recall_lab.figure import base, emphasis, laws, style

CELLS = [{"length": n, "pairs": n // 8} for n in (16, 32)]
LR = ("train.lr",)


def runs(mixers=("linear",), accuracy=lambda mixer, cell: 0.5, seeds=(0, 1), git="a", **settings) -> pd.DataFrame:
    """Rows of made-up runs with their own names, revision and settings."""
    table = scores("mqar", CELLS, accuracy, mixers, seeds, **{"trained.vocab": 256, "train.lr": 0.01, **settings})
    return table.assign(git=git, data_seed=0, run=table["run"] + git)


def test_the_card_of_the_package_is_complete():
    spec = cards.read()
    assert set(spec.experiments) <= set(names("experiment"))
    assert {*spec.settings, *spec.here} <= set(spec.experiments)
    assert {*spec.beside, *(name for own in spec.here.values() for name in own)} <= set(names("mixer"))
    assert all(part.figures for part in spec.parts)
    labels = [(part.title, number.name) for part in spec.parts for number in part.numbers]
    assert len(labels) == len(set(labels)) > 20


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The folder given with --config-dir."""
    monkeypatch.setattr(cards, "OWN_FOLDERS", [tmp_path])
    return tmp_path


def test_a_card_of_ones_own(own):
    path = own / "card.yaml"
    path.write_text("parts: [{title: Load, experiment: capacity, numbers: [{name: top, metric: top1}]}]", "utf-8")
    spec = cards.read()
    assert (spec.experiments, spec.beside) == (["capacity"], ())
    assert spec.parts[0].numbers == [cards.Number(name="top", metric="top1")]
    path.unlink()
    assert "beyond_capacity" in cards.read().experiments


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("beside: [linear]", "the key 'parts' is missing"),
        ("parts: []\nfigures: []", "there is no key 'figures'; there are parts, beside"),
        ("parts: [{title: Load}]", "the key 'experiment' is missing"),
        (
            "parts: [{title: Load, experiment: capacity, numbers: [{name: top, value: 3}]}]",
            "numbers of Load: there is no",
        ),
        ("- capacity", "must have the keys parts"),
    ],
)
def test_a_broken_card_is_refused_in_a_line(own, content, message):
    (own / "card.yaml").write_text(content, "utf-8")
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        cards.read()
    assert "card.yaml" in str(error.value)


def test_the_package_table_from_folders_and_tables(tmp_path):
    write(tmp_path / "quickstart", git="b")
    for mixer in ("linear", "softmax"):
        write(tmp_path / "claim/updates", mixer=mixer)
    write(tmp_path / "elsewhere")
    chosen = results.collect(tmp_path / "claim/updates").assign(experiment="updates")
    (tmp_path / "verdict").mkdir()
    table_files.save(pd.concat([chosen, chosen.assign(experiment="other")]), tmp_path / "verdict")
    paths = [tmp_path / "quickstart", tmp_path / "verdict", tmp_path / "elsewhere"]
    table = cards.collect(paths, ["quickstart", "updates"])
    assert set(table["experiment"]) == {"quickstart", "updates"}
    assert set(table.loc[table["experiment"] == "updates", "mixer"]) == {"linear", "softmax"}
    assert set(table.loc[table["experiment"] == "quickstart", "git"]) == {"b"}
    assert "series" not in table
    later = cards.collect([*paths, tmp_path / "claim/updates"], ["updates"])
    assert len(later) == (table["experiment"] == "updates").sum()
    with pytest.raises(ValueError, match="no results of needle"):
        cards.collect(paths, ["needle"])
    with pytest.raises(ValueError, match=r"must be a sweep's folder, or hold a table\.parquet"):
        cards.collect([tmp_path / "absent"], ["needle"])


def test_only_the_best_rate_and_the_metrics_of_a_card_are_kept(tmp_path):
    low, high = (
        named(runs(accuracy=lambda *_, a=a: a, git="b", **{"train.lr": lr})) for lr, a in ((0.1, 0.2), (0.2, 0.7))
    )
    steps = high.assign(metric="steps")
    (tmp_path / "quickstart").mkdir()
    table_files.save(pd.concat([low, high, steps]), tmp_path / "quickstart")
    table = cards.collect([tmp_path / "quickstart/table.parquet"], ["quickstart"])
    assert set(table["train.lr"]) == {0.2}
    assert "steps" not in set(table["metric"])


def test_numbers_of_two_experiments_stay_numbers(tmp_path):
    """Whole in one experiment and fractions in the other: the saved column must not become text."""
    for name, value in (("one", 2), ("two", 0.5)):
        (tmp_path / name).mkdir()
        table_files.save(named(runs(**{"mixer.decay": value})), tmp_path / name)
    table = cards.collect([tmp_path / "one", tmp_path / "two"], ["one", "two"])
    table_files.write(table, tmp_path / "card.parquet")
    assert sorted(set(table_files.read(tmp_path / "card.parquet")["mixer.decay"])) == [0.5, 2.0]


def test_comparable_runs_have_the_same_settings_except_those_of_the_mixer():
    own = runs(["gla"], **{"mixer.heads": 2, "model.mlp": 1})
    same = runs(["linear"], **{"mixer.heads": 1, "mixer.feature_map": "relu", "train.lr": 0.03})
    other = runs(["softmax"], **{"trained.vocab": 8192})
    found = cards.comparable(own, pd.concat([same, other]), ())
    assert set(found["mixer"]) == {"linear"}
    assert cards.comparable(own, same[:0], LR).empty
    null = runs(["linear"], **{"model.std": None})
    assert cards.comparable(runs(["gla"], **{"model.std": 1.0}), null, LR).empty
    assert len(cards.comparable(runs(["gla"], **{"model.std": None}), null, LR)) == len(null)


def test_own_runs_replace_those_of_the_package():
    own = runs(["linear"], accuracy=lambda *_: 0.9, git="new", **{"mixer.heads": 2, "train.lr": 0.02})
    package = pd.concat([runs(["linear"], git="old", **{"mixer.heads": h}) for h in (1, 2)])
    table = cards.combined(own, package, LR)
    assert set(zip(table["series"], table["origin"], strict=True)) == {
        ("linear heads=1", cards.PACKAGE),
        ("linear heads=2", cards.OWN),
    }
    assert set(cards.combined(own, package[:0], LR)["origin"]) == {cards.OWN}


def test_numbers():
    part = cards.Part(
        title="Recall",
        experiment="tiny",
        numbers=[
            cards.Number(name="long", metric="accuracy", where={"task.length": 32}),
            cards.Number(name="longest", metric="accuracy", largest=["task.length"]),
            cards.Number(name="all", metric="accuracy"),
            cards.Number(name="absent", metric="top1"),
            cards.Number(name="unknown", metric="accuracy", where={"task.depth": 1}),
        ],
    )
    own = runs(["mine"], accuracy=lambda _, cell: cell["length"] / 64, git="new")
    table = cards.combined(own, runs(["linear"], git="old"), LR)
    found = cards.numbers(part, table, LR).set_index(["number", "series"])
    assert found["mean"].to_dict() == pytest.approx(
        {
            ("long", "mine"): 0.5, ("longest", "mine"): 0.5, ("all", "mine"): 0.375,
            ("long", "linear"): 0.5, ("longest", "linear"): 0.5, ("all", "linear"): 0.5,
        }
    )  # fmt: skip
    assert found["runs"].eq(2).all()
    assert found["git"].xs("mine", level="series").eq("new").all()
    assert found["origin"].xs("linear", level="series").eq(cards.PACKAGE).all()
    grid = cards.grid(found.reset_index(), first={"mine"})
    assert list(grid) == ["mine", "linear"]
    assert list(grid.index) == [("Recall", "long"), ("Recall", "longest"), ("Recall", "all")]
    assert grid.loc[("Recall", "all"), "mine"] == "0.375"
    assert list(cards.grid(found.reset_index(), ["mine"])) == ["mine", "linear"]
    assert list(cards.grid(found.reset_index())) == ["linear", "mine"]
    assert cards.grid(cards.numbers(replace(part, numbers=[]), table, LR)).empty
    probed = table[table["split"] == "test"].assign(split="probe", probe="retrieval", value=0.0)
    both = pd.concat([table, probed.assign(**{"probe.retrieval.values": 9})], ignore_index=True)
    pd.testing.assert_frame_equal(cards.numbers(part, both, LR), cards.numbers(part, table, LR))


def test_intervals_are_left_out_on_request():
    found = pd.DataFrame({"part": "Recall", "number": "all", "series": ["mine"], "mean": 0.5, "low": 0.25, "high": 0.75,
                          "runs": 3, "origin": cards.OWN})  # fmt: skip
    assert cards.grid(found).iloc[0, 0] == "0.5 [0.25, 0.75]"
    assert cards.grid(found, intervals=False).iloc[0, 0] == "0.5"


def test_the_mechanisms_of_a_card_stand_out():
    """In full colour and last, which is on top; of equal series they name the line, and others are pale."""
    names = ["mine", "linear", "linear d_key=4", "linear/new d_key=4", "softmax"]
    plain = style.looks(names)
    with emphasis.emphasis(["mine", "linear/new"]):
        assert style.ordered(names) == ["softmax", "linear", "linear d_key=4", "linear/new d_key=4", "mine"]
        looks = style.looks(names)
        rows = pd.DataFrame({"series": ["linear", "mine", "softmax"], "x": 1, "value": [0.5, 0.5, 0.9]})
        assert base.alike(rows, ["x"]) == {"softmax": "softmax", "mine": "mine\n= linear"}
    assert looks["mine"] == plain["mine"]
    assert looks["softmax"].marker == plain["softmax"].marker
    assert min(looks["softmax"].colour) > 0.6 > max(plain["softmax"].colour)
    assert style.looks(names) == plain
    with emphasis.emphasis(["hybrid"]):
        named = ["hybrid", "hybrid heads=2", "hybrid(delta_rule, softmax) heads=2", "hybrid/new", "hybrids"]
        assert [emphasis.emphasised(name) for name in named] == [True, True, True, False, False]
    assert list(base.alike(rows, ["x"])) == ["softmax", "linear"]


def test_a_mechanism_without_a_law_shares_that_of_an_equal_one():
    run = {"series": "linear", "mixer": "linear", "oracle.d_key": 8, "oracle.candidates": 16}
    rows = pd.DataFrame([{**run, "series": "mine", "mixer": "mine"}, run])
    assert laws.of_equal(rows, "mine") is None
    assert laws.of_equal(rows, "mine\n= linear") == laws.law(rows.iloc[1])


def test_the_package_table_names_clean_revisions():
    """As the reference results do; a + would mark files that differed from the revision."""
    assert all(re.fullmatch("[0-9a-f]{12}", revision) for revision in set(cards.package().get("git", [])))
