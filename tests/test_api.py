"""The Python API of recall_lab."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import TINY
from conftest import CONF
from tables import named, scores

import recall_lab as rl

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_run_open_and_plot():
    table = rl.train_and_test(*TINY, "mixer=delta_rule", "name=python")
    assert set(table["mixer"]) == {"delta_rule"}
    assert {"accuracy", "chance"} <= set(table["metric"])
    run = rl.open_run(Path("outputs/python") / table["run"].iloc[0])
    batch = run.task.sample(4, np.random.default_rng(0))
    (trace,) = run.trace(batch)
    attention = trace.mixer.effective_attention(trace.q, trace.k, trace.gates)
    assert (attention @ trace.v - trace.o).abs().max() < 1e-5
    assert run.logits(batch).shape == (4, 16, 32)
    assert run.config["task"]["pairs"] == 2
    assert len(run.table) == len(table) == len(rl.load("outputs/python"))
    assert list(rl.plot("retrieval", rl.load("outputs/python"))) == ["retrieval_mqar"]


def test_errors_name_their_cause():
    with pytest.raises(ValueError, match="has no effect"):
        rl.train_and_test("oracle=random", "train.steps=3", "probe=[cost]")
    with pytest.raises(ValueError, match=r"^pairs=9"):
        rl.train_and_test(*[word for word in TINY if "pairs" not in word], "task.pairs=9")
    with pytest.raises(ValueError, match=r"there is no figure 'nothing'; there are .*retrieval"):
        rl.plot("nothing", pd.DataFrame())
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = rl.nothing


def test_import_does_not_load_large_packages():
    code = "import recall_lab, sys; print(sorted({'torch', 'hydra', 'pandas', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


TEXT = (CONF.parent / "README.md").read_text(encoding="utf-8")
SECTION = re.search(r"^## From Python\n(.*?)^## ", TEXT, re.S | re.M)[1]
RUN, PLAIN = re.findall(r"^```python\n(.*?)^```", SECTION, re.S | re.M)
NOTEBOOK = (CONF.parent / "tests" / "notebook.py").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("code", [RUN, PLAIN, NOTEBOOK], ids=["run", "plain", "notebook"])
def test_what_is_shown_runs(code):
    code += "\nimport sys; print('hydra' in sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    needs_hydra = code.startswith(RUN)
    assert done.stdout.splitlines()[-1] == str(needs_hydra)
    assert Path("retrieval.png").exists() == needs_hydra


@pytest.mark.parametrize("code", [PLAIN, NOTEBOOK], ids=["plain", "notebook"])
def test_what_is_shown_without_hydra_works(code, capsys):
    """With two steps."""
    short = re.sub(r"(steps=|STEPS = )200", r"\g<1>2", code)
    assert short != code
    found: dict = {}
    exec(short, found)
    assert found["curve"][-1]["step"] == 2
    assert "chance" in capsys.readouterr().out
    assert 0 <= found["scores"]["accuracy"] <= 1


def test_the_figures_of_a_table_as_files(tmp_path):
    table = named(scores("mqar", [{"length": n} for n in (16, 32)], lambda mixer, cell: 0.5))
    assert rl.save_figures(table, tmp_path / "figures") == [tmp_path / "figures/retrieval_mqar.png"]
    kinds = {path.suffix for path in (tmp_path / "figures").iterdir()}
    assert kinds == {".png", ".svg", ".pdf"}
