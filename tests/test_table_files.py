"""The table as two files: what is in which, and that both together are the table again."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from conftest import CONF, names
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import traced
from sweep_folder import composed, finished
from tables import undocumented

import recall_lab as rl
from recall_lab import card as cards
from recall_lab import files, folders, results, table_files
from recall_lab.building import ineffective_mixer_options
from recall_lab.mixer.base import Mixer
from recall_lab.probe import base as probing
from recall_lab.series import condition, series

STEPS = {"split": "validation", "metric": "steps", "value": 900}


def rows(*cells: dict, probe: str | None = None, split: str = "test", **more) -> list[dict]:
    """Two rows per cell."""
    own = {"split": split, **({"probe": probe, "low": 0.1, "high": 0.3, "count": 9} if probe else {}), **more}
    return [{**{f"task.{name}": x for name, x in cell.items()}, **own, "metric": metric, "value": number / 7}
            for cell in cells for number, metric in enumerate(("accuracy", "chance"))]  # fmt: skip


def later(run: Path, number: int, columns: dict, found: list[dict]) -> None:
    content = {"format": folders.FORMAT, "git": "b", "missing": [], "columns": columns, "rows": found}
    files.write_json(run / f"probe-{number}.json", content)


def two_tasks(sweep: Path) -> pd.DataFrame:
    """Two mixers on tasks with other parameters; one of the rates is selected."""
    cells = {"mqar": [{"length": n, "pairs": n // 8, "vocab": 256, "key_alphabet": None} for n in (16, 32)],
             "updates": [{"length": 64, "pairs": 8, "updates": m, "vocab": 256} for m in (0, 4)]}  # fmt: skip
    for task, own in cells.items():
        for mixer in ("linear", "softmax/rotary"):
            for rate in (0.01, 0.02):
                config = composed(f"train.lr={rate}", mixer=mixer, task=task)
                scored = [*rows(*own), *rows(own[0], split="validation"), STEPS]
                finished(sweep, f"{task}{mixer[0]}{rate}", config, scored, git=f"g{rate}", seconds=rate)
    return results.collect(sweep)


def selected(sweep: Path) -> pd.DataFrame:
    return results.select(two_tasks(sweep))


def one_cell(sweep: Path) -> pd.DataFrame:
    finished(sweep, "a", composed(), [*rows({"length": 16, "pairs": 2}), STEPS])
    return results.collect(sweep)


def oracle(sweep: Path) -> pd.DataFrame:
    for mixer in ("gated_delta", "based", "top_k"):
        for width in (8, 16):
            config = composed("oracle=random", "probe=[state_retention,cost]", f"oracle.d_key={width}", mixer=mixer)
            config["choice"]["task"] = "oracle"
            found = [row for probe in config["probe"] for row in rows({}, probe=probe, split="oracle", layer=0)]
            finished(sweep, f"{mixer}{width}", config, found)
    return results.collect(sweep)


def probed(sweep: Path) -> pd.DataFrame:
    """Two probes in the run, one of them later with other settings, and other policies with the weights."""
    for seed in (0, 1):
        config = composed("probe=[retrieval,cost]", f"seed={seed}", mixer="softmax")
        cells = [{"length": n, "pairs": 2} for n in (16, 32)]
        measured = [row for probe in config["probe"] for row in rows(*cells, probe=probe, split="probe")]
        run = finished(sweep, f"r{seed}", config, [*rows(*cells), *measured, STEPS])
        own = {key: x for key, x in folders.flatten(config).items() if key.startswith(("mixer.", "test.", "probe."))}
        own.pop("test.cells")
        columns = {"mixer": "softmax", **own, "probe.retrieval.values": 3, "test.probe_sequences": 5}
        later(run, 1, columns, rows(*cells, probe="retrieval", split="probe", age=2.5))
        for number, budget in enumerate((2, 4), 2):
            mixer = {"mixer": "window", "mixer._target_": "w.Window", "mixer.budget": budget, "trained_as": "softmax"}
            columns = {**{key: x for key, x in own.items() if not key.startswith("mixer.")}, **mixer}
            later(run, number, columns, rows(*cells))
    return results.collect(sweep)


def claim(sweep: Path) -> pd.DataFrame:
    """Two experiments with a run of the same name and other facts."""
    parts = [selected(sweep / "one").assign(trained_to_end="end"), oracle(sweep / "two"), one_cell(sweep / "three")]
    again = parts[2].assign(git="other", seconds=77.0, trained_to_end="gains")
    return pd.concat([part.assign(experiment=str(i)) for i, part in enumerate([*parts, again])], ignore_index=True)


def card(sweep: Path) -> pd.DataFrame:
    others = claim(sweep)
    own = others["mixer"] == "linear"
    parts = [(cards.OWN, others[own]), (cards.PACKAGE, others[~own].drop(columns="trained_to_end"))]
    return pd.concat([part.assign(origin=origin) for origin, part in parts], ignore_index=True)


KINDS = [two_tasks, selected, one_cell, oracle, probed, claim, card]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def saved(request, tmp_path_factory) -> tuple[str, pd.DataFrame, Path]:
    """A kind of table, itself, and the folder to which it is saved."""
    folder = tmp_path_factory.mktemp("report")
    table = request.param(tmp_path_factory.mktemp("sweeps"))
    table_files.save(table, folder)
    return request.param.__name__, table, folder


def known(column: pd.Series) -> list:
    """Its values, None where there is none."""
    return column.astype(object).where(column.notna(), None).tolist()


def test_both_files_are_the_table_again(saved, tmp_path):
    """Values, types and missing values are those of one file with everything."""
    _, table, folder = saved
    again = table_files.read(folder)
    table_files.write(table, tmp_path / "whole.parquet")
    whole = pd.read_parquet(tmp_path / "whole.parquet")
    pd.testing.assert_frame_equal(again[list(whole)], whole)
    assert set(again) == set(whole) == set(table)
    for name in table:
        assert known(again[name]) == known(table[name]), name
    assert condition(again).tolist() == condition(table).tolist()
    assert rl.load(folder).equals(again)


def test_the_table_has_few_columns_and_one_row_of_settings_per_run(saved):
    name, table, folder = saved
    shown, settings = (pd.read_parquet(folder / f"{part}.parquet") for part in ("table", "settings"))
    assert len(shown.columns) <= 20
    assert not shown.isna().all().any()
    assert not undocumented(shown)
    assert list(shown)[-1 if "low" not in shown else -4] == "value"
    dotted = [column for column in shown if "." in column and table[column].nunique() < 2]
    assert not dotted or name == "card", dotted
    keys = [key for key in table_files.KEYS if key in table]
    assert not settings.duplicated(keys).any()
    assert set(settings) & set(shown) == set(keys)
    if name in ("two_tasks", "selected", "one_cell", "oracle"):
        assert len(settings) == table["run"].nunique()
        assert {"git", "seconds", "mixer._target_"} <= set(settings)
    if name == "two_tasks":
        assert [c for c in shown if c.startswith("task.")] == ["task.length", "task.pairs", "task.updates"]
        merged = shown.merge(settings, on=["run", "series"])  # as the README says
        assert merged["train.lr"].tolist() == table["train.lr"].tolist()
    if name == "probed":  # scores; retrieval, and again with other settings; two policies
        assert settings.groupby("run").size().tolist() == [5, 5]


@settings(deadline=None, derandomize=True, max_examples=25)
@given(data=st.data(), number=st.integers(1, 12))
def test_any_table_is_restored(data, number, tmp_path_factory):
    """Also where a setting differs within a run: it then stays with the rows."""
    options = {
        "run": "ab", "series": "st", "split": ["test", "oracle"], "metric": ["accuracy", "steps"],
        "probe": [None, "cost", "gates"], "mixer.heads": [1, 2, None], "mixer.decay": ["learned", 0.9, None],
        "probe.cost.timed": [True, False, None], "test.probe_sequences": [None, 16], "task.length": [16, 32, None],
        "task.pairs": [4, None], "git": ["x", "y", None], "seconds": [1.5, 2.0],
    }  # fmt: skip
    columns = {name: [data.draw(st.sampled_from(values)) for _ in range(number)] for name, values in options.items()}
    table = pd.DataFrame(columns).assign(value=np.arange(number) / 3)
    folder = tmp_path_factory.mktemp("any")
    table_files.write(table, folder / "whole.parquet")
    whole = table_files.read(folder / "whole.parquet")
    table_files.save(whole, folder)
    again = table_files.read(folder)
    kept = [name for name in whole if "." in name or whole[name].notna().any()]
    pd.testing.assert_frame_equal(again[kept], whole[kept])
    assert set(again) == set(kept)


def test_rows_of_the_oracle_have_no_options_that_it_ignores(tmp_path):
    """No other list of them: whatever is left out is an option that the oracle refuses, of every mechanism."""
    table = oracle(tmp_path / "sweep")
    left_out = {f"mixer.{name}" for name in Mixer.__dataclass_fields__ if name != "d_model"}
    assert not {name for name in table if name.startswith(("train.", "trained.", "test.", "task."))} | (
        left_out & set(table)
    )
    assert {"mixer.window", "mixer.budget", "oracle.d_key", "probe.cost.timed"} <= set(table)
    assert not table_files.concerns("mixer.heads", "cost", "oracle")
    assert table_files.concerns("mixer.heads", "cost", "probe")
    shared = {name for name in Mixer.__dataclass_fields__ if not table_files.concerns(f"mixer.{name}", None, "oracle")}
    assert {"heads", "d_key", "short_conv", "output_norm"} <= shared
    for name in names("mixer"):
        ignored = ineffective_mixer_options(yaml.safe_load((CONF / f"mixer/{name}.yaml").read_text("utf-8")))
        assert not ignored or shared <= set(ignored), name


def test_an_older_table_with_everything_is_read(tmp_path):
    """With the same series as before, also in the oracle, whose ignored options are removed."""
    table = two_tasks(tmp_path / "sweep")
    older = table.assign(**{"mixer.heads": 1, "task.length": table["task.length"].fillna(64)})
    older.to_parquet(tmp_path / "table.parquet", index=False)
    read = table_files.read(tmp_path)
    assert all(known(read[name]) == known(older[name]) for name in older)
    older = oracle(tmp_path / "oracle").assign(**{"mixer.heads": 1, "mixer.short_conv": 4, "mixer.budget": 7})
    older["mixer.d_key"] = np.where(older["mixer"] == "based", 16, np.nan)
    older.to_parquet(tmp_path / "oracle/table.parquet", index=False)
    read = table_files.read(tmp_path / "oracle/table.parquet")
    assert set(older) - set(read) == {"mixer.heads", "mixer.short_conv", "mixer.d_key"}
    assert series(read).tolist() == series(older).tolist()
    assert condition(read).tolist() == condition(older).tolist()


def test_files_that_were_not_written_together_are_refused(tmp_path):
    one, other = one_cell(tmp_path / "one"), two_tasks(tmp_path / "two")
    table_files.save(one, tmp_path)
    table_files.save(other, tmp_path / "two")
    (tmp_path / "two/settings.parquet").replace(tmp_path / "settings.parquet")
    with pytest.raises(ValueError, match=r"table\.parquet and settings\.parquet were not written together$"):
        table_files.read(tmp_path)
    table_files.write(one, tmp_path / "table.parquet")  # as an older version does
    with pytest.raises(ValueError, match="were not written together"):
        rl.load(tmp_path)


def test_text_on_request(tmp_path):
    """And kept up to date from then on."""
    table = two_tasks(tmp_path / "sweep")
    table_files.save(table, tmp_path)
    assert not list(tmp_path.glob("*.csv"))
    table_files.save(table, tmp_path, csv=True)
    table_files.save(table[table["mixer"] == "linear"], tmp_path)
    for name in ("table", "settings"):
        text, exact = pd.read_csv(tmp_path / f"{name}.csv"), pd.read_parquet(tmp_path / f"{name}.parquet")
        assert list(text) == list(exact)
        for column in {"value", "seed", "task.length", "train.lr", "mixer.d_key", "mixer._target_"} & set(exact):
            assert known(text[column]) == known(exact[column])


def test_a_setting_with_numbers_and_words_is_saved_as_text(tmp_path):
    """Missing values stay missing, with any version of pandas, and never become the word "nan"."""
    mixed = pd.DataFrame({"metric": "accuracy", "mixer.decay": ["learned", 0.9, None, np.nan], "value": 1.0})
    table_files.write(mixed, tmp_path / "t.parquet")
    read = table_files.read(tmp_path / "t.parquet")["mixer.decay"]
    assert read[:2].tolist() == ["learned", "0.9"]
    assert read.isna().tolist() == [False, False, True, True]


def test_parameters_of_a_task_may_be_lists_and_numbers_of_any_size(tmp_path):
    cells = [{"length": 16, "gaps": gaps, "bits": bits} for gaps, bits in (([1, 2], 2**70), ([3], 1))]
    finished(tmp_path / "sweep", "a", composed(), [*rows(*cells), STEPS])
    table = results.collect(tmp_path / "sweep")
    table_files.save(table, tmp_path, csv=True)
    again = table_files.read(tmp_path)
    assert known(again["task.gaps"]) == known(table["task.gaps"]) == ["[1, 2]", "[1, 2]", "[3]", "[3]", None]
    assert known(again["task.bits"]) == [str(2**70), str(2**70), "1", "1", None]


@pytest.mark.parametrize("column", ["run", "seconds", "mixer.heads"])
def test_a_probe_has_no_column_of_the_name_of_one_of_its_run(column, rng):
    """Otherwise a report would look for another run, or make a series of its rows."""
    assert {"probe", *probing.OF_THE_RUN} == {*table_files.FIRST, *table_files.FACTS}

    def odd(trace, rng):
        return [{"metric": "a", "value": 1.0, column: 1}]

    with pytest.raises(
        probing.ProbeError, match=rf"^probe odd, layer 0: column {column}: columns of the run have such names"
    ):
        probing.run_on_trace(odd, traced(pairs=2, d_key=4, reads=2), rng)
