"""A folder of the user's own, given with --config-dir: all verbs know its options, modules, figures and rates."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from command_line import SERIAL, TINY, recall, run_folders, shell

import recall_lab as rl
from recall_lab import __main__ as main
from recall_lab import figure, files, folders
from recall_lab.cli import base, listing, rates

pytestmark = pytest.mark.usefixtures("empty_folder")

MODULE = '''
"""What one user has made."""

from dataclasses import dataclass

from recall_lab.mixer.linear import Linear


@dataclass(eq=False, repr=False, kw_only=True)
class Doubled(Linear):
    """Linear attention with keys times a factor.

    More about it.
    """

    factor: float = 2.0

    def parallel(self, q, k, v, gates, state=None):
        return super().parallel(q, self.factor * k, v, gates, state)


def width(trace, rng, *, times: float = 1.0):
    """The width of a key."""
    return [{"metric": "own_width", "value": times * trace.k.shape[-1]}]
'''
FIGURE = '''
"""A figure of widths."""

from matplotlib.figure import Figure


def draw(table):
    """Yields ("own_widths", figure)."""
    rows = table[table["metric"] == "own_width"]
    if len(rows):
        figure = Figure()
        figure.subplots().plot(rows["value"].to_list())
        yield "own_widths", figure
'''
CONTENT = {
    "of_mine.py": MODULE,
    "mixer/doubled.yaml": "defaults: [/mixer/linear@_here_, _self_]\n_target_: of_mine.Doubled\nfactor: 2.0\n",
    "probe/width.yaml": "# @package probe.width\n_target_: of_mine.width\n_partial_: true\ntimes: 1.0\n",
    "figure/widths.py": FIGURE,
    "experiment/own.yaml": "# @package _global_\n# An experiment of mine.\nname: own\ntrain: {lr: studied}\n",
    "rates.yaml": "mqar: {doubled: 0.004}\n",
}


@pytest.fixture
def mine(tmp_path):
    for name, text in CONTENT.items():
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip())
    yield "mine"
    for module in [name for name in sys.modules if name.endswith((".widths", "of_mine", ".broken"))]:
        del sys.modules[module]


def verb(*arguments: str) -> int:
    """Calls `recall-lab …` in this process and returns its exit status."""
    with pytest.raises(SystemExit) as ended:
        main._main([*arguments])
    return ended.value.code


def test_the_folder_is_on_the_path_once_here_and_in_processes_started_from_here(mine):
    for name in (mine, f"./{mine}", str(Path(mine).absolute())):
        files.use(name)
    folder = str(Path(mine).absolute())
    assert [*map(os.path.abspath, sys.path)].count(folder) == 1
    assert os.environ["PYTHONPATH"].split(os.pathsep).count(folder) == 1
    code = "import sys; from recall_lab import files; print(files.OWN[0], sys.path.count(str(files.OWN[0])))"
    found = subprocess.check_output([sys.executable, "-c", code], text=True, cwd="/")
    assert found.split() == [folder, "1"]


def test_a_folder_on_the_path_already_is_not_added(mine, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"elsewhere{os.pathsep}{mine}")
    sys.path.append(str(Path(mine).absolute()))
    files.use(mine)
    assert os.environ["PYTHONPATH"] == f"elsewhere{os.pathsep}{mine}"
    assert sys.path.count(str(Path(mine).absolute())) == 1


def test_a_run_its_probe_and_its_figure(mine, capsys):
    words = [*TINY, "mixer=doubled", "mixer.factor=3", "probe=[width]", "report=true"]
    assert recall(f"--config-dir={mine}", *words) == 0
    assert Path("outputs/main/figure/own_widths.png").exists()
    assert "A figure of widths" in Path("outputs/main/report.html").read_text("utf-8")
    Path("outputs/main/figure/own_widths.png").unlink()
    assert verb("report", "outputs/main", "--config-dir", mine) == 0
    assert Path("outputs/main/figure/own_widths.png").exists()
    assert verb("probe", "outputs/main", "probe=width", "probe.width.times=2", "--config-dir", mine) == 0
    table = rl.load("outputs/main")
    assert set(table.loc[table["metric"] == "own_width", "value"]) == {16, 32}
    (run,) = run_folders("main")
    files.use_none()
    assert rl.open_run(run, config_dir=mine).model.blocks[0].mixer.factor == 3
    assert list(rl.plot("widths", table, config_dir=mine)) == ["own_widths"]
    assert (files.OWN, os.environ.get(files.CONFIG_DIR)) == ([], None)  # each was in use during its call only


def test_a_folder_in_use_is_so_again_after_a_call_with_another(mine, tmp_path):
    files.use(mine)
    before = [Path(mine).absolute()]
    with pytest.raises(ValueError, match="there is no figure 'nothing'"):
        rl.plot("nothing", pd.DataFrame(), config_dir=str(tmp_path))
    assert before == files.OWN
    with files.using(None):
        assert before == files.OWN
    assert os.environ[files.CONFIG_DIR] == str(before[0])


def test_a_figure_that_cannot_be_imported_is_named_and_the_others_are_drawn(mine, capsys):
    Path(mine, "figure/broken.py").write_text("import nowhere\n\n\ndef draw(table): ...\n")
    assert recall("--config-dir", mine, *TINY, "report=true") == 1
    assert "figure broken: ModuleNotFoundError: No module named 'nowhere'" in capsys.readouterr().out
    assert Path("outputs/main/figure/retrieval_mqar.png").exists()


def test_without_the_folder_the_message_says_where_was_looked(mine, capsys):
    assert recall("--config-dir", mine, *TINY, "mixer=doubled", "mixer._target_=nowhere.Doubled") == 2
    printed = capsys.readouterr().err
    assert f"No module named 'nowhere'; looked in {Path(mine).absolute()} and on the Python path" in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("words", [["list"], ["show", "task=mqar"], ["report", "outputs"], ["claim"], ["rates", "own"],
                                   ["probe", "outputs", "probe=cost"], ["run"]])  # fmt: skip
def test_every_verb_refuses_a_missing_folder(words, capsys):
    assert verb(*words, "--config-dir", "nowhere") == 2
    assert capsys.readouterr().err == "recall-lab: --config-dir nowhere: there is no such folder\n"


@pytest.mark.parametrize("name", ["task/mqar.yaml", "mixer/softmax/rotary.yaml", "figure/retrieval.py", "config.yaml"])
def test_a_name_that_is_taken_is_refused(name, capsys):
    """Hydra would find recall_lab's own."""
    path = Path("taken", name)
    path.parent.mkdir(parents=True)
    path.touch()
    assert recall("--config-dir", "taken", *TINY) == 2
    assert f"{name}: recall_lab has a {name} of its own; give yours another name" in capsys.readouterr().err


