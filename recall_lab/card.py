"""Memory cards: their parts, the results of the built-in mechanisms, and the numbers of a card.

The package holds a table with results of the built-in mechanisms, so that a card trains only the mechanism that it is
about. The table has the columns of `results.collect`, the runs selected on validation, and `experiment`. Each row
names the revision, the versions and the machine that it was measured with.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from recall_lab import folders, results, table_files
from recall_lab.checks import require
from recall_lab.files import OWN as OWN_FOLDERS
from recall_lab.messages import short
from recall_lab.series import condition, series, setting_columns

SPEC = Path(__file__).with_name("card.yaml")
"""What cards consist of."""

TABLE = Path(__file__).with_name("card.parquet")
"""The results of the built-in mechanisms; `recall-lab card --collect` writes this file."""

UNUSED = ("singular_value", "loss_bits", "tokens", "scored_tokens", "sequences", "steps", "solved")
"""Metrics that the package's table leaves out, because no part of a card shows them."""

ORIGIN = "origin"
"""Column of a card's table: OWN for a run of this command, PACKAGE for a row of the package's table."""
OWN, PACKAGE = "run", "package"


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number of the card: the mean of a metric over some rows, per series."""

    name: str
    metric: str
    where: Mapping[str, Any] = field(default_factory=dict)
    """Column → its value in these rows."""
    largest: Sequence[str] = ()
    """Columns of which only the largest value counts, within each run."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A section of the card, with the figures and numbers of one experiment."""

    title: str
    experiment: str
    text: str = ""
    figures: Sequence[str] = ()
    """Names of figures, or the beginnings of their names."""
    numbers: Sequence[Number] = ()


@dataclass(frozen=True, kw_only=True)
class Card:
    """What cards consist of: the content of card.yaml."""

    parts: Sequence[Part]
    beside: Sequence[str] = ()
    """Built-in mechanisms that are shown for comparison."""
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Experiment → settings of its runs."""
    here: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Experiment → mechanisms for which it is also run, instead of using the package's table."""

    @property
    def experiments(self) -> list[str]:
        """The experiments of all parts, each once."""
        return list(dict.fromkeys(part.experiment for part in self.parts))


def read() -> Card:
    """The card.yaml in the folder given with --config-dir, if there is one, else the package's.

    Raises ValueError, naming the file and the key, for a key that is unknown or missing.
    """
    path = next((folder / SPEC.name for folder in OWN_FOLDERS if (folder / SPEC.name).exists()), SPEC)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    _check(Card, content, str(path))
    parts = []
    for entry in content["parts"]:
        _check(Part, entry, f"{path}: parts")
        raw = entry.get("numbers", [])
        for number in raw:
            _check(Number, number, f"{path}: numbers of {entry['title']}")
        parts.append(Part(**{**entry, "numbers": [Number(**number) for number in raw]}))
    return Card(**{**content, "parts": parts})


def _check(kind: type, content: Any, where: str) -> None:
    """Raises ValueError where the content does not have the keys that are the fields of a dataclass."""
    names = {one.name: one.default is MISSING and one.default_factory is MISSING for one in fields(kind)}
    require(isinstance(content, dict), f"{where}: must have the keys {', '.join(names)}, and is {content!r}")
    for key in content:
        require(key in names, f"{where}: there is no key {key!r}; there are {', '.join(names)}")
    for key, needed in names.items():
        require(key in content or not needed, f"{where}: the key {key!r} is missing")


def package() -> pd.DataFrame:
    """The results of the built-in mechanisms; an empty table where the package has none."""
    return table_files.read(TABLE) if TABLE.exists() else pd.DataFrame({"experiment": [], "mixer": [], "run": []})


def collect(paths: Iterable[str | Path], experiments: Sequence[str]) -> pd.DataFrame:
    """The package's table from finished results: those of `experiments`, selected on validation.

    paths  sweeps' folders, each with the name of its experiment; folders with a table.parquet, or such a file, that
           has the column `experiment` or lies in a folder with the experiment's name. Of a run that occurs twice, the
           last one counts

    Raises ValueError where a path holds no results, or none of these experiments occurs.
    """
    parts = [part for path in paths for part in _tables(Path(path)) if part["experiment"].iloc[0] in experiments]
    require(bool(parts), f"no results of {', '.join(experiments)} in {', '.join(map(str, paths))}")
    table = pd.concat([part.dropna(axis=1, how="all") for part in parts], keys=range(len(parts)), names=["part"])
    table = table.reset_index("part").reset_index(drop=True)
    table = table[table["part"] == table.groupby(["experiment", "run"])["part"].transform("max")]
    table = table[~table["metric"].isin(UNUSED)].drop(columns=["part", "series", "trained_to_end"], errors="ignore")
    for name in table.columns:  # a column of int and float objects would be saved as text
        if set(table[name].dropna().map(type)) == {int, float}:
            table[name] = table[name].astype(float)
    return table.reset_index(drop=True)


