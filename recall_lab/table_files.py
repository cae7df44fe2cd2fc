"""The table of results as two files, and back.

table.parquet     one row per metric, cell and run: the columns of the row, and the parameters of its cell that vary
settings.parquet  one row per run: every setting, the other parameters of its cells, and FACTS. A run whose rows are of
                  several series, as those of later probes with another mixer, has one row for each

KEYS join them; a setting is then null in the rows that it does not concern. A column that this would not restore
exactly stays in table.parquet. Without a settings.parquet beside it, table.parquet is complete.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from jaxtyping import Bool, Int
from pyarrow import compute, parquet
from pyarrow.csv import write_csv

from recall_lab.checks import require
from recall_lab.files import mixer_options, replacing

TABLE, SETTINGS = "table", "settings"
"""Names of the two files, without their endings."""

KEYS = ("experiment", "run", "series")
"""The columns that both files have; `experiment` only in the tables of claims and cards."""

FACTS = ("git", "torch", "numpy", "python", "version", "device", "threads", "seconds")
"""Columns on the revision, the versions and the machine of a run, and its time in seconds."""

FIRST = ("experiment", "run", "series", "mixer", "trained_as", "task", "seed", "data_seed", "split", "probe")
LAST = ("metric", "value", "low", "high", "count")
"""The columns of a row that stand first and last in table.parquet."""

OF_A_RUN = "steps"
"""The metric that is measured once per run; its row has no cell."""


def concerns(setting: str, probe: Any, split: Any) -> bool:
    """Whether a setting of a run concerns those of its rows that are of this probe (None: scores) and split.

    Settings of a probe concern its rows alone. The options that every mixer has do not concern rows of the oracle: it
    gives queries, keys and values directly to one head, whose widths are settings of its own.
    """
    if setting.startswith("probe."):
        return setting.startswith(f"probe.{probe}.")
    if setting == "test.probe_sequences":
        return isinstance(probe, str)
    part, _, name = setting.partition(".")
    return not (split == "oracle" and part == "mixer" and name in mixer_options())


def save(table: pd.DataFrame, folder: Path, csv: bool = False) -> None:
    """Writes the table to FOLDER/table.parquet and FOLDER/settings.parquet. Columns of a row without any value are left
    out; settings without one are kept, because null is a value of them. A column of mixed types becomes text.

    csv  also write table.csv and settings.csv; those that are there already are always written again
    """
    rows, settings = _divided(_arrow(table))
    # The settings first: `read` notices a table that is older than they are.
    for name, part in ((SETTINGS, settings), (TABLE, rows)):
        with replacing(folder / f"{name}.parquet") as temporary:
            parquet.write_table(part, temporary)
        if csv or (folder / f"{name}.csv").exists():
            with replacing(folder / f"{name}.csv") as temporary:
                write_csv(part, temporary)


def write(table: pd.DataFrame, path: Path) -> None:
    """Writes the complete table to one file; see `save` for mixed types."""
    with replacing(path) as temporary:
        parquet.write_table(_arrow(table), temporary)


def read(path: Path) -> pd.DataFrame:
    """The complete table that `save` has written to a folder, or `write` to a file.

    Raises OSError where it cannot be read, ValueError where the two files do not belong together.
    """
    file = path / f"{TABLE}.parquet" if path.is_dir() else path
    made = parquet.read_table(file)
    beside = file.with_name(f"{SETTINGS}.parquet")
    cells = {name for name in made.column_names if name.startswith("task.")}
    if file.name == f"{TABLE}.parquet" and beside.exists():
        made = _joined(made, parquet.read_table(beside), f"{file} and {beside.name} were not written together")
    concerned, same = _Concerned(made), np.arange(len(made))
    masks = {name: concerned(name) for name in made.column_names if name not in cells}
    for number, name in enumerate(made.column_names):
        if name in masks and not masks[name].all():
            made = made.set_column(number, name, _spread(made[name], same, masks[name]))
    return made.drop_columns([name for name, mask in masks.items() if not mask.any()]).to_pandas()


def _arrow(table: pd.DataFrame) -> pa.Table:
    """The table in Arrow's types. Missing values are null; mixed types, and numbers beyond 64 bits, text."""
    for name in table.columns:
        present = table[name].dropna()
        too_large = present.dtype == object and any(isinstance(x, int) and x.bit_length() > 63 for x in present)
        if present.map(type).nunique() > 1 or too_large:
            table = table.assign(**{name: present.map(str).reindex(table.index).astype(object)})
    return pa.Table.from_pandas(table, preserve_index=False).replace_schema_metadata()


