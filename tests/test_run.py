"""The command line from end to end: runs, sweeps, failures, interruptions, and what is said about bad input."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import CONF, names

from recall_lab import files, report, results, run

TINY = ["model.d_model=16", "model.layers=1", "train.steps=6", "train.validate_every=3", "train.tokens=256",
        "train.validation_sequences=8", "test.tokens=256", "test.sequences=4", "task.length=16", "task.pairs=2",
        "task.vocab=32", "report=false"]  # fmt: skip
SERIAL = "hydra/launcher=basic"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def recall(*arguments: str) -> int:
    """`recall-lab run …` in this process: its exit status."""
    run.Claim.folder = None
    os.environ.pop("HYDRA_FULL_ERROR", None)
    return run.main([*arguments])


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "recall_lab", *arguments]


def shell(*arguments: str, **more) -> subprocess.CompletedProcess:
    """`recall-lab …` in a process of its own."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, **more)


def folders(name: str) -> list[Path]:
    return sorted(path.parent for path in Path("outputs", name).glob("*/status.json"))


def states(name: str) -> list[str]:
    return [results.status(folder)["state"] for folder in folders(name)]


def test_a_run_leaves_a_whole_folder(capsys):
    assert recall(*TINY, "name=one", "report=true") == 0
    (folder,) = folders("one")
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "config.yaml", "status.json", "curve.json", "rows.json", "run.log", "checkpoint.pt",
    }  # fmt: skip
    status = results.status(folder)
    assert status["state"] == "finished"
    assert status["threads"] == 1
    assert status["device"] in ("cpu", "cuda", "mps")
    assert status["torch"] == torch.__version__
    assert "step 6" in (folder / "run.log").read_text()
    table = pd.read_parquet("outputs/one/table.parquet")
    assert {"accuracy", "sequence_accuracy", "loss_bits", "tokens", "chance", "state_elements"} <= set(table["metric"])
    assert {"run", "mixer", "task", "seed", "task.length", "task.pairs", "git", "threads", "seconds"} <= set(table)
    assert set(table["split"]) == {"validation", "test"}
    assert {path.name for path in Path("outputs/one").iterdir()} >= {"table.parquet", "figure", "report.html"}
    said = capsys.readouterr().out
    assert "accuracy per scored token" in said
    assert "outputs/one/report.html" in said


def test_a_report_made_again_is_the_same_report():
    assert recall(*TINY, "report=true") == 0
    made = [Path("outputs/main/report.html"), *sorted(Path("outputs/main/figure").iterdir())]
    before = [path.read_bytes() for path in made]
    report.make(Path("outputs/main"))
    assert [path.read_bytes() for path in made] == before
    assert {path.suffix for path in made} == {".html", ".png", ".svg"}


def test_a_finished_run_is_found_again(capsys):
    assert recall(*TINY) == 0
    (folder,) = folders("main")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert recall(*TINY) == 0
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert "found" in capsys.readouterr().out


def test_a_report_is_asked_of_the_command_whoever_made_the_runs():
    assert recall(*TINY) == 0
    assert not Path("outputs/main/report.html").exists()
    assert recall(*TINY, "report=true") == 0
    assert Path("outputs/main/report.html").exists()


def test_where_results_lie_is_no_part_of_what_they_are():
    assert recall(*TINY, "name=a") == recall(*TINY, "name=b", "root=elsewhere", "report=true") == 0
    (one,), (other,) = folders("a"), list(Path("elsewhere/b").glob("*/status.json"))
    assert one.name == other.parent.name
    assert (one / "rows.json").read_text() == (other.parent / "rows.json").read_text()
    assert Path("elsewhere/b/report.html").exists()
    assert not Path("outputs/a/report.html").exists()


def test_one_and_one_point_nought_are_one_setting():
    assert recall("-m", *TINY, SERIAL, "train.clip=1,1.0") == 0
    assert len(folders("main")) == 1


def test_an_option_may_stand_between_overrides():
    assert recall(*TINY, SERIAL, "-m", "seed=0,1") == 0
    assert len(folders("main")) == 2


