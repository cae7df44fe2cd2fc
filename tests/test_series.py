"""Conditions, replicates and circumstances: which runs are averaged, and how series are named."""

import copy

import pandas as pd
import pytest
from conftest import CONF
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_folder import composed, finished

from recall_lab import folders, results
from recall_lab.series import condition, series

TRAINING = ["probe=[retrieval,state_retention]"]
ORACLE = ["oracle=random", "probe=[state_retention,cost]", "+oracle.gates.beta=1"]
MIXERS = sorted(
    path.relative_to(CONF / "mixer").with_suffix("").as_posix() for path in (CONF / "mixer").rglob("*.yaml")
)


def write(sweep, name: str, config: dict, value: float = 0.5, started: str = "2026-01-01", **facts) -> None:
    """A finished run without any training: one score, and one row of each probe."""
    rows = [{"split": "probe", "metric": "top1", "value": value, "probe": probe} for probe in config["probe"] or {}]
    rows.append({"split": "test", "metric": "accuracy", "value": value})
    finished(sweep, name, config, [{"task.length": 64, **row} for row in rows], started=started, **facts)


def leaves(config: dict, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in config.items():
        inner = leaves(value, (*prefix, key)) if isinstance(value, dict) and value else []
        found += inner or [(*prefix, key)]
    return found


def changed(config: dict, path: tuple[str, ...]) -> dict:
    """The same settings with another value of one key."""
    made = copy.deepcopy(config)
    part = made
    for key in path[:-1]:
        part = part[key]
    value = part[path[-1]]
    other = {bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: x + 0.001}.get(
        type(value), lambda x: "other"
    )
    part[path[-1]] = other(value)
    return made


LISTED = {*results.REPLICATES, *results.CIRCUMSTANCES, *results.CELLS}


@pytest.mark.parametrize("mixer", [name for name in MIXERS if "/" not in name])
def test_no_setting_can_be_averaged_away(mixer, tmp_path):
    """Two runs that differ in a single key are different series, unless the key is on one of the lists."""
    every_key = mixer in ("delta_rule", "hybrid")
    for overrides in (TRAINING, ORACLE) if every_key else (TRAINING,):
        sweep = tmp_path / overrides[0]
        config = composed(*overrides, mixer=mixer)
        paths = [path for path in leaves(config) if every_key or path[0] == "mixer"]
        write(sweep, "base", config, started="2027-01-01")
        for path in paths:
            write(sweep, ".".join(path), changed(config, path))
        table = results.collect(sweep)
        scores = table[table["split"] == "test"].set_index("run")["series"]
        probes = table[table["split"] == "probe"].set_index(["run", "probe"])["series"]
        for path in paths:
            name = ".".join(path)
            if name in LISTED:
                assert not name.startswith(("mixer.", "model.", "task.", "oracle.", "probe."))
            elif path[0] == "probe":
                assert probes[name, path[1]] != probes["base", path[1]], name
            elif name == "test.probe_sequences":
                assert (probes[name] != probes["base"]).all()
            else:
                assert scores[name] != scores["base"], name


def test_what_is_selected_makes_no_series(tmp_path):
    for name, rate in (("a", 0.01), ("b", 0.02)):
        write(tmp_path, name, composed(f"train.lr={rate}"))
    table = results.collect(tmp_path)
    assert set(table["series"]) == {"delta_rule lr=0.01", "delta_rule lr=0.02"}
    both = pd.concat([table, table.assign(split="validation")], ignore_index=True)
    assert set(results.select(both)["series"]) == {"delta_rule"}
    assert results.selected_settings(tmp_path) == results.SELECTED == ("train.lr",)
    folders.claim(tmp_path, ["train.clip"])
    folders.claim(tmp_path)
    assert results.selected_settings(tmp_path) == ("train.clip",)


@pytest.mark.parametrize("key", sorted({*results.REPLICATES, "train.keep", "device", "threads", "test.cells"}))
def test_listed_settings_make_no_series(key, tmp_path):
    config = composed()
    write(tmp_path, "a", config)
    write(tmp_path, "b", changed(config, tuple(key.split("."))))
    table = results.collect(tmp_path)
    assert set(table["series"]) == {"delta_rule"}
    runs = results.summarise(table, ["series", "task.length"])["runs"].tolist()
    assert runs == ([2] if key in results.REPLICATES else [1])


def test_a_replicate_counts_once_and_its_newest_run_is_taken(tmp_path):
    """A run repeated with another number of threads does not count as a second seed."""
    write(tmp_path, "a", composed("threads=1"), value=0.2, started="2026-01-02")
    write(tmp_path, "b", composed("threads=2"), value=0.6, started="2026-01-01")
    write(tmp_path, "c", composed("seed=1"), value=0.4, started="2026-01-03")
    (line,) = results.summarise(results.collect(tmp_path), ["series"]).to_dict("records")
    assert (line["mean"], line["runs"]) == (pytest.approx(0.3), 2)
    assert results.repeated(folders.runs(tmp_path)) == ["b is repeated by a (threads=2 → 1), which is used"]


def test_scores_of_runs_that_differ_only_in_probes_are_one_series(tmp_path):
    """Scores do not depend on probes, so they are one replicate. Rows of the probe are two series."""
    write(tmp_path, "a", composed("probe=[state_retention]"), value=0.2, started="2026-01-01")
    write(tmp_path, "b", composed("probe=[state_retention]", "probe.state_retention.ridge=0.1"), started="2026-01-02")
    table = results.collect(tmp_path)
    (line,) = results.summarise(table, ["series"]).to_dict("records")
    assert (line["mean"], line["runs"]) == (0.5, 1)
    assert set(table.loc[table["split"] == "probe", "series"]) == {"delta_rule ridge=0.001", "delta_rule ridge=0.1"}


def test_a_mean_over_different_settings_is_refused(tmp_path):
    write(tmp_path, "a", composed("train.clip=1"))
    write(tmp_path, "b", composed("train.clip=2"))
    table = results.collect(tmp_path)
    assert set(table["series"]) == {"delta_rule clip=1", "delta_rule clip=2"}
    with pytest.raises(ValueError, match="would mix runs of different settings: delta_rule clip=1; delta_rule clip=2"):
        results.summarise(table, ["mixer"])


def test_names_are_short(tmp_path):
    cells = ["train.cells=[{length: 16, pairs: 4}, {length: 128, pairs: 32}]", "train.cells=[{length: 16, pairs: 4}]"]
    write(tmp_path, "a", composed("train.weight_decay=0.10", cells[0]))
    write(tmp_path, "b", composed("train.weight_decay=0.001", cells[1]))
    write(tmp_path, "c", composed("train.weight_decay=0.001", cells[1], "model._target_=mine.model.Mine"))
    assert sorted(set(results.collect(tmp_path)["series"])) == [
        "delta_rule model=Mine weight_decay=0.001",
        "delta_rule model=Model weight_decay=0.001",
        "delta_rule model=Model weight_decay=0.1",
    ]
    write(tmp_path, "d", composed("train.weight_decay=0.001", cells[0], "model._target_=mine.model.Mine"))
    names = set(results.collect(tmp_path)["series"])
    assert len(names) == 4
    assert all(len(name) < 90 for name in names)
    assert any("cells=(length 16–128, pairs 4–32, #" in name for name in names)


def test_a_hybrid_is_named_by_its_parts(tmp_path):
    write(tmp_path, "a", composed(mixer="hybrid"))
    write(tmp_path, "b", composed("mixer@mixer.first=window", mixer="hybrid"))
    assert set(results.collect(tmp_path)["series"]) == {"hybrid(delta_rule, softmax)", "hybrid(window, softmax)"}


def test_an_axis_is_not_in_the_name():
    widths = pd.DataFrame([{"mixer.d_key": d, "mixer.d_value": d, "mixer.heads": h} for d in (8, 16) for h in (1, 2)])
    table = widths.assign(mixer="linear", task="mqar")
    assert series(table).nunique() == 4
    assert set(series(table, axis=["mixer.d_key"])) == {"linear heads=1", "linear heads=2"}


values = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(-1, 1), st.sampled_from(["1", "a", "a.b"]))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.tuples(values, values, st.sampled_from("xy")), min_size=1, max_size=6))
def test_names_and_conditions_agree(rows):
    """Two runs have the same name exactly if all their settings are the same, whatever the values are."""
    table = pd.DataFrame(
        [{"mixer": mixer, "task": "t", "run": str(i), "mixer.a": pd.NA if a is None else a, "train.b": b}
         for i, (a, b, mixer) in enumerate(rows)], dtype=object
    )  # fmt: skip
    pairs = pd.DataFrame({"name": series(table), "condition": condition(table)})
    assert pairs.groupby("name")["condition"].nunique().max() == 1
    assert pairs.groupby("condition")["name"].nunique().max() == 1


