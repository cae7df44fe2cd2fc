"""The committed reference results: each is as a run of a clean, committed tree wrote it."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tables import touching

import recall_lab as rl
from recall_lab.claim.base import Estimate, effect
from recall_lab.figure import layout
from recall_lab.files import CONF

FOLDER = CONF.parent / "outputs" / "reference"
TABLES = sorted(FOLDER.glob("*/table.parquet"))


def revisions(path: Path) -> set[str]:
    settings = path.with_name("settings.parquet")  # older tables hold them
    return set(pd.read_parquet(settings if settings.exists() else path, columns=["git"])["git"])


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.parent.name)
def test_a_table_names_clean_revisions(path):
    """A + would mark files that differed from the revision."""
    assert all(re.fullmatch("[0-9a-f]{12}", revision) for revision in revisions(path))


def test_every_revision_is_in_the_history():
    git = ["git", "-C", str(FOLDER)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("the history is not here")
    for revision in set().union(*map(revisions, TABLES)):
        done = subprocess.run([*git, "merge-base", "--is-ancestor", revision, "HEAD"], capture_output=True)
        assert done.returncode == 0, revision


def test_every_table_has_a_figure_and_is_described():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    for path in TABLES:
        assert list(path.parent.rglob("*.png")), path
        assert path.parent.name in text or path.parent.name.startswith("rates_"), path


README = (CONF.parent / "README.md").read_text(encoding="utf-8")


def test_the_readme_states_the_verdict_as_judged():
    """Each line that it shows, and how many there are of each kind."""
    verdict = pd.read_csv(FOLDER / "claim/verdict.csv", keep_default_na=False)
    known = {(row.claim, row.line): row for row in verdict.itertuples()}
    shown = re.findall(r"^\| (\w+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| (supported|refuted|undecided) \|$", README, re.M)
    assert len(shown) > 10
    assert {claim for claim, *_ in shown} == set(verdict["claim"])
    for claim, line, rule, stated, decision in shown:
        row = known[claim, line]
        numbers = map(float, (row.effect, row.low, row.high))
        estimate = Estimate(*numbers, 0 if row.seeds == "exact" else int(float(row.seeds)))
        assert (rule, stated, decision) == (row.rule, effect(estimate), row.verdict), (claim, line)
    counts = verdict["verdict"].value_counts()
    judged = len(verdict) - counts["reported"]
    (totals,) = re.findall(r"Of (\d+) lines, (\d+) are supported, (\d+) refuted and (\d+) undecided", README)
    assert tuple(map(int, totals)) == (judged, counts["supported"], counts["refuted"], counts["undecided"])


def marks(svg: str) -> tuple[str, list[str], np.ndarray]:
    """The version of matplotlib that made a figure, its texts, and the positions of its markers in points."""
    (version,) = re.findall(r"Matplotlib v([0-9.]+)", svg)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    positions = re.findall(r'<use xlink:href="#[^"]+" x="([-0-9.]+)" y="([-0-9.]+)"', svg)
    return version, texts, np.array(positions, dtype=float)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in TABLES if path.parent.name != "claim"], ids=lambda p: p.parent.name)
def test_the_figures_are_drawn_from_the_table(path, tmp_path, monkeypatch):
    """Except for training curves, which are not in it. No tick labels touch."""
    arranged = []
    monkeypatch.setattr(layout, "arrange", lambda made, arrange=layout.arrange: (arrange(made), arranged.append(made)))
    drawn = {made.stem for made in rl.save_figures(rl.load(path.parent), tmp_path)}
    assert len(arranged) == len(drawn)
    assert [found for made in arranged for found in touching(made)] == []
    shown = {file.stem: file for file in path.parent.rglob("*.svg") if not file.stem.startswith("training_")}
    assert set(shown) <= drawn
    assert shown
    for name, file in shown.items():
        made, texts, positions = marks(file.read_text("utf-8"))
        now, again, redrawn = marks((tmp_path / f"{name}.svg").read_text("utf-8"))
        assert texts == again
        if made == now:
            assert positions == pytest.approx(redrawn, abs=0.1)