@pytest.mark.parametrize("name", ["rows.json", "config.yaml"])
def test_a_finished_run_that_lost_a_file_is_done_again(name):
    assert recall(*TINY) == 0
    (folder,) = folders("main")
    rows = (folder / "rows.json").read_text()
    (folder / name).unlink()
    done = shell("report", "outputs/main")
    assert done.returncode == 2
    assert "no finished run yet: 1 lost" in done.stderr
    assert recall(*TINY) == 0
    assert (folder / "rows.json").read_text() == rows


@pytest.mark.parametrize("name", ["rows.json", "status.json", "checkpoint.pt"])
def test_a_damaged_file_is_named(name):
    assert recall(*TINY) == 0
    (folder,) = folders("main")
    path = folder / name
    path.write_bytes(path.read_bytes()[:20])
    done = shell("report" if name != "checkpoint.pt" else "probe", str(folder.parent), *(
        ["probe=retrieval"] if name == "checkpoint.pt" else []
    ))  # fmt: skip
    assert done.returncode == 2
    assert f"{path} is damaged" in done.stderr
    assert done.stderr.count("\n") == 1


def test_other_settings_are_other_folders():
    for setting in ("seed=1", "train.lr=0.02", "mixer.heads=2", "data_seed=3"):
        assert recall(*TINY, setting) == 0
    assert len(folders("main")) == 4


def test_one_bad_job_of_three(capsys):
    """The others finish; its folder says failed and why; the summary lists it; the report names what is missing."""
    assert recall("-m", *TINY, SERIAL, "task.pairs=2,9,3", "name=three", "report=true") == 1
    assert sorted(states("three")) == ["failed", "finished", "finished"]
    bad = next(f for f in folders("three") if results.status(f)["state"] == "failed")
    assert "Traceback" in (bad / "run.log").read_text()
    told = capsys.readouterr()
    line = [line for line in told.err.splitlines() if str(bad) in line]
    assert len(line) == 1
    assert "a length of at least 36 (2 places each), not 16" in line[0]
    assert f"not in the table: {bad.name}" in told.out
    assert bad.name in Path("outputs/three/report.html").read_text()


def test_a_failed_run_is_done_again(monkeypatch):
    from recall_lab import train

    whole = train.evaluate
    calls = []

    def broken(*arguments, **more):
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("out of luck")
        return whole(*arguments, **more)

    monkeypatch.setattr(train, "evaluate", broken)
    assert recall(*TINY) == 1
    assert states("main") == ["failed"]
    monkeypatch.setattr(train, "evaluate", whole)
    assert recall(*TINY) == 0
    assert states("main") == ["finished"]


def test_a_loss_that_is_not_finite_fails_the_run(capsys, monkeypatch):
    from recall_lab import train

    monkeypatch.setattr(train, "loss", lambda logits, targets: logits.sum() * torch.nan)
    assert recall(*TINY) == 1
    (folder,) = folders("main")
    assert re.search(r"training step 0 is nan", results.status(folder)["error"])
    assert "training step 0 is nan" in capsys.readouterr().err
    assert not (folder / "rows.json").exists()


def test_a_job_of_a_parallel_sweep_equals_the_same_run_alone():
    done = shell("run", "-m", *TINY, "mixer=softmax,delta_rule", "seed=0,1", "name=sweep")
    assert done.returncode == 0, done.stderr
    assert states("sweep") == ["finished"] * 4
    assert recall(*TINY, "mixer=delta_rule", "seed=1", "name=alone") == 0
    (alone,) = folders("alone")
    twin = Path("outputs/sweep") / alone.name
    assert (twin / "rows.json").read_text() == (alone / "rows.json").read_text()
    ours, theirs = (torch.load(f / "checkpoint.pt", weights_only=True)["model"] for f in (alone, twin))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {results.status(folder)["threads"] for folder in folders("sweep")} == {1}


LONG = ["train.steps=100000", "train.validate_every=20", "train.solved=null", "name=long"]


