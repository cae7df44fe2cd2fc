"""What the pages of reports share: figures with captions, tables, and the templates in templates/."""

import base64
import importlib
import inspect
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import jinja2
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from recall_lab import figure as figures
from recall_lab.figure import layout, style
from recall_lab.files import read_json, replacing, write_text

T = TypeVar("T")

TEMPLATES = Path(__file__).parent / "templates"

DPI = 200
"""Pixels of a figure's png per inch."""

CSS_DPI = 136
"""Pixels of a page per inch of a figure: print is read from nearer than a screen, so figures are enlarged by 1.4."""

FORMATS: dict[str, dict[str, None]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""Format of a figure's files → the metadata that would make equal figures differ, left out."""


@dataclass(frozen=True)
class Picture:
    """A figure in a page."""

    name: str
    file: str
    """The name of its files in the folder figure/, without an ending."""
    caption: str
    """What the figure shows, in sentences."""
    png: bytes

    @property
    def data(self) -> str:
        """The png in base64."""
        return base64.b64encode(self.png).decode()

    @property
    def alt(self) -> str:
        """The name and the first sentence of the caption."""
        first, *_ = re.split(r"(?<=[.])\s", self.caption, maxsplit=1)
        return f"{self.name}: {first}"

    @property
    def width(self) -> int:
        """Pixels of the page, as the png states them in its header."""
        return self._size[0]

    @property
    def height(self) -> int:
        """Pixels of the page."""
        return self._size[1]

    @property
    def _size(self) -> tuple[int, int]:
        width, height = struct.unpack(">II", self.png[16:24])
        return round(width * CSS_DPI / DPI), round(height * CSS_DPI / DPI)


def write(folder: Path, kind: str, content: dict[str, Any]) -> Path:
    """Writes FOLDER/report.html and FOLDER/report.md from templates/KIND.*.jinja. Returns the path of the page."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"as_html": as_html, "as_markdown": as_markdown}
    for ending in ("md", "html"):
        text = environment.get_template(f"{kind}.{ending}.jinja").render(contents=[], **content)
        write_text(folder / f"report.{ending}", text.lstrip())
    return folder / "report.html"


def as_html(frame: pd.DataFrame) -> Markup:
    """The frame as an HTML table, intervals in small print. An index without a name is left out."""
    table = frame.to_html(border=0, index=any(frame.index.names))  # pandas escapes the text
    number = r"-?\d[\d.]*"
    small = re.sub(rf" (\[{number}, {number}\])", r" <small>\1</small>", table)
    return Markup(small)


def as_markdown(frame: pd.DataFrame) -> str:
    """The frame as a Markdown table. An index without a name is left out."""
    flat = frame.reset_index() if any(frame.index.names) else frame
    heads = [_head(head if isinstance(head, tuple) else (head,), flat.columns.names) for head in flat]
    rows = [heads, ["---"] * len(heads), *flat.astype(object).itertuples(index=False)]
    lines = [" | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _head(values: tuple[object, ...], names: Sequence[object]) -> str:
    """The head of a column in words: "length=16 pairs=4", or its name."""
    pairs = zip(names, values, strict=True)
    return " ".join(f"{name}={value}" if name and values[-1:] != ("",) else str(value) for name, value in pairs).strip()


def attempt(failed: list[str], what: str, make: Callable[..., Iterable[T]], *arguments: object) -> Iterator[T]:
    """Yields from make(*arguments). An exception ends this and is added to `failed` as a line starting with `what`."""
    try:
        yield from make(*arguments)
    except Exception as error:
        failed.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}")


def pictures(
    folder: Path,
    chosen: pd.DataFrame,
    every: pd.DataFrame,
    failed: list[str],
    wanted: Sequence[str] = ("",),
    prefix: str = "",
) -> Iterator[Picture]:
    """Draws and saves the figures of every task whose names begin with one of `wanted`. A figure whose module sets
    EVERY_TASK is drawn once, from the rows of all tasks. Names of figures begin with that of their module: modules none
    of whose figures can be wanted draw nothing.

    folder  where FILE.png, FILE.svg and FILE.pdf are written; it is created
    chosen  the rows of the runs that the report shows, with their training curves
    every   the rows of all runs, for a figure whose module sets EVERY_RUN
    prefix  before the names of the files
    """
    folder.mkdir(parents=True, exist_ok=True)
    names: set[str] = set()
    files: set[str] = set()
    for module, content in drawing_modules(failed):
        if not any(module.startswith(name) or name.startswith(module) for name in wanted):
            continue
        table = every if getattr(content, "EVERY_RUN", False) else chosen
        together = getattr(content, "EVERY_TASK", False)
        for task, part in [("all tasks", table)] if together else table.groupby("task"):
            for name, drawing in attempt(failed, f"figure {module} of {task}", content.draw, part):
                if not name.startswith(tuple(wanted)):
                    continue
                stem = folder / _file_name(f"{prefix}{name}", files)
                for png in attempt(failed, f"figure {name}", _save, drawing, stem):
                    shown = name if name not in names else f"{name}, {task}"
                    names.add(shown)
                    yield Picture(shown, stem.name, caption(content), png)


def drawing_modules(failed: list[str]) -> Iterator[tuple[str, ModuleType]]:
    """Name → module of every figure, the user's own included. One that cannot be imported is added to `failed`."""
    for name in figures.names():
        for content in attempt(failed, f"figure {name}", _imported, name):
            if hasattr(content, "draw"):  # others are modules that figures share
                yield name, content


def _imported(name: str) -> Iterator[ModuleType]:
    yield importlib.import_module(f"{figures.__name__}.{name}")


def caption(module: ModuleType) -> str:
    """What a figure shows, from the docstrings of its module and of `draw`, without the names that `draw` yields."""
    about = (module.__doc__ or "").strip().split("\n\n", maxsplit=1)[0]
    details = inspect.cleandoc(module.draw.__doc__ or "")
    details = re.sub(r'^Yields \("[^"]+", figure\)[^:.]*[:.]\s*', "", details)
    details = re.sub(r'\("[^"]+", figure\) ', "", details)
    details = re.sub(r"`style\.([A-Z]+)`", lambda found: str(getattr(style, found[1])), details)
    details = re.sub(r" \(see `\w+`\)", "", details).replace("`", "")
    return " ".join(f"{about} {details[:1].upper()}{details[1:]}".split())


def _file_name(name: str, taken: set[str]) -> str:
    """The name without characters that are special in paths and shells, made different from all names in `taken`."""
    stem = re.sub(r"[^\w.+=-]+", "-", name).strip("-.") or "figure"
    unique = next(s for s in (stem, *(f"{stem}-{number}" for number in range(2, len(taken) + 3))) if s not in taken)
    taken.add(unique)
    return unique


def _save(drawing: Figure, stem: Path) -> Iterator[bytes]:
    """Writes STEM.png, STEM.svg and STEM.pdf, and yields the png."""
    with style.style():  # the settings with which it was drawn: they determine how the files are written
        layout.arrange(drawing)
        for kind, metadata in FORMATS.items():
            with replacing(stem.with_name(f"{stem.name}.{kind}")) as temporary:
                drawing.savefig(temporary, format=kind, dpi=DPI, metadata=metadata)
    yield stem.with_name(f"{stem.name}.png").read_bytes()


def with_curves(
    run: Callable[[str], Path], chosen: pd.DataFrame, over: Sequence[str], failed: list[str]
) -> pd.DataFrame:
    """The rows, with the training curves of their runs as rows of the metric curve_accuracy: what figures are drawn
    from. A damaged curve is left out, and named in `failed`.

    run   the folder of the run of a name
    over  the settings that were selected on validation, which figures leave out of the names of series
    """
    runs = chosen.drop_duplicates("run").set_index("run")[["mixer", "task", "series", "seed"]]
    curves = pd.DataFrame(
        [
            {"run": name, **facts, "split": "validation", "metric": "curve_accuracy", "step": point["step"],
             "value": point["accuracy"]}
            for name, facts in runs.to_dict("index").items()
            for point in attempt(failed, f"training curve of {name}", read_json, run(str(name)) / "curve.json", [])
        ]
    )  # fmt: skip
    drawn = pd.concat([chosen, curves])
    drawn.attrs["selected"] = tuple(over)
    return drawn
