"""The committed reference results: each is as a run of a clean, committed tree wrote it."""

import re
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from recall_lab.files import CONF

FOLDER = CONF.parent / "outputs" / "reference"
TABLES = sorted(FOLDER.glob("*/table.parquet"))


def revisions(path: Path) -> set[str]:
    return set(pd.read_parquet(path, columns=["git"])["git"])


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
        assert list(path.parent.glob("*.png")), path
        assert path.parent.name in text or path.parent.name.startswith("rates_"), path