def test_list_and_suggestions_know_what_is_in_the_folder(mine, capsys):
    assert verb("list", "--config-dir", mine) == 0
    printed = capsys.readouterr().out
    assert "  doubled                  Linear attention with keys times a factor.\n" in printed
    assert "  width                    The width of a key.\n" in printed
    assert "  widths                   A figure of widths.\n" in printed
    assert "  own                      An experiment of mine.\n" in printed
    assert "More about it." in listing.listing("mixers", mine).partition("forgetting")[0]
    for words, message in (
        (["mixer=doubld"], "there is no mixer 'doubld'; there are based, "),
        (["mixer=doubld"], ", doubled, "),
        (["probe=[widht]"], "there is no probe 'widht'; there are "),
        (["mixer=doubled", "mixer.fakter=3"], "there is no setting mixer.fakter; did you mean mixer.factor?"),
    ):
        assert recall("--config-dir", mine, *TINY, *words) == 2
        assert message in capsys.readouterr().err


def test_list_names_what_it_cannot_read(mine):
    Path(mine, "mixer/lost.yaml").write_text("_target_: nowhere.Lost\n")
    Path(mine, "mixer/other.yaml").write_text("# Made elsewhere.\n_target_: of_mine.Linear\n")
    found = listing.listing(None, mine)
    assert "lost.yaml cannot be read: No module named 'nowhere'; looked in" in found
    assert "  other                    Made elsewhere.\n" in found


@pytest.mark.slow
def test_own_rates_are_read_and_written_in_the_folder(mine):
    before = base.RATES.read_text("utf-8")
    files.use(mine)
    assert base.studied_rate("mqar", "doubled") == 0.004
    assert base.studied_rate("mqar", "linear") == yaml.safe_load(before)["mqar"]["linear"]
    rates.write({"mqar": {"linear": 0.5}, "mine": {"linear": 0.25}})
    assert base.RATES.read_text("utf-8") == before
    assert base.read_rates()["mqar"] == yaml.safe_load(before)["mqar"] | {"doubled": 0.004, "linear": 0.5}
    assert yaml.safe_load(Path(mine, "rates.yaml").read_text("utf-8"))["mine"] == {"linear": 0.25}
    given: list[list[str]] = []

    def launch(words):
        given.append(words)
        return recall("--config-dir", mine, *TINY, SERIAL, "train.lr=0.1,0.2,0.3", "-m", "name=rates_own")

    assert rates.study(["own"], [], launch) == 0
    assert given[0][given[0].index("--config-dir") + 1] == str(Path(mine).absolute())


@pytest.mark.slow
def test_the_workers_of_a_sweep_know_the_folder(mine):
    """Its modules, options and rates: a run is named by a hash of its rate, which a worker must find as well."""
    small = [word for word in TINY if not word.startswith("train.steps")]
    words = ["mixer=doubled,linear", "experiment=own", "train.steps=4", "hydra.launcher.n_jobs=2", "probe=[width]"]
    done = shell("run", "-m", *small, *words, "--config-dir", "mine")
    assert done.returncode == 0, done.stderr
    configs = [folders.read_config(path) for path in run_folders("own")]
    rates = {config["choice"]["mixer"]: config["train"]["lr"] for config in configs}
    assert rates == {"doubled": 0.004, "linear": 0.01}


def test_settings_may_follow_the_folder():
    from recall_lab.__main__ import _own_first, parser

    given = ["claim", "longer", "--config-dir", "mine", "root=tiny", "train.steps=5"]
    chosen = parser().parse_args(_own_first(given))
    assert (chosen.words, chosen.config_dir) == (["longer", "root=tiny", "train.steps=5"], "mine")
    assert _own_first(["list"]) == ["list"]


def test_a_folder_that_is_no_longer_in_use_contributes_no_figures(mine):
    files.use(mine)
    assert "widths" in figure.names()
    files.use_none()
    assert "widths" not in figure.names()
