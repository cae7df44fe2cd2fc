"""What all pages share: captions, tables, and a structure that needs nothing from outside."""

import importlib
import inspect
import pkgutil
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from sweep_folder import write
from tables import named, scores

from recall_lab import figure, page, report
from recall_lab.figure import frontier, retrieval, tasks

FIGURES = [m.name for m in pkgutil.iter_modules(figure.__path__)
           if "def draw(" in Path(figure.__path__[0], f"{m.name}.py").read_text("utf-8")]  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_a_caption(name):
    module = importlib.import_module(f"recall_lab.figure.{name}")
    caption = page.caption(module)
    assert caption.startswith(" ".join(inspect.cleandoc(module.__doc__).split()))
    assert len(caption) > len(module.__doc__)
    assert not re.search(r"Yields|figure\)|`|style\.[A-Z]|\n", caption)


def test_a_caption():
    module = ModuleType("figure", "Cost.\n\nNot shown.")

    def draw(table):
        """Yields ("cost_TASK", figure) per task: cost over n; and ("cost_by", figure) by d. For `style.FEW` answers

        or more (see `laws`)."""

    module.draw = draw
    assert page.caption(module) == "Cost. Cost over n; and by d. For 50 answers or more."


def test_markdown_of_a_table():
    columns = pd.MultiIndex.from_tuples([(16, 4), (32, 8)], names=["length", "pairs"])
    index = pd.MultiIndex.from_tuples([("a|b", 2)], names=["series", "seeds"])
    grid = pd.DataFrame([["0.5", ""]], index, columns)
    assert page.as_markdown(grid).splitlines() == [
        "| series | seeds | length=16 pairs=4 | length=32 pairs=8 |",
        "| --- | --- | --- | --- |",
        "| a\\|b | 2 | 0.5 |  |",
    ]
    assert page.as_markdown(grid.T).splitlines()[0] == "| length | pairs | series=a\\|b seeds=2 |"
    assert page.as_markdown(pd.DataFrame({"x": [1]})) == "| x |\n| --- |\n| 1 |"


def test_html_of_a_table():
    html = page.as_html(pd.DataFrame({"x": ["0.5 [0.25, 0.75]", "[<b>, 1]"]}))
    assert "<td>0.5 <small>[0.25, 0.75]</small></td>" in html
    assert "<td>[&lt;b&gt;, 1]</td>" in html
    assert "<th>0</th>" not in html


class Structure(HTMLParser):
    """What a page refers to, and what its parts are in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: Counter[str] = Counter()
        self.bare: list[str] = []
        self.images: list[dict[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.addresses += [given[name] for name in ("src", "href", "srcset", "action") if name in given]
        self.ids[given.get("id")] += 1
        if tag in ("table", "img") and "scroll" not in " ".join(self.open):
            self.bare.append(tag)
        if tag == "img":
            self.images.append(given)
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(given.get("class", ""))

    def handle_endtag(self, tag):
        self.open.pop()


def check_structure(text: str) -> Structure:
    """No address outside the page, no dangling link, no image without size and description, no unframed table."""
    found = Structure(text)
    assert found.open == []
    assert all(address.startswith(("data:image/png;base64,", "#", "figure/")) for address in found.addresses)
    assert not re.search(r"url\(|@import|https?://", text)
    links = {address[1:] for address in found.addresses if address.startswith("#")}
    assert links
    assert links <= set(found.ids)
    assert max(count for name, count in found.ids.items() if name) == 1
    assert found.bare == []
    for image in found.images:
        assert int(image["width"]) > 100 < int(image["height"])
        assert image["alt"].endswith(".")
    return found


def test_structure_of_a_sweeps_page(tmp_path):
    for mixer, state in (("linear", "finished"), ("softmax", "finished"), ("delta_rule", "failed")):
        write(tmp_path / "sweep", mixer, state=state)
    report.make(tmp_path / "sweep")
    found = check_structure((tmp_path / "sweep/report.html").read_text("utf-8"))
    assert len(found.images) == 2
    assert {"missing", "accuracy", "figures", "settings", "environment"} <= set(found.ids)
    text = (tmp_path / "sweep/report.md").read_text("utf-8")
    images = re.findall(r"!\[.+\]\((.*)\)", text)
    assert len(images) == 2
    printed = [address for address in found.addresses if address.startswith("figure/")]
    assert printed == re.findall(r" \[PDF\]\((.*)\)", text) == [image.replace(".png", ".pdf") for image in images]
    assert all((tmp_path / "sweep" / file).exists() for file in (*images, *printed))


def test_a_figure_of_several_tasks_is_drawn_once(tmp_path):
    cells = [{"length": length} for length in (16, 32)]
    table = named(*(scores(task, cells, lambda mixer, cell: 0.5) for task in ("mqar", "updates")))
    failed = []
    found = [picture.name for picture in page.pictures(tmp_path, table, table, failed, ["retrieval", "tasks"])]
    assert (found, failed) == (["retrieval_mqar", "retrieval_updates", "tasks"], [])


def test_only_what_is_wanted_is_drawn(tmp_path, monkeypatch):
    """By the beginning of a name or by one that goes on with the task."""
    table = named(scores("mqar", [{"length": length} for length in (16, 32)], lambda mixer, cell: 0.5))
    drawing = []
    for module in (retrieval, tasks, frontier):
        monkeypatch.setattr(module, "draw", lambda table, name=module.__name__: (drawing.append(name), iter(()))[1])
    for wanted in (["retrieval_mqar"], ["ret", "task"]):
        assert list(page.pictures(tmp_path, table, table, [], wanted)) == []
    assert drawing == [retrieval.__name__, retrieval.__name__, tasks.__name__]
