"""Makes the report of one sweep or several: its table, its figures, and the pages report.html and report.md."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from recall_lab import fairness, folders, page, results, search, table_files
from recall_lab.figure import style
from recall_lab.page import attempt
from recall_lab.series import setting_columns
from recall_lab.times import in_words

WIDE = 12
"""Largest number of columns of a grid with one line per series; a wider grid is transposed."""

MANY = 8
"""Largest number of values, cells or series that are listed."""

PROVENANCE = ["git", "version", "torch", "numpy", "python", "device", "threads"]
"""Columns on the revision, the versions and the machine of a run."""

VERDICTS = {
    "solved": "yes: every validation cell is solved",
    "end": "yes: {gain:+.3f} from twice {half:.0f} steps",
    "gains": "no: {gain:+.3f} from twice {half:.0f} steps",
    "unknown": "not shown",
}
"""Verdict of `fairness.trained_to_end` → words."""


@dataclass(frozen=True)
class Report:
    """What `make` returns."""

    text: str
    """Text for a terminal: grids, runs that are missing or replaced, parts that failed, and the path of report.html."""
    failed: list[str]
    """One line, with the error, for every grid or figure that could not be made and every run that could not be read.
    report.html is written without it."""


def beside(sweeps: Sequence[Path]) -> Path:
    """Where the report of these sweeps is written unless another folder is given: the folder of a single sweep; for
    several A+B, beside A."""
    first, *others = dict.fromkeys(sweep.resolve() for sweep in sweeps)
    return first.with_name("+".join(path.name for path in (first, *others))) if others else first


def _claim(folder: Path) -> None:
    """Creates a folder for the report of other sweeps. Raises ForeignFolder where it holds runs or other files."""
    folders.claim(folder)
    if folders.runs(folder):
        raise folders.ForeignFolder(f"{folder} holds runs of its own; choose another folder with --to")


def make(folder: Path, sweeps: Sequence[Path] = (), command: str = "", csv: bool = False) -> Report:
    """Writes the table (see `table_files`), figure/*.png, *.svg and *.pdf, report.html and report.md to FOLDER.

    sweeps   the folders whose runs are reported; FOLDER is then created. None: FOLDER itself
    command  the command that makes this report of several, which is listed after those of the runs
    csv      also write table.csv and settings.csv

    A figure or grid that raises an exception, and a run with a damaged file, is named in the pages and in `failed`;
    the others are made. Raises folders.ForeignFolder if the folder is not that of a sweep, or if none of its runs has
    results, and ValueError if none can be read.
    """
    sources = list({sweep.resolve(): sweep for sweep in sweeps or [folder]}.values())
    runs = folders.merged(sources)
    table, sound, failed = results.gather(sources, runs)
    if sweeps:
        _claim(folder)
    table_files.save(table, folder, csv)
    over = results.selected_settings(*sources)
    chosen = results.select(table, over)
    paths = {run.name: run.path for run in sound}  # of a run that is there twice, the newer
    drawn = page.with_curves(paths.__getitem__, chosen, over, failed)
    pictures = list(page.pictures(folder / "figure", drawn, table, failed))
    grids = _grids(chosen, failed)
    missing = [*_missing(runs), *results.repeated(sound)]
    gaps = [line for title, grid in grids.items() for line in _gaps(title.partition(":")[0], grid)]
    notes = list(attempt(failed, "notes on fairness", fairness.notes, chosen, table))
    commands = [made for source in sources for made in attempt(failed, "commands", folders.commands, source)]
    given = [*(made["command"] for made in commands), *([command] if command else [])]
    content = {
        "title": folder.resolve().name,
        "facts": _facts(table, chosen),
        "commands": list(dict.fromkeys(given)),
        "descriptions": list(dict.fromkeys(made["description"] for made in commands if made["description"])),
        "grids": grids,
        "missing": missing,
        "gaps": gaps,
        "notes": notes,
        "searches": next(attempt(failed, "searches", _searches, sources), None),
        "training": next(attempt(failed, "training", _training, chosen, table), None),
        "failed": failed,
        "pictures": pictures,
        "selected": ", ".join(over) if len(chosen) < len(table) else "",
        "varying": _settings(table, True),
        "constant": _settings(table, False),
        "environment": _environment(table),
    }
    path = page.write(folder, "sweep", content)
    text = [f"\n{title}\n{grid.to_string()}" for title, grid in grids.items()]
    text += [f"\nmissing or replaced: {line}" for line in missing]
    text += [f"\nnot in the report: {line}" for line in failed]
    text += [f"\nnote: {line}" for line in notes]
    return Report("\n".join([*text, f"\nreport: {path}"]), failed)


def _facts(table: pd.DataFrame, chosen: pd.DataFrame) -> str:
    """The size of the sweep in a line."""
    runs = table.drop_duplicates("run")
    counts = {"run": len(runs), "series": chosen["series"].nunique(), "task": runs["task"].nunique(),
              "seed": runs["seed"].nunique()}  # fmt: skip
    words = [f"{n} {name if n == 1 or name == 'series' else name + 's'}" for name, n in counts.items()]
    return f"{', '.join(words)}, {in_words(runs['seconds'].sum())} of computation"


def _grids(table: pd.DataFrame, failed: list[str]) -> dict[str, pd.DataFrame]:
    """Title → grid, one per task: the score in every tested cell, as mean [interval] over seeds."""
    grids: dict[str, pd.DataFrame] = {}
    scored = table[table["metric"].isin(results.SCORES) & (table["split"] == "test")]
    for task, part in scored.groupby("task"):
        grids |= dict(attempt(failed, f"table of {task}", _grid, str(task), part))
    return grids


def _grid(task: str, part: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields (title, grid): one line per series and one column per tested cell; transposed if there are many cells."""
    varied = [c for c in part if c.startswith("task.") and part[c].nunique() > 1]
    varied = varied or [c for c in ("task.length",) if c in part]
    points = results.summarise(part, ["series", *varied])
    names = [name.removeprefix("task.") for name in varied]
    lines = points.rename(columns=dict(zip(varied, names, strict=True)))
    for name in names:  # rows on a whole run have no cell, which makes whole numbers of other rows fractional
        if pd.api.types.is_float_dtype(lines[name]) and (lines[name] % 1 == 0).all():
            lines[name] = lines[name].astype(int)
    lines["seeds"] = lines.groupby("series")["runs"].transform("max")
    lines["score"] = [
        f"{mean:.3f} [{low:.3f}, {high:.3f}]" if runs > 1 else f"{mean:.3f}"
        for mean, low, high, runs in points[["mean", "low", "high", "runs"]].itertuples(index=False)
    ]
    if names:
        grid = lines.pivot(index=["series", "seeds"], columns=names, values="score").fillna("")
    else:
        grid = lines.set_index(["series", "seeds"])[["score"]]
    grid = grid.loc[sorted(grid.index, key=lambda index: style.rank(index[0]))]
    score = "R²" if (part["metric"] == "r2").any() else "accuracy per scored token"
    interval = f", mean [{results.interval_name(points['runs'])}] over seeds" if points["runs"].max() > 1 else ""
    yield f"{task}: {score} on test data{interval}", grid.T if grid.shape[1] > WIDE else grid


def _gaps(task: str, grid: pd.DataFrame) -> Iterator[str]:
    """One line for every series that lacks tested cells, or seeds, which others of the task have."""
    lines = grid if grid.index.names[0] == "series" else grid.T
    most = max(seeds for _, seeds in lines.index)
    for (name, seeds), scores in list(lines.iterrows()):
        if seeds < most:
            yield f"{task}: {name} has {seeds} of {most} seeds"
        empty = [key if isinstance(key, tuple) else (key,) for key in scores.index[scores == ""]]
        cells = ["=".join((str(n), str(x))) for key in empty[:1] for n, x in zip(scores.index.names, key, strict=True)]
        if empty:
            more = f" and in {len(empty) - 1} other cells" if len(empty) > 1 else ""
            yield f"{task}: {name} was not tested at {', '.join(cells)}{more}"


def _missing(runs: Iterable[folders.Run]) -> Iterator[str]:
    """One line for every run that is not finished, except those with a damaged file."""
    for run in runs:
        state = run.status["state"]
        if state not in ("finished", "damaged"):
            reasons = [run.status["error"]] if run.status.get("error") else run.status.get("missing", [])
            because = f": {'; '.join(reasons)}" if reasons else ""
            removed = f" (to leave it out, delete {run.path})" if state == "failed" else ""
            yield f"{run.describe()} is {state}{because}{removed}"


def _training(chosen: pd.DataFrame, table: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yields one table, if there are trained runs: the rate, and whether the end of training is reached, per series."""
    ends = fairness.trained_to_end(chosen, table)
    if ends.empty:
        return
    ends["trained to the end"] = [VERDICTS[line.verdict].format(gain=line.gain, half=line.half)
                                  for line in ends.itertuples()]  # fmt: skip
    shown = ends[["task", "series", "steps", "trained to the end"]].astype({"steps": int})
    points = results.rates(table)
    if not points.empty:
        tried = points.groupby(["task", "series"])["train.lr"].agg(lambda rates: ", ".join(f"{x:g}" for x in rates))
        best = points[points["chosen"]].set_index(["task", "series"])
        edge = best["edge"].map({True: ", at the edge of the grid", False: ""})
        words = best["train.lr"].map("{:g}".format) + edge
        both = pd.DataFrame({"best train.lr": words, "of": tried}).reset_index()
        shown = shown.merge(both, on=["task", "series"], how="outer").fillna("")
    yield shown.loc[sorted(shown.index, key=lambda i: (shown["task"][i], style.rank(shown["series"][i])))]


def _searches(sources: Sequence[Path]) -> Iterator[pd.DataFrame]:
    """Yields one table, if there are searches: the best trial of each."""
    found = search.best_trials(sources)
    if not found.empty:
        yield found


def _settings(table: pd.DataFrame, varying: bool) -> pd.DataFrame:
    """The settings that take several values in the table, or those that take one, with the mixers that have them."""
    records = []
    for name in [*setting_columns(table), *results.REPLICATES]:
        values = table[name].dropna().unique().tolist() if name in table else []
        if len(values) and (len(values) > 1) == varying:
            mixers = table.loc[table[name].notna(), "mixer"].unique().tolist()
            where = _listed(mixers) if len(mixers) < table["mixer"].nunique() else ""
            records.append({"setting": name, "values" if varying else "value": _listed(values), "only of": where})
    found = pd.DataFrame(records)
    return found.drop(columns="only of") if records and not found["only of"].any() else found


def _listed(values: Sequence[Any]) -> str:
    """The values in order, the first MANY of them."""
    numbers = all(isinstance(x, int | float) for x in values)
    ordered = sorted(values) if numbers else sorted(map(str, values))
    words = [f"{x:g}" if isinstance(x, float) else str(x).lower() if isinstance(x, bool) else str(x) for x in ordered]
    return ", ".join(words[:MANY]) + (f" and {len(words) - MANY} more" if len(words) > MANY else "")


def _environment(table: pd.DataFrame) -> pd.DataFrame:
    """Number of runs and their total time in seconds, per revision, versions and machine."""
    groups = table.drop_duplicates("run").groupby(PROVENANCE, dropna=False)
    return groups["seconds"].agg(runs="size", seconds="sum").round(1).reset_index()