def test_settings_stand_in_the_order_of_their_kind_and_two_of_one_name_in_full():
    """A hybrid without a third part is not named after it."""
    rows = [
        {"train.lr": i, "model.layers": i, "mixer.b": i, "mixer.a": j, "train.a": j} for i in (1, 2) for j in (1, 2)
    ]
    table = pd.DataFrame(rows).assign(mixer="linear", task="mqar")
    table["train.a"] = [1, 2, 2, 1]
    assert series(table)[0] == "linear b=1 mixer.a=1"
    apart = pd.DataFrame({"train.lr": [1, 1, 2], "model.layers": [1, 2, 2]}).assign(mixer="linear", task="mqar")
    assert series(apart).tolist() == ["linear layers=1 lr=1", "linear layers=2 lr=1", "linear layers=2 lr=2"]
    parts = pd.DataFrame(
        {"mixer.first._target_": ["m.window.Window"] * 2, "mixer.second._target_": ["m.rnn.RNN"] * 2,
         "mixer.third._target_": ["m.linear.Linear", None]}
    ).assign(mixer="hybrid", task="mqar")  # fmt: skip
    assert series(parts).tolist() == ["hybrid(window, rnn, linear)", "hybrid(window, rnn)"]


def test_a_row_has_the_settings_of_its_own_probe_alone(tmp_path):
    write(tmp_path, "a", composed("probe=[retrieval,state_retention]"))
    table = results.collect(tmp_path).set_index("probe")
    probing = [name for name in table if name.startswith("probe.")]
    assert {name.split(".")[1] for name in probing} == {"retrieval", "state_retention"}
    for name in probing:
        assert table.loc[table.index != name.split(".")[1], name].isna().all(), name
    assert table["test.probe_sequences"].notna().tolist() == table["split"].eq("probe").tolist()
