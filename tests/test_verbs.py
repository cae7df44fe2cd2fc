"""The verbs list, show and probe, and the help."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import TINY, recall, run_folders, run_probe, shell
from conftest import CONF, names
from omegaconf import DictConfig

from recall_lab import __main__ as main
from recall_lab import results
from recall_lab.cli import show
from recall_lab.cli.base import compose, parse, quoted, resolved
from recall_lab.cli.probe import changed

pytestmark = pytest.mark.usefixtures("empty_folder")


def composing(*words: str) -> DictConfig:
    return compose(words)


def test_help_needs_no_torch_and_little_time():
    begun = time.perf_counter()
    done = shell("--help")
    assert time.perf_counter() - begun < 2
    assert done.returncode == 0
    assert "recall-lab run experiment=quickstart" in shell("run", "--help").stdout
    probe = "import sys, recall_lab.__main__ as m; sys.argv[1:] = ['--help']\n"
    probe += "try: m.main()\nexcept SystemExit: print('torch' in sys.modules, 'hydra' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", probe], text=True).endswith("False False\n")


def test_an_interrupted_verb_gives_one_line(monkeypatch, capsys):
    def interrupted(chosen):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "_verb", interrupted)
    monkeypatch.setattr(sys, "argv", ["recall-lab", "report", "outputs/main"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "recall-lab: interrupted\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["probe=[]"], "nothing to measure"),
        (["mixer=window,top_k"], "mixer=window,top_k: has several values; `recall-lab probe -m` measures each"),
        (["mixer=window", "mixer.budget=2,4"], "mixer.budget=2,4: has several values"),
        (["test.tokens=4"], "nothing to measure"),
        (["probe=retrieval", "test.tokens=4"], "test.tokens has no effect here without another mixer"),
        (["probe=retrieval", "test.sequences=4"], "test.sequences has no effect here without another mixer"),
        (["mixer=window", "test.probe_sequences=4"], "test.probe_sequences has no effect here without a probe"),
    ],
)
def test_a_later_probe_refuses_what_would_be_ignored(words, message, capsys):
    assert recall(*TINY) == 0
    (folder,) = run_folders("main")
    assert run_probe(str(folder), *words) == 2
    assert message in capsys.readouterr().err
    assert list(folder.glob("probe-*.json")) == []


def test_a_part_of_a_hybrid_keeps_what_was_trained():
    trained = resolved(compose(["mixer=hybrid", "mixer.second.heads=2"]), {"task": "mqar", "mixer": "hybrid"})
    words = ["mixer.second.qk_norm=true", "test.cells=[{length: 8}]"]
    config = changed(trained, words, composing)
    second = trained["mixer"]["second"] | {"qk_norm": True}
    assert config["mixer"] == trained["mixer"] | {"second": second}
    assert config["test"] == trained["test"] | {"cells": [{"length": 8}]}
    assert second["heads"] == 2


def test_cfg_job_prints_and_runs_nothing():
    done = shell("run", "mixer=linear", "--cfg", "job")
    assert done.returncode == 0
    assert "_target_: recall_lab.mixer.linear.Linear" in done.stdout
    assert not Path("outputs").exists()


def test_list_is_read_from_the_code():
    from recall_lab.cli import listing

    done = shell("list")
    for group in ("task", "mixer", "experiment", "claim"):
        for path in (CONF / group).rglob("*.yaml"):
            option = path.relative_to(CONF / group).with_suffix("")
            lines = re.findall(rf"^  {option} +(\S.*)$", done.stdout, re.M)
            assert lines, path
            assert all(len(line) > 20 for line in lines)
    assert re.search(r"good_enough +For many undemanding uses linear attention is enough\.$", done.stdout, re.M)
    assert "S_t = S_{t−1}" in shell("list", "mixers").stdout
    assert "at least half of the tasks are undemanding" in listing.listing("claims")
    assert shell("list", "nonsense").returncode == 2


@pytest.mark.parametrize("task", names("task"))
def test_show_prints_any_task(task, capsys):

    show.show([f"task={task}"])
    show.show([f"task={task}"], sequences=20)
    assert capsys.readouterr().out.count("scored positions per sequence") == 2


def test_show():
    done = shell("show", "task=mqar", "task.length=16", "task.pairs=2", "task.vocab=16", "--seed", "5")
    assert done.returncode == 0, done.stderr
    assert "3 10  5 15  3  .  5" in done.stdout
    assert "chance level: 0.125" in done.stdout
    many = shell("show", "task=mqar", "--n", "200")
    assert re.search(r"age\W+\d", many.stdout)
    wrong = shell("show", "task=mqar", "task.pairs=77")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1


def test_probes_at_the_end_of_a_run():
    assert recall(*TINY, "probe=[retrieval,state_retention]", "probe.state_retention.lags=[1]", "mixer=linear") == 0
    table = results.collect(Path("outputs/main"))
    found = table[table["split"] == "probe"]
    assert set(found["probe"]) == {"retrieval", "state_retention"}
    assert set(found["task.length"]) == set(table.loc[table["split"] == "test", "task.length"])
    assert found["value"].notna().all()


def test_probes_of_a_finished_run_and_of_its_checkpoints(no_figures, capsys):
    assert recall(*TINY, "mixer=linear", "train.keep=true", "name=kept") == 0
    (folder,) = run_folders("kept")
    assert [path.stem for path in sorted((folder / "weights").iterdir())] == ["000003", "000006"]
    before = (folder / "rows.json").read_text()
    assert run_probe(str(folder), "probe=state_retention", "probe.state_retention.lags=[]") == 0
    assert run_probe("outputs/kept", "probe=state_retention", "probe.state_retention.lags=[]") == 0
    assert (folder / "rows.json").read_text() == before
    assert len(list(folder.glob("probe-*.json"))) == 1
    table = results.collect(Path("outputs/kept"))
    norms = table[table["metric"] == "norm"]
    assert set(norms["step"].dropna()) == {3, 6}
    last = norms.groupby("step", dropna=False)["value"].sum()
    assert last[6] == last[last.index.isna()].iloc[0] != last[3]
    assert "report.html" in capsys.readouterr().out


def test_another_policy_keeps_the_positions_of_the_trained_model():
    """Except for what is given, and for what a variant sets; a mixer that has no such option gets none."""
    chosen = ["mixer=softmax", "mixer.positions=rotary", "mixer.rotary_share=1"]
    trained = resolved(compose(chosen), {"task": "mqar", "mixer": "softmax"})
    for words, expected in (
        (["mixer=window"], ("rotary", 1, 10000)),
        (["mixer=softmax/alibi", "mixer.rotary_share=0.5"], ("alibi", 0.5, 10000)),
        (["mixer=sink_window", "mixer.rotary_base=500"], ("rotary", 1, 500)),
        (["mixer=linear"], (None, None, None)),
    ):
        mixer = changed(trained, words, composing)["mixer"]
        assert tuple(mixer.get(key) for key in ("positions", "rotary_share", "rotary_base")) == expected


def test_another_policy_with_the_same_weights(no_figures, capsys):
    """A window as long as the sequence scores like softmax, a narrow one scores less; other weights are refused.

    The model has rotary positions, so it scores the same only where the window has them too.
    """
    trained = ["train.steps=60", "train.validate_every=20", "mixer.positions=rotary", "mixer.rotary_share=1"]
    assert recall(*TINY, *trained, "name=policy") == 0
    (folder,) = run_folders("policy")
    assert run_probe(str(folder), "mixer=window", "mixer.budget=64") == 0
    assert run_probe(str(folder), "mixer=window", "mixer.budget=2") == 0
    table = results.collect(Path("outputs/policy"))
    scores = table[(table["metric"] == "accuracy") & (table["split"] == "test")]
    by = {name: group["value"].tolist() for name, group in scores.groupby("mixer.budget", dropna=False)}
    softmax = next(values for name, values in by.items() if name != name)
    assert by[64] == softmax
    assert sum(by[2]) < sum(softmax)
    assert set(scores["trained_as"].dropna()) == {"softmax"}
    capsys.readouterr()
    assert run_probe(str(folder), "mixer=delta_rule") == 2
    printed = capsys.readouterr().err
    assert "delta_rule has other weights than the trained mixer" in printed
    assert printed.count("\n") == 1
    assert run_probe(str(folder), "train.steps=9") == 2
    assert "only probe, mixer and test can be changed" in capsys.readouterr().err


def test_the_oracle_is_a_run():
    small = ["oracle=random", "oracle.d_key=8", "oracle.reads=64", "mixer=linear"]
    small += ["probe=state_retention", "probe.state_retention.lags=[]"]
    assert recall(*small, "name=oracle", "report=true") == 0
    table = results.collect(Path("outputs/oracle"))
    assert set(table["task"]) == {"oracle"}
    assert {"top1", "error", "effective_rank"} <= set(table["metric"])
    assert set(table["oracle.pairs"]) == {64}
    assert Path("outputs/oracle/figure").is_dir()


def test_an_oracle_without_probes_is_refused(capsys):
    assert recall("oracle=random", "mixer=linear") == 2
    assert "an oracle without a probe measures nothing" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["my, conf [1]", "it's"])
def test_any_name_of_a_config_dir_works(folder, capsys):
    """Spaces, brackets, commas and quotes are special in the grammar of Hydra."""
    path = Path(folder, "task")
    path.mkdir(parents=True)
    (path / "short.yaml").write_text("defaults: [/task/mqar@_here_, _self_]\nlength: 16\npairs: 2\nvocab: 32\n")
    assert shell("show", "--config-dir", folder, "task=short").returncode == 0
    done = shell("run", "--config-dir", folder, *TINY, "task=short")
    assert done.returncode == 0, done.stderr
    probed = shell("probe", "outputs/main", "--config-dir", folder, "probe=retrieval")
    assert probed.returncode == 0, probed.stderr


@pytest.mark.slow
def test_a_task_in_a_folder_of_its_own_gets_a_report():
    path = Path("mine/task/hard")
    path.mkdir(parents=True)
    (path / "short.yaml").write_text("defaults: [/task/mqar@_here_, _self_]\nlength: 16\npairs: 2\n")
    tiny = [word for word in TINY if word != "report=false"]
    done = shell("run", "--config-dir", "mine", *tiny, "task=hard/short")
    assert done.returncode == 0, done.stderr
    assert list(Path("outputs/main/figure").glob("retrieval_hard*short.png"))


@pytest.mark.slow
def test_a_terminal_with_ascii_only():
    environment = os.environ | {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    done = shell("list", "mixers", env=environment)
    assert done.returncode == 0, done.stderr
    assert "softmax" in done.stdout
    assert recall(*TINY) == 0
    assert shell("report", "outputs/main", env=environment).returncode == 0


def test_probe_from_within_a_run_folder(no_figures, monkeypatch, capsys):
    assert recall(*TINY) == 0
    (folder,) = run_folders("main")
    monkeypatch.chdir(folder)
    assert run_probe(".", "probe=retrieval") == 0
    assert list(Path().glob("probe-*.json"))
    assert Path("../report.html").exists()


@pytest.mark.parametrize(
    "text", ["/a/b-c_d.x/e", "../out/x", "1/2", "a b", "it's", "null", "true", "", "/ä/ö", "a,b/c"]
)
def test_a_quoted_text_is_read_as_it_is(text):
    """In quotes only where it must be: a command is shown with the folder in it."""
    assert parse([f"root={quoted(text)}"])[0].value() == text
    assert ("'" in quoted(text)) == (text not in ("/a/b-c_d.x/e", "../out/x", "1/2"))
