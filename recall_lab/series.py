"""Names of series: the settings that distinguish the runs of a table, by exclusion (see `recall_lab.results`).

A name is the mixer and those of its settings that differ between the runs of that mixer on that task:
"linear", "linear heads=2", "hybrid(delta_rule, softmax)".
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd

from recall_lab.files import mixer_options

LONGEST = 24
"""Largest number of characters of a value in a series' name. A longer value is replaced by a hash of it."""


def setting_columns(table: pd.DataFrame, axis: Sequence[str] = ()) -> list[str]:
    """The table's settings: columns with a dot, except the cell's (`task.*`) and those in `axis`."""
    names = [name for name in table.columns if ("." in name and not name.startswith("task.")) or name == "trained_as"]
    order = ("_target_", "trained_as", "mixer.", "oracle.", "probe.", "model.", "train.", "trained.", "test.")

    def rank(name: str) -> int:
        return next((i for i, part in enumerate(order) if name.startswith(part) or name.endswith(part)), len(order))

    return sorted((name for name in names if name not in axis), key=rank)


def condition(table: pd.DataFrame, axis: Sequence[str] = ()) -> pd.Series:
    """A number for each row: equal for rows of one mixer, one task and equal settings, except those in `axis`."""
    columns = [name for name in ("mixer", "task") if name in table] + setting_columns(table, axis)
    codes = pd.DataFrame({name: _text(table[name]) for name in columns}, index=table.index)
    return codes.groupby(columns, sort=False).ngroup() if columns else pd.Series(0, index=table.index)


def series(table: pd.DataFrame, axis: Sequence[str] = ()) -> pd.Series:
    """The name of each row's series. Two rows have the same name only if they have the same mixer and settings, except
    those in `axis`.

    axis  settings that a figure shows as positions, panels or colours; a setting that equals one of them in every row
          (d_value where d_value = d_key) is left out too
    """
    mixers = _mixers(table)
    names = mixers.copy()
    if "trained_as" in table:  # a mixer on the weights of another one is never mistaken for a trained one
        names += [f" trained_as={mixer}" if isinstance(mixer, str) else "" for mixer in table["trained_as"]]
    groups = [name for name in ("mixer", "task", "probe") if name in table]
    columns = setting_columns(table, axis)
    columns = [
        c for c in columns if c != "trained_as" and not any(a in table and table[c].equals(table[a]) for a in axis)
    ]
    # They come last, after `trained_as`: only differences between weights of one trained mixer are to be named.
    of_weights = [c for c in columns if c.startswith("trained_mixer.")]
    columns = [c for c in columns if c not in of_weights]
    columns += ["trained_as", *of_weights] if of_weights else []
    text = pd.DataFrame({name: _text(table[name]) for name in columns}, index=table.index)
    parts = [name for name in columns if _names_a_part(name)]
    for _, rows in table.groupby(groups, dropna=False, sort=False):
        # The brackets of a hybrid name its parts, unless two modules have the same name.
        bracketed = mixers[rows.index].nunique() == len(text.loc[rows.index, parts].drop_duplicates())
        for column in _distinguishing(text.loc[rows.index].drop_duplicates()):
            if column == "trained_as" or (column in parts and bracketed):
                continue
            word = _word(column, columns)
            label = {key: f" {word}={value}" for key, value in _shortened(rows[column].dropna()).items()}
            names.loc[rows.index] += text.loc[rows.index, column].map(label).fillna("")
    return names


def _shortened(values: pd.Series) -> dict[str, str]:
    """Text of each value (see `_text`) → its short form in a series' name. Different values have different forms."""
    short = {word: _short(value) for word, value in zip(_text(values), values, strict=True)}
    count = Counter(short.values())
    return {word: name if count[name] == 1 else f"{name}{_digest(word)}" for word, name in short.items()}


def _short(value: object) -> str:
    """A value as a series' name shows it: true, 0.01, the class of a `_target_`, a hash of a long list."""
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}"
    text = str(value)
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", text):
        return text.rpartition(".")[2]
    return text if len(text) <= LONGEST else _code(text)


def _code(text: str) -> str:
    """A hash of the text; for a list of cells, the range of each parameter and then the hash."""
    digest = _digest(text)
    try:
        cells = pd.DataFrame(json.loads(text)).select_dtypes("number")
    except ValueError:
        return digest
    limits = {name: sorted({values.min(), values.max()}) for name, values in cells.items()}
    ranges = [f"{name} {'–'.join(f'{value:g}' for value in limit)}" for name, limit in limits.items()]
    return f"({', '.join([*ranges, digest])})"


def _digest(text: str) -> str:
    return "#" + hashlib.sha256(text.encode()).hexdigest()[:4]


def _distinguishing(distinct: pd.DataFrame) -> list[str]:
    """Columns that together distinguish all rows. Each separates rows that are equal in the columns before it."""
    chosen: list[str] = []
    parts = 1
    for column in distinct.columns:
        if distinct[column].nunique() == 1:
            continue
        count = len(distinct[[*chosen, column]].drop_duplicates())
        if count > parts:
            chosen.append(column)
            parts = count
    return chosen


def _names_a_part(column: str) -> bool:
    """Whether the column names the mechanism of a hybrid's part, as mixer.first._target_ does."""
    return column.startswith("mixer.") and column.endswith("._target_") and column.count(".") == 2


def _part(column: str, target: str) -> str:
    """The name of a hybrid's part, which is that of its module; of the layer of `mixer=module`, that of its class."""
    return target.split(".")[-1 if column == "mixer.layer._target_" else -2 if "." in target else 0]


def _word(column: str, columns: list[str]) -> str:
    """The last part of a setting's name, or the full name where two settings have the same last part, or where mixers
    have an option of this name, which rows of the oracle lack."""
    parent, _, last = column.rpartition(".")
    if last == "_target_":
        return parent.rpartition(".")[2]
    if parent == "oracle" and last in mixer_options():
        return column
    return column if sum(other.rpartition(".")[2] == last for other in columns) > 1 else last


def _text(column: pd.Series) -> pd.Series:
    """The values as text: 1 and 1.0 have the same text, true and 1 have not, and a missing value is "∅"."""

    def word(value: object) -> str:
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | float):
            return f"'{value}'"
        return "∅" if value != value else repr(float(value))

    if column.dtype == object and column.map(type).eq(bool).any():
        return column.map(word, na_action="ignore").fillna("∅")
    codes, values = pd.factorize(column, use_na_sentinel=True)
    words = np.array([*map(word, values.tolist()), "∅"], dtype=object)
    return pd.Series(words[codes], index=column.index)


def _mixers(table: pd.DataFrame) -> pd.Series:
    """Each row's mixer, with the parts of a hybrid in brackets: "hybrid(delta_rule, softmax)"."""
    names = table["mixer"].astype(object)
    parts = [name for name in table.columns if _names_a_part(name)]
    for values, rows in table[parts].dropna(how="all").groupby(parts, dropna=False) if parts else ():
        modules = ", ".join(_part(name, value) for name, value in zip(parts, values, strict=True) if value == value)
        names.loc[rows.index] += f"({modules})"
    return names