@contextmanager
def background(*arguments: str) -> Iterator[subprocess.Popen]:
    """`recall-lab …` in a process group of its own, which is gone afterwards whatever happens."""
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Where the tests themselves run in the background, Ctrl-C is ignored, and that would be inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def started(process: subprocess.Popen, name: str, runs: int = 1) -> None:
    """Waits until so many runs have a checkpoint."""
    for _ in range(1800):
        if len(list(Path("outputs", name).glob("*/checkpoint.pt"))) >= runs:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError("no checkpoint in three minutes")


def test_kill_and_rerun(monkeypatch):
    """kill −9 in the middle of a sweep: what was finished stays, the rest goes on from its checkpoint."""
    assert recall(*TINY, "name=long") == 0
    whole = {path: path.read_bytes() for path in Path("outputs/long").glob("*/*.json")}
    with background("run", *TINY, *LONG) as process:
        started(process, "long", runs=2)
        os.killpg(process.pid, signal.SIGKILL)
    assert {path: path.read_bytes() for path in whole} == whole
    assert sorted(states("long")) == ["finished", "running"]
    (cut,) = (folder for folder in folders("long") if results.status(folder)["state"] == "running")
    for path in cut.glob("*.json"):
        json.loads(path.read_text())
    reached = torch.load(cut / "checkpoint.pt", weights_only=True)["curve"][-1]["step"]

    from recall_lab import train

    seen = []
    rate = train.Training.rate

    def watched(self, step):
        seen.append(step)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return rate(self, step)

    monkeypatch.setattr(train.Training, "rate", watched)
    assert recall(*TINY, *LONG) == 130
    assert seen == [reached, reached + 1, reached + 2]
    assert sorted(states("long")) == ["finished", "interrupted"]
    assert len(folders("long")) == 2


def test_ctrl_c_says_how_to_go_on():
    with background("run", *TINY, *LONG) as process:
        started(process, "long")
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=120)
        told = process.stderr.read()
    assert process.returncode == 130
    assert told.splitlines() == ["recall-lab: interrupted; the same command goes on from here"]
    assert states("long") == ["interrupted"]


def test_two_processes_never_work_on_one_run(capsys):
    from filelock import FileLock

    assert recall(*TINY) == 0
    (folder,) = folders("main")
    before = (folder / "status.json").read_text()
    with FileLock(folder / ".lock"):
        assert recall(*TINY) == 0
    assert "another process is at it" in capsys.readouterr().out
    assert (folder / "status.json").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.stepz=5"], "there is no setting train.stepz; did you mean train.steps?"),
        (["mixer.headz=2"], "there is no setting mixer.headz; did you mean mixer.heads?"),
        (["+nonsense=1"], "there is no setting nonsense"),
        (["+train.nonsense=1"], "unexpected keyword argument 'nonsense'"),
        (["+task.nonsense=1"], "unexpected keyword argument 'nonsense'"),
        (["+mixer.nonsense=1"], "unexpected keyword argument 'nonsense'"),
        (["mixer=softmx"], "there is no mixer 'softmx'; there are "),
        (["task=nothing"], "there is no task 'nothing'; there are "),
        (["experiment=nothing"], "there is no experiment 'nothing'; there are "),
        (["task.pairs=9"], "a length of at least 36 (2 places each), not 16"),
        (["task.pairs=99", "task.length=400"], "has only 15 keys"),
        (["mixer.heads=3"], "d_model=16 is not divisible by heads=3"),
        (["device=tpu"], "device=tpu: one of auto, cpu, cuda, mps"),
        (["threads=0"], "threads=0: a whole number of at least 1"),
        (["test.tokens=0"], "test.tokens=0: a whole number"),
        (["train.cells=[{pears: 2}]"], "MQAR has no parameter 'pears'"),
        (["root=/proc/nowhere"], "cannot write to /proc/nowhere"),
        (["seed=1.5"], "seed=1.5: a whole number"),
        (["train.cells=[]"], "at least one cell, or null"),
        (["test.cells=[{length: 16}, {length: 16}]"], "each cell once"),
        (["train.steps=true"], "train.steps=True: a whole number"),
        (["train.solved=-1"], "train.solved=-1: a number of at least 0"),
        (["mixer=hybrid"], "model.layers=1: at least one layer for each of the 2 mixers"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments, message, capsys):
    assert recall(*TINY, *arguments) in (1, 2)
    told = capsys.readouterr()
    assert told.err.count("\n") == 1, told.err
    assert told.err.startswith("recall-lab: ")
    assert message in told.err
    assert told.out == ""


