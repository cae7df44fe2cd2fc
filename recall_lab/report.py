"""From a sweep's folder to its table, figures and one self-contained report.html."""

import base64
import html
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from recall_lab import figure as figures
from recall_lab import folders, results
from recall_lab.figure import style
from recall_lab.files import read_json, replacing

WIDE = 12
"""Cells that a line of a table may hold."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0 }} th, td {{ padding: .2rem .7rem; text-align: right }}
th {{ border-bottom: 1px solid #888 }} td:first-child, th:first-child {{ text-align: left }}
img {{ max-width: 100% }} code, pre {{ background: #f4f4f4; padding: .1rem .3rem }} .bad {{ color: #a00 }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


@dataclass(frozen=True)
class Report:
    text: str
    failed: list[str]


def make(folder: Path) -> Report:
    """Writes FOLDER/table.parquet, FOLDER/figure/*.png and .svg, and FOLDER/report.html.

    Returns the summary for a terminal: the score by series and cell, what is missing, where the report lies.
    Raises results.ForeignFolder where there is nothing to report.
    """
    table = results.collect(folder)
    results.save(table, folder / "table.parquet")
    chosen = results.select(table)
    drawn = dict(_figures(pd.concat([chosen, _curves(folder, chosen)])))
    (folder / "figure").mkdir(exist_ok=True)
    for name, drawing in drawn.items():
        for kind in ("png", "svg"):
            metadata = {"Date": None} if kind == "svg" else None
            # How an svg is written, the same each time, is part of the style.
            with style.style(), replacing(folder / "figure" / f"{name}.{kind}") as temporary:
                drawing.savefig(temporary, format=kind, dpi=150, metadata=metadata)
    grids = _grids(chosen)
    missing = _missing(folder)
    page = folder / "report.html"
    with replacing(page) as temporary:
        temporary.write_text(_page(folder, table, chosen, grids, list(drawn), missing), encoding="utf-8")
    text = [f"\n{title}\n{grid.to_string()}" for title, grid in grids.items()]
    text += [f"\nnot in the table: {line}" for line in missing]
    return Report("\n".join([*text, f"\nreport: {page}"]), [])


def _figures(table: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Every figure that some module of recall_lab.figure can draw of this table."""
    for module in pkgutil.iter_modules(figures.__path__):
        if module.name != "style":
            yield from importlib.import_module(f"{figures.__name__}.{module.name}").draw(table)


def _curves(folder: Path, table: pd.DataFrame) -> pd.DataFrame:
    """The training curves as rows of the table, for the runs that are in it."""
    runs = table.drop_duplicates("run").set_index("run")[["mixer", "task", "series", "seed"]]
    return pd.DataFrame(
        [
            {"run": run, **facts, "split": "validation", "metric": "curve_accuracy", "step": point["step"],
             "value": point["accuracy"]}
            for run, facts in runs.to_dict("index").items()
            for point in read_json(folder / run / "curve.json", [])
        ]
    )  # fmt: skip


def _grids(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """For each task, accuracy per scored token, mean [interval]: a line a series, a column a tested cell; the other way
    round where cells are many."""
    grids = {}
    scored = table[table["metric"].isin(results.SCORES) & (table["split"] == "test")]
    for task, part in scored.groupby("task"):
        scales = [c for c in part if c.startswith("task.") and part[c].nunique() > 1]
        scales = scales or ["task.length"]
        points = results.summarise(part, ["series", *scales])
        points["accuracy"] = [
            f"{mean:.3f} [{low:.3f}, {high:.3f}]" if runs > 1 else f"{mean:.3f}"
            for mean, low, high, runs in points[["mean", "low", "high", "runs"]].itertuples(index=False)
        ]
        names = [name.removeprefix("task.") for name in scales]
        grid = points.rename(columns=dict(zip(scales, names, strict=True)))
        grid["runs"] = grid.groupby("series")["runs"].transform("max")
        grid = grid.pivot(index=["series", "runs"], columns=names, values="accuracy").fillna("")
        grid = grid.T if grid.shape[1] > WIDE else grid
        score = "R²" if (part["metric"] == "r2").any() else "accuracy per scored token"
        title = f"{task}: {score} on the test stream, mean [{results.interval_name(points['runs'])}] over runs"
        grids[title] = grid
    return grids


def _missing(folder: Path) -> list[str]:
    """A line for every run that has no result."""
    lines = []
    for run in folders.runs(folder):
        status = folders.status(run)
        if status["state"] != "finished":
            what = ""
            if (run / "config.yaml").exists():
                config = folders.read_config(run)
                what = f" ({config['choice']['mixer']} on {config['choice']['task']}, seed {config['seed']})"
            lines.append(f"{run.name}{what} is {status['state']}{': ' + e if (e := status.get('error')) else ''}")
    return lines


def _page(
    folder: Path,
    table: pd.DataFrame,
    chosen: pd.DataFrame,
    grids: dict[str, pd.DataFrame],
    drawn: list[str],
    missing: list[str],
) -> str:
    parts = []
    for title, grid in grids.items():
        parts.append(f"<h2>{html.escape(title)}</h2>{grid.to_html(border=0)}")
    if missing:
        parts.append("<h2>Not in the table</h2><ul class='bad'>")
        parts += [f"<li>{html.escape(line)}</li>" for line in missing] + ["</ul>"]
    for name in drawn:
        data = base64.b64encode((folder / "figure" / f"{name}.png").read_bytes()).decode()
        parts.append(f"<h2>{html.escape(name)}</h2><img alt='{html.escape(name)}' src='data:image/png;base64,{data}'>")
    if len(chosen) < len(table):
        parts.append("<p>Learning rates: of several, the best on the validation stream is shown for each series.</p>")
    once = table.drop_duplicates("run")
    facts = once.groupby(["git", "version", "torch", "numpy", "python", "device", "threads"], dropna=False)
    parts.append("<h2>Where it comes from</h2>")
    parts.append(facts["seconds"].agg(runs="size", seconds="sum").reset_index().to_html(border=0, index=False))
    parts.append(f"<p>All rows and settings: <code>table.parquet</code>; each run: <code>{folder}/RUN/</code>.</p>")
    return PAGE.format(title=f"recall_lab: {html.escape(folder.name)}", body="\n".join(parts))