def _tables(path: Path) -> list[pd.DataFrame]:
    """The selected rows of every experiment that a path holds, with the column `experiment`."""
    if (path / folders.MARK).exists():
        table = results.select(results.collect(path), results.selected_settings(path))
        return [table.assign(experiment=path.resolve().name)]
    file = path if path.is_file() else path / "table.parquet"
    require(file.is_file(), f"{path}: must be a sweep's folder, or hold a table.parquet")
    table = table_files.read(file)
    if "experiment" not in table:
        return [results.select(table).assign(experiment=file.resolve().parent.name)]
    return [part for _, part in table.groupby("experiment")]


def combined(own: pd.DataFrame, others: pd.DataFrame, over: Sequence[str]) -> pd.DataFrame:
    """One table of own runs and of the others that are comparable, with the column ORIGIN and new names of series.

    A series of which there are own runs is left out of the others.
    over  the settings that were selected on validation
    """
    own = own.assign(**{ORIGIN: OWN})
    kept = comparable(own, others, over).assign(**{ORIGIN: PACKAGE})
    parts = [part.dropna(axis=1, how="all") for part in (kept, own) if len(part)]
    table = pd.concat(parts, ignore_index=True)
    names = series(table, axis=over)
    table = table[(table[ORIGIN] == OWN) | ~names.isin(names[table[ORIGIN] == OWN])]
    table = table.assign(series=series(table, axis=over))
    table.attrs["selected"] = tuple(over)
    return table


def comparable(own: pd.DataFrame, others: pd.DataFrame, over: Sequence[str]) -> pd.DataFrame:
    """The rows of other runs whose settings, except the mixer's and the selected ones, equal those of an own run.

    Settings that only one of the tables has, such as those of a later version, are not compared.
    """
    left_out = (*over, *results.SELECTED)
    columns = [name for name in setting_columns(own, left_out) if name in others and not name.startswith("mixer.")]
    firsts = [part.groupby("run")[columns].first().astype(object) for part in (own, others) if len(part)]
    if len(firsts) < 2:
        return others[:0]
    both = pd.concat(firsts, keys=(OWN, PACKAGE), names=[ORIGIN, "run"])
    codes = condition(both.reset_index(), axis=()).to_numpy()
    origin, run = both.index.get_level_values(ORIGIN), both.index.get_level_values("run")
    mine = set(codes[origin == OWN])
    return others[others["run"].isin([name for name, code in zip(run, codes, strict=True) if code in mine])]


def numbers(part: Part, table: pd.DataFrame, over: Sequence[str]) -> pd.DataFrame:
    """The numbers of a part: columns part, number, series, mean, low, high, runs, origin, git.

    table  rows of the part's experiment (see `combined`)
    git    the revisions of the runs, joined by commas
    """
    found = []
    for number in part.numbers:
        rows = _rows(number, table)
        if rows.empty:
            continue
        rows = rows.assign(series=series(rows, axis=over))
        means = results.average(rows, ["series"]).assign(part=part.title, number=number.name)
        facts = rows.groupby("series")[[ORIGIN, "git"]].agg(lambda values: ", ".join(sorted(set(values.dropna()))))
        found.append(means.merge(facts.reset_index(), on="series"))
    columns = ["part", "number", "series", "mean", "low", "high", "runs", ORIGIN, "git"]
    return pd.concat(found, ignore_index=True)[columns] if found else pd.DataFrame(columns=columns)


def _rows(number: Number, table: pd.DataFrame) -> pd.DataFrame:
    """The rows over which a number is averaged."""
    if not {"metric", *number.where, *number.largest} <= set(table):
        return table[:0]
    rows = table[(table["metric"] == number.metric) & (table["split"] != "validation")]
    if (rows["split"] == "test").any():  # the probe retrieval measures accuracies too, on fewer sequences
        rows = rows[rows["split"] == "test"]
    for name, value in number.where.items():
        rows = rows[rows[name] == value]
    for name in number.largest:
        rows = rows[rows[name] == rows.groupby("run")[name].transform("max")]
    return rows


def grid(
    found: pd.DataFrame,
    order: Sequence[str] = (),
    first: Container[str] = (),
    part: bool = True,
    intervals: bool = True,
) -> pd.DataFrame:
    """The numbers as text, one row per number and one column per series.

    order  series in the order of their columns; others follow by name
    first  series that come before all others
    part   whether the index names the part of the card as well
    """
    if found.empty:
        return pd.DataFrame()
    texts = [
        f"{short(mean)} [{short(low)}, {short(high)}]" if intervals and runs > 1 and low < high else short(mean)
        for mean, low, high, runs in found[["mean", "low", "high", "runs"]].itertuples(index=False)
    ]
    keys = ["part", "number"]
    made = found.assign(text=texts).pivot(index=keys, columns="series", values="text").fillna("")
    known = [*order]
    names = sorted(made, key=lambda name: (name not in first, known.index(name) if name in known else len(known), name))
    rows = found[keys].drop_duplicates().itertuples(index=False, name=None)
    ordered = made.loc[list(rows), names].rename_axis(columns=None)
    return ordered if part else ordered.droplevel("part")