def test_a_word_for_a_number():
    """In a process of its own, since the tests check the types of every call before recall_lab can."""
    done = shell("run", *TINY, "train.steps=some")
    assert done.returncode == 1
    assert "train.steps=some: a whole number of at least 1" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_foreign_folder_is_left_alone(capsys):
    Path("outputs/mine").mkdir(parents=True)
    Path("outputs/mine/thesis.txt").write_text("years of work")
    assert recall(*TINY, "name=mine") == 2
    assert recall("-m", *TINY, SERIAL, "seed=0,1", "name=mine") == 2
    assert "outputs/mine holds other files" in capsys.readouterr().err
    assert [path.name for path in Path("outputs/mine").iterdir()] == ["thesis.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(capsys):
    Path("outputs").mkdir(mode=0o500)
    assert recall(*TINY) == 2
    assert "cannot write to outputs/main" in capsys.readouterr().err


def test_report_on_what_has_no_results():
    Path("empty").mkdir()
    for folder, message in (("empty", "not a folder that recall-lab run has written"), ("none", "not a folder")):
        done = shell("report", folder)
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
    assert recall(*TINY, "name=half", "task.pairs=9") == 1
    done = shell("report", "outputs/half")
    assert done.returncode == 2
    assert "no finished run yet: 1 failed" in done.stderr
    assert not Path("outputs/half/report.html").exists()


def test_help_needs_no_torch_and_little_time():
    begun = time.perf_counter()
    done = shell("--help")
    assert time.perf_counter() - begun < 2
    assert done.returncode == 0
    assert "recall-lab run experiment=quickstart" in shell("run", "--help").stdout
    probe = "import sys, recall_lab.__main__ as m; sys.argv[1:] = ['--help']\n"
    probe += "try: m.main()\nexcept SystemExit: print('torch' in sys.modules, 'hydra' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", probe], text=True).endswith("False False\n")


def test_cfg_job_prints_and_runs_nothing():
    done = shell("run", "mixer=linear", "--cfg", "job")
    assert done.returncode == 0
    assert "_target_: recall_lab.mixer.linear.Linear" in done.stdout
    assert not Path("outputs").exists()


def test_list_is_read_from_the_code():
    done = shell("list")
    for group in ("task", "mixer", "experiment"):
        for path in (CONF / group).rglob("*.yaml"):
            option = path.relative_to(CONF / group).with_suffix("")
            lines = re.findall(rf"^  {option} +(\S.*)$", done.stdout, re.M)
            assert lines, path
            assert all(len(line) > 20 for line in lines)
    assert "S_t = S_{t−1}" in shell("list", "mixers").stdout
    assert shell("list", "nonsense").returncode == 2


