"""`recall-lab claim`: the page of the verdict, from made-up claims on made-up runs."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from sweep_folder import write
from test_page import check_structure

from recall_lab import folders
from recall_lab.claim.base import Claim, Line, at_least, exact, reported
from recall_lab.cli import claim


@dataclass(frozen=True, kw_only=True)
class High(Claim):
    """The accuracy is <high>.

    Its mean over all cells.
    """

    least: float = 0.01

    def judge(self, table: pd.DataFrame) -> list[Line]:
        value = table.loc[table["metric"] == "accuracy", "value"].mean()
        return [at_least("mean | of all", exact(value), self.least), reported("runs", exact(table["run"].nunique()))]


@dataclass(frozen=True, kw_only=True)
class Broken(Claim):
    """Nobody can judge this."""

    def judge(self, table: pd.DataFrame) -> list[Line]:
        raise KeyError("loss")


@pytest.fixture
def judge(tmp_path, monkeypatch, capsys):
    """Judges claims on two experiments whose runs are there; returns the exit status, the page and what was printed."""
    for experiment in ("one", "two"):
        write(tmp_path / "claim" / experiment)
        folders.add_command(tmp_path / "claim" / experiment, f"recall-lab run experiment={experiment}", "What it is.")
    monkeypatch.setattr(claim, "_run", lambda *_: [])

    def call(**claims: Claim) -> tuple[int, str, str]:
        monkeypatch.setattr(claim, "load", lambda *_: claims)
        code = claim.claim([*claims, f"root={tmp_path}", "size=large"])
        return code, (tmp_path / "claim/report.html").read_text("utf-8"), "".join(capsys.readouterr())

    return call


def test_the_page_of_a_verdict(judge, tmp_path):
    figures = ["retrieval"]
    code, text, printed = judge(
        high=High(experiments=["one", "two"], figures=figures),
        higher=High(experiments=["one"], figures=figures, least=0.5),
    )
    assert code == 0
    found = check_structure(text)
    assert [image["alt"].partition(":")[0] for image in found.images] == ["retrieval_mqar"] * 2
    assert text.count('<a href="#figure-one-retrieval_mqar">one-retrieval_mqar</a>, above') == 1
    assert {"claim-high", "claim-higher"} <= set(found.ids)
    for part in ("The accuracy is &lt;high&gt;.", "Its mean over all cells.", "✓ supported", "✗ refuted", "≥ 0.01",
                 "· reported", f"recall-lab claim higher root={tmp_path} size=large", "experiment=two",
                 "What it is."):  # fmt: skip
        assert part in text, part
    assert text.index("✓ supported") < text.index("The accuracy is")
    markdown = (tmp_path / "claim/report.md").read_text("utf-8")
    assert "| high | supported | mean \\| of all | ≥ 0.01 |" in markdown
    assert "![retrieval_mqar: " in markdown
    assert "(figure/two-retrieval_mqar.png)" in markdown
    assert (tmp_path / "claim/figure/two-retrieval_mqar.png").exists()
    assert set(pd.read_parquet(tmp_path / "claim/table.parquet")["experiment"]) == {"one", "two"}
    assert list(pd.read_csv(tmp_path / "claim/verdict.csv")["claim"]) == ["high", "high", "higher", "higher"]
    assert str(Path(tmp_path, "claim/report.html")) in printed


def test_experiments_that_are_drawn_together(judge):
    both = ["one", "two"]
    _, text, _ = judge(high=High(experiments=both, together=both, figures=["retrieval"]))
    assert [image["alt"].partition(":")[0] for image in check_structure(text).images] == ["retrieval_mqar"]


def test_a_claim_that_cannot_be_judged_is_named(judge):
    code, text, printed = judge(broken=Broken(experiments=["one"]), high=High(experiments=["one"]))
    assert code == 1
    assert "claim broken: KeyError: &#39;loss&#39;" in text
    assert "claim broken: KeyError: 'loss'" in printed
    assert text.count("could not be judged") == 2
    assert "✓ supported" in text
    check_structure(text)


def test_an_experiment_without_results(judge):
    code, text, _ = judge(high=High(experiments=["one", "absent"]))
    assert (code, "✓ supported" in text) == (0, True)
    with pytest.raises(ValueError, match="no experiment has results"):
        judge(high=High(experiments=["absent"]))


def test_a_damaged_run_is_named(judge, tmp_path):
    (rows,) = (tmp_path / "claim/two").glob("*/rows.json")
    rows.write_text("{")
    code, text, printed = judge(high=High(experiments=["one", "two"]))
    assert code == 1
    assert "✓ supported" in text
    assert "experiment two: ValueError" in printed