def _divided(table: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The rows and the settings (see the top of this file)."""
    keys = _keys(table)
    codes = keys.groupby([*keys], sort=False, dropna=False).ngroup().to_numpy()
    kinds = codes.max(initial=-1) + 1
    settings: dict[str, pa.ChunkedArray] = {}
    concerned = _Concerned(table)
    for name in table.column_names:
        varies = len(compute.unique(table[name].drop_null())) > 1
        if not ("." in name or name in FACTS) or (name.startswith("task.") and varies):
            continue
        mask = concerned(name)
        first = np.full(kinds, -1)
        first[codes[mask][::-1]] = np.flatnonzero(mask)[::-1]  # of several rows, the last assignment counts
        values = table[name].take(pa.array(first, mask=first < 0))
        if _spread(values, codes, mask).equals(table[name]):
            settings[name] = values
    heads = np.unique(codes, return_index=True)[1]
    joining = {name: table[name].take(pa.array(heads)) for name in keys}
    left = [name for name in table.column_names if name not in settings and table[name].null_count < len(table)]
    return table.select(_ordered(left)), pa.table(joining | settings)


def _joined(rows: pa.Table, settings: pa.Table, apart: str) -> pa.Table:
    """The rows with their settings as columns; a setting is in all rows of its key. Raises ValueError(apart)."""
    keys = [*_keys(rows)]
    others = [name for name in settings.column_names if name not in keys]
    require(not set(others) & set(rows.column_names) and set(keys) <= set(settings.column_names), apart)
    known = pd.MultiIndex.from_frame(_keys(settings))
    codes = known.get_indexer(pd.MultiIndex.from_frame(_keys(rows))) if known.is_unique else np.array([-1])
    require(bool((codes >= 0).all()), apart)
    for name in others:
        rows = rows.append_column(name, _spread(settings[name], codes, np.ones(len(rows), dtype=bool)))
    return rows


def _keys(table: pa.Table) -> pd.DataFrame:
    return table.select([name for name in KEYS if name in table.column_names]).to_pandas()


class _Concerned:
    """Which rows of a table a column concerns: all, unless it is a setting or a parameter of the cell."""

    def __init__(self, table: pa.Table) -> None:
        names = [name for name in ("probe", "split") if name in table.column_names]
        kinds = table.select(names).to_pandas().reindex(columns=["probe", "split"]).astype(object)
        self.codes, self.kinds = pd.factorize(pd.Series(list(kinds.where(kinds.notna(), None).itertuples(index=False))))
        self.in_a_cell = table["metric"].to_numpy() != OF_A_RUN

    def __call__(self, name: str) -> Bool[np.ndarray, "rows"]:
        if name.startswith("task."):
            return self.in_a_cell
        return np.array([concerns(name, probe, split) for probe, split in self.kinds], dtype=bool)[self.codes]


def _spread(values: pa.ChunkedArray, index: Int[np.ndarray, "rows"], mask: Bool[np.ndarray, "rows"]) -> pa.ChunkedArray:
    """values[index] where the mask is true, else null."""
    return values.take(pa.array(index, mask=~mask))


def _ordered(names: list[str]) -> list[str]:
    """The columns of a row: FIRST, the cell's parameters, others, LAST."""
    cell = [name for name in names if name.startswith("task.")]
    others = [name for name in names if name not in (*FIRST, *cell, *LAST)]
    return [name for name in (*FIRST, *cell, *others, *LAST) if name in names]