@pytest.mark.parametrize("task", names("task"))
def test_show_prints_any_task(task, capsys):
    from recall_lab import catalogue

    catalogue.show([f"task={task}"])
    catalogue.show([f"task={task}"], sequences=20)
    assert capsys.readouterr().out.count("scored places a sequence") == 2


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


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["softmax", "gated_delta"])
def test_compiled_training_is_the_same_training(mixer):
    """In processes of their own, since the compiler cannot see through the tests' checks of every call."""
    for flag in ("false", "true"):
        done = shell("run", *TINY, f"mixer={mixer}", f"train.compile={flag}", f"name=compile-{flag}")
        assert done.returncode == 0, done.stderr
    (plain,), (compiled,) = folders("compile-false"), folders("compile-true")
    ours, theirs = ([p["train_loss"] for p in files.read_json(f / "curve.json")] for f in (plain, compiled))
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_a_wheel_finds_its_configuration_from_an_empty_folder(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path / "wheel"), str(CONF.parent)]
    subprocess.run(build, check=True)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(tmp_path / "site"),
        str(wheel),
    ]
    subprocess.run(install, check=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        command("run", *TINY), cwd=empty, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    where = subprocess.check_output(
        [sys.executable, "-c", "import recall_lab.run as r; print(r.CONF)"], cwd=empty, env=environment, text=True
    )
    assert where.strip() == str(tmp_path / "site" / "recall_lab" / "conf")


def ask(*arguments: str) -> int:
    """`recall-lab probe …` in this process: its exit status."""
    from recall_lab import messages

    try:
        return run.probe(arguments[0], [*arguments[1:]])
    except messages.ERRORS as error:
        return messages.complain(error)


def test_probes_within_a_run():
    assert recall(*TINY, "probe=[retrieval,state_retention]", "probe.state_retention.lags=[1]", "mixer=linear") == 0
    table = results.collect(Path("outputs/main"))
    found = table[table["split"] == "probe"]
    assert set(found["probe"]) == {"retrieval", "state_retention"}
    assert set(found["task.length"]) == set(table.loc[table["split"] == "test", "task.length"])
    assert found["value"].notna().all()


def test_probes_on_a_finished_run_and_over_its_training(capsys):
    assert recall(*TINY, "mixer=linear", "train.keep=true", "name=kept") == 0
    (folder,) = folders("kept")
    assert [path.stem for path in sorted((folder / "weights").iterdir())] == ["000003", "000006"]
    before = (folder / "rows.json").read_text()
    assert ask(str(folder), "probe=state_retention", "probe.state_retention.lags=[]") == 0
    assert ask("outputs/kept", "probe=state_retention", "probe.state_retention.lags=[]") == 0
    assert (folder / "rows.json").read_text() == before
    assert len(list(folder.glob("probe-*.json"))) == 1
    table = results.collect(Path("outputs/kept"))
    norms = table[table["metric"] == "norm"]
    assert set(norms["step"].dropna()) == {3, 6}
    last = norms.groupby("step", dropna=False)["value"].sum()
    assert last[6] == last[last.index.isna()].iloc[0] != last[3]
    assert "report.html" in capsys.readouterr().out


def test_another_policy_on_the_same_weights(capsys):
    """A window as long as the sequence scores what softmax scores; a narrow one less; other weights are refused."""
    assert recall(*TINY, "train.steps=60", "train.validate_every=20", "name=policy") == 0
    (folder,) = folders("policy")
    assert ask(str(folder), "mixer=window", "mixer.budget=64") == 0
    assert ask(str(folder), "mixer=window", "mixer.budget=2") == 0
    table = results.collect(Path("outputs/policy"))
    scores = table[(table["metric"] == "accuracy") & (table["split"] == "test")]
    by = {name: group["value"].tolist() for name, group in scores.groupby("mixer.budget", dropna=False)}
    softmax = next(values for name, values in by.items() if name != name)
    assert by[64] == softmax
    assert sum(by[2]) < sum(softmax)
    assert set(scores["trained_as"].dropna()) == {"softmax"}
    capsys.readouterr()
    assert ask(str(folder), "mixer=delta_rule") == 2
    told = capsys.readouterr().err
    assert "delta_rule cannot take the weights of softmax" in told
    assert told.count("\n") == 1
    assert ask(str(folder), "train.steps=9") == 2
    assert "only probe, mixer and test can be changed" in capsys.readouterr().err


def test_the_oracle_is_a_run():
    small = ["oracle=random", "oracle.d_key=8", "oracle.reads=64", "mixer=linear"]
    small += ["probe=state_retention", "probe.state_retention.lags=[]"]
    assert recall(*TINY, *small, "name=oracle", "report=true") == 0
    table = results.collect(Path("outputs/oracle"))
    assert set(table["task"]) == {"oracle"}
    assert {"top1", "error", "effective_rank"} <= set(table["metric"])
    assert set(table["oracle.pairs"]) == {64}
    assert Path("outputs/oracle/figure").is_dir()


def test_an_oracle_without_probes_is_refused(capsys):
    assert recall(*TINY, "oracle=random") == 1
    assert "an oracle without a probe measures nothing" in capsys.readouterr().err
