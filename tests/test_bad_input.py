"""Impossible settings and settings without effect: refused in one line that says what is allowed."""

from pathlib import Path

import pytest
from command_line import TINY, recall, shell

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.stepz=5"], "there is no setting train.stepz; did you mean train.steps?"),
        (["mixer.headz=2"], "there is no setting mixer.headz; did you mean mixer.heads?"),
        (["mixer.budget=2"], "mixer.budget has no effect with the chosen mixer: it needs a mixer that has it"),
        (["optimizer.momentum=0"], "optimizer.momentum has no effect with the chosen optimizer: it needs an optimizer"),
        (["probe.cost.at=[1]"], "probe.cost has no effect with the chosen probe: it needs probe=[cost]"),
        (["+nonsense=1"], "there is no setting nonsense"),
        (["+train.nonsense=1"], "unexpected keyword argument 'nonsense'"),
        (["+task.nonsense=1"], "unexpected keyword argument 'nonsense'"),
        (["+mixer.nonsense=1"], "unexpected keyword argument 'nonsense'"),
        (["mixer=softmx"], "there is no mixer 'softmx'; there are "),
        (["task=nothing"], "there is no task 'nothing'; there are "),
        (["experiment=nothing"], "there is no experiment 'nothing'; there are "),
        (["task.pairs=9"], "a length of at least 36 (2 positions each), not 16"),
        (["task.pairs=99", "task.length=400"], "give only 15 keys"),
        (["mixer.heads=3"], "d_model=16 is not divisible by heads=3"),
        (["device=tpu"], "device='tpu': must be one of auto, cpu, cuda, mps"),
        (["deterministic=1"], "deterministic=1: must be true or false"),
        (["threads=0"], "threads=0: must be a whole number of at least 1"),
        (["test.tokens=0"], "test.tokens=0: must be a whole number"),
        (["train.cells=[{pears: 2}]"], "MQAR has no parameter 'pears'"),
        (["root=/proc/nowhere"], "cannot write to /proc/nowhere"),
        (["seed=-1"], "seed=-1: must be a whole number"),
        (["seed=18446744073709551616"], "seed=18446744073709551616: must be below 2**64"),
        (["train.cells=[]"], "must hold at least one cell, or be null"),
        (["test.cells=[{length: 16}, {length: 16}]"], "and occur once"),
        (["train.steps=true"], "train.steps=True: must be a whole number"),
        (["train.solved=-1"], "train.solved=-1: must be a number of at least 0"),
        (["name=null"], "name=None: must be the name of a folder"),
        (["name=''"], "name=: must be the name of a folder"),
        (["name=../other"], "name=../other: must be a folder in root=outputs; give another root="),
        (["name=größe"], """name=größe: cannot be read; a value with"""),
        (["report=maybe"], "report='maybe': must be true or false"),
        (["select=null"], "select=None: must be a list of settings"),
        (["~mixer.heads"], "~mixer.heads: a setting cannot be removed; give it a value"),
        (
            ["task._target_=nowhere.Task"],
            "task._target_=nowhere.Task cannot be imported: No module named 'nowhere'; looked in the Python path only: "
            "--config-dir FOLDER adds a folder of your own",
        ),
        (["mixer=hybrid"], "model.layers=1: must be at least the number of mixers, 2"),
    ],
)
def test_bad_input_gives_one_line(arguments, message, capsys):
    assert recall(*TINY, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1, printed.err
    assert printed.err.startswith("recall-lab: ")
    assert message in printed.err
    assert printed.out == ""
    assert not Path("outputs").exists()


def test_impossible_jobs_of_one_reason_give_one_line_and_leave_nothing(capsys):
    tiny = [word for word in TINY if not word.startswith("train.steps")]
    for dry in (["--dry-run"], []):
        assert recall(*dry, "-m", *tiny, "seed=range(0,3)", "train.steps=0") == 2
        printed = capsys.readouterr().err
        assert printed == "recall-lab: all 3 jobs: train.steps=0: must be a whole number of at least 1\n"
    assert recall("-m", *tiny, "train.steps=0,-1", "skip_invalid=true") == 2
    assert not Path("outputs").exists()
    capsys.readouterr()
    assert recall("-m", *tiny, "seed=0,1", "train.steps=0,1,-1", "skip_invalid=true", "hydra/launcher=basic") == 0
    assert [line.partition(": must")[0] for line in capsys.readouterr().err.splitlines()] == [
        "recall-lab: seed=0 train.steps=0 and 1 other job: train.steps=0",
        "recall-lab: seed=0 train.steps=-1 and 1 other job: train.steps=-1",
    ]


@pytest.mark.parametrize(
    ("content", "word", "message"),
    [
        ("modle: 3", "experiment=own", "there is no setting modle; did you mean model?"),
        ("defaults: [override /oracle: random, override /probe: [state_retention]]\ntrain: {steps: 3}",
         "experiment=own", "experiment=own: train.steps has no effect in this kind of run"),
        ("train: {cells: [{length: 16}]}\ntest: {cells: [{length: 16}]}\ntask: {length: 8}",
         "experiment=own", "experiment=own: task.length has no effect: every cell"),
        ("seed: 1", "task=ownn", "there is no task 'ownn'; there are copying, induction, joint_recall, mqar, needle, "
         "noisy_recall, own_task, paired_recall"),
        ("seed: 1", "task.own_setting=1", "task.own_setting has no effect with the chosen task"),
    ],
)  # fmt: skip
def test_settings_of_a_users_own_folder_are_checked_and_known(tmp_path, content, word, message, capsys):
    for group in ("experiment", "task"):
        (tmp_path / "mine" / group).mkdir(parents=True)
    (tmp_path / "mine/experiment/own.yaml").write_text(f"# @package _global_\n{content}\n")
    (tmp_path / "mine/task/own_task.yaml").write_text("_target_: own.Task\nown_setting: 1\n")
    assert recall("--config-dir", str(tmp_path / "mine"), word, "report=false") == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_a_word_instead_of_a_number_is_refused():
    """In a separate process, because in this one the type checks of the tests would act first."""
    done = shell("run", *TINY, "train.steps=some")
    assert done.returncode == 2
    assert "train.steps='some': must be a whole number of at least 1" in done.stderr
    assert done.stderr.count("\n") == 1
