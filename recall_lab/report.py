"""Makes the report of a sweep's folder: its table, its figures and one self-contained report.html."""

import base64
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import jinja2
import pandas as pd
from matplotlib.figure import Figure

from recall_lab import fairness, folders, results
from recall_lab import figure as figures
from recall_lab.figure import style
from recall_lab.files import read_json, replacing, write_text

T = TypeVar("T")

WIDE = 12
"""Largest number of columns of a grid with one line per series; a wider grid is transposed."""

PROVENANCE = ["git", "version", "torch", "numpy", "python", "device", "threads"]
"""Columns on the revision, the versions and the machine of a run."""


@dataclass(frozen=True)
class Report:
    """What `make` returns."""

    text: str
    """Text for a terminal: grids, runs that are missing or replaced, parts that failed, and the path of report.html."""
    failed: list[str]
    """One line, with the error, for every grid or figure that could not be made and every run that could not be read.
    report.html is written without it."""


def make(folder: Path) -> Report:
    """Writes FOLDER/table.parquet, FOLDER/figure/*.png and *.svg, and FOLDER/report.html.

    A figure or grid that raises an exception, and a run with a damaged file, is named in report.html and in `failed`;
    the others are made. Raises folders.ForeignFolder if the folder is not that of a sweep, or if none of its runs has
    results, and ValueError if none can be read.
    """
    runs = folders.runs(folder)
    table, sound, failed = results.gather(folder, runs)
    results.save(table, folder / "table.parquet")
    over = results.selected_settings(folder)
    chosen = results.select(table, over)
    (folder / "figure").mkdir(exist_ok=True)
    drawn = pd.concat([chosen, _curves(folder, chosen)])
    drawn.attrs["selected"] = over
    images = _images(folder / "figure", drawn, table, failed)
    grids = _grids(chosen, failed)
    missing = [*_missing(runs), *results.repeated(sound)]
    notes = list(_attempt(failed, "notes on fairness", fairness.notes, chosen, table))
    page = folder / "report.html"
    content = {
        "title": f"recall_lab: {folder.name}",
        "folder": folder,
        "grids": {title: _html(grid) for title, grid in grids.items()},
        "missing": missing,
        "notes": notes,
        "failed": failed,
        "images": images,
        "selected": ", ".join(over) if len(chosen) < len(table) else "",
        "provenance": _provenance(table),
    }
    write_text(page, _template().render(content))
    text = [f"\n{title}\n{grid.to_string()}" for title, grid in grids.items()]
    text += [f"\nmissing or replaced: {line}" for line in missing]
    text += [f"\nnot in the report: {line}" for line in failed]
    text += [f"\nnote: {line}" for line in notes]
    return Report("\n".join([*text, f"\nreport: {page}"]), failed)


def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template("report.html.jinja")


def _images(folder: Path, chosen: pd.DataFrame, every: pd.DataFrame, failed: list[str]) -> dict[str, str]:
    """Draws and saves every figure of every task; returns name → png in base64.

    A figure shows the chosen runs, one whose module sets EVERY_RUN all of them.
    """
    images: dict[str, str] = {}
    files: set[str] = set()
    for module in pkgutil.iter_modules(figures.__path__):
        content = importlib.import_module(f"{figures.__name__}.{module.name}")
        draw = getattr(content, "draw", None)
        if draw is None:  # a module that figures share
            continue
        table = every if getattr(content, "EVERY_RUN", False) else chosen
        for task, part in table.groupby("task"):
            for name, drawing in _attempt(failed, f"figure {module.name} of {task}", draw, part):
                stem = folder / _file_name(name, files)
                for png in _attempt(failed, f"figure {name}", _save, drawing, stem):
                    images[name if name not in images else f"{name}, {task}"] = base64.b64encode(png).decode()
    return images


def _attempt(failed: list[str], what: str, make: Callable[..., Iterable[T]], *arguments: object) -> Iterator[T]:
    """Yields from make(*arguments). An exception ends this and is added to `failed` as a line starting with `what`."""
    try:
        yield from make(*arguments)
    except Exception as error:
        failed.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}")


def _file_name(name: str, taken: set[str]) -> str:
    """The name without characters that are special in paths and shells, made different from all names in `taken`."""
    stem = re.sub(r"[^\w.+=-]+", "-", name).strip("-.") or "figure"
    unique = next(s for s in (stem, *(f"{stem}-{number}" for number in range(2, len(taken) + 3))) if s not in taken)
    taken.add(unique)
    return unique


def _save(drawing: Figure, stem: Path) -> Iterator[bytes]:
    """Writes STEM.png and STEM.svg, and yields the png."""
    for kind, metadata in (("png", None), ("svg", {"Date": None})):
        # The same settings as when it was drawn, because they determine how the svg is written.
        with style.style(), replacing(stem.with_name(f"{stem.name}.{kind}")) as temporary:
            drawing.savefig(temporary, format=kind, dpi=150, metadata=metadata)
    yield stem.with_name(f"{stem.name}.png").read_bytes()


def _curves(folder: Path, table: pd.DataFrame) -> pd.DataFrame:
    """The training curves of the runs in the table, as rows of the metric curve_accuracy."""
    runs = table.drop_duplicates("run").set_index("run")[["mixer", "task", "series", "seed"]]
    return pd.DataFrame(
        [
            {"run": run, **facts, "split": "validation", "metric": "curve_accuracy", "step": point["step"],
             "value": point["accuracy"]}
            for run, facts in runs.to_dict("index").items()
            for point in read_json(folder / str(run) / "curve.json", [])
        ]
    )  # fmt: skip


def _grids(table: pd.DataFrame, failed: list[str]) -> dict[str, pd.DataFrame]:
    """Title → grid, one per task: the score in every tested cell, as mean [interval] over seeds."""
    grids: dict[str, pd.DataFrame] = {}
    scored = table[table["metric"].isin(results.SCORES) & (table["split"] == "test")]
    for task, part in scored.groupby("task"):
        grids |= dict(_attempt(failed, f"table of {task}", _grid, str(task), part))
    return grids


def _grid(task: str, part: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields (title, grid): one line per series and one column per tested cell; transposed if there are many cells."""
    varied = [c for c in part if c.startswith("task.") and part[c].nunique() > 1]
    varied = varied or [c for c in ("task.length",) if c in part]
    points = results.summarise(part, ["series", *varied])
    names = [name.removeprefix("task.") for name in varied]
    lines = points.rename(columns=dict(zip(varied, names, strict=True)))
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


def _html(grid: pd.DataFrame) -> str:
    """The grid as an HTML table. pandas escapes its text."""
    return str(grid.to_html(border=0))


def _missing(runs: Iterable[folders.Run]) -> Iterator[str]:
    """One line for every run that is not finished, except those with a damaged file."""
    for run in runs:
        state = run.status["state"]
        if state not in ("finished", "damaged"):
            reasons = [run.status["error"]] if run.status.get("error") else run.status.get("missing", [])
            because = f": {'; '.join(reasons)}" if reasons else ""
            removed = f" (to leave it out, delete {run.path})" if state == "failed" else ""
            yield f"{run.describe()} is {state}{because}{removed}"


def _provenance(table: pd.DataFrame) -> str:
    """Number of runs and their total time in seconds, per revision, versions and machine, as an HTML table."""
    groups = table.drop_duplicates("run").groupby(PROVENANCE, dropna=False)
    facts = groups["seconds"].agg(runs="size", seconds="sum").reset_index()
    return str(facts.to_html(border=0, index=False))
