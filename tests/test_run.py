"""One run from the command line: its folder, reuse of finished runs, and messages about bad input."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from command_line import SERIAL, TINY, command, recall, run_folders, run_probe, shell
from conftest import CONF

from recall_lab import building, files, folders, provenance, report, results, runner, table_files
from recall_lab.cli.base import compose, resolved

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_a_run_leaves_a_complete_folder(capsys):
    assert recall(*TINY, "name=one", "report=true") == 0
    (folder,) = run_folders("one")
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "config.yaml", "status.json", "curve.json", "rows.json", "run.log", "checkpoint.pt",
    }  # fmt: skip
    status = folders.status(folder)
    assert status["state"] == "finished"
    assert status["threads"] == 1
    assert status["device"] in ("cpu", "cuda", "mps")
    assert status["torch"] == torch.__version__
    assert "step 6" in (folder / "run.log").read_text()
    table = table_files.read(Path("outputs/one"))
    assert {"accuracy", "loss_bits", "scored_tokens", "chance", "state_elements"} <= set(table["metric"])
    assert {"run", "mixer", "task", "seed", "task.length", "task.pairs", "git", "threads", "seconds"} <= set(table)
    assert set(table["split"]) == {"validation", "test"}
    assert {path.name for path in Path("outputs/one").iterdir()} >= {"table.parquet", "figure", "report.html"}
    printed = capsys.readouterr().out
    assert "accuracy per scored token" in printed
    assert "outputs/one/report.html" in printed


def test_a_report_made_again_is_the_same_report():
    assert recall(*TINY, "report=true") == 0
    made = [Path("outputs/main/report.html"), *sorted(Path("outputs/main/figure").iterdir())]
    before = [path.read_bytes() for path in made]
    report.make(Path("outputs/main"))
    assert [path.read_bytes() for path in made] == before
    assert {path.suffix for path in made} == {".html", ".png", ".svg", ".pdf"}


def test_a_finished_run_is_not_repeated(capsys):
    assert recall(*TINY) == 0
    (folder,) = run_folders("main")
    files = [path for path in folder.iterdir() if path.name != ".lock"]
    before = [path.stat().st_mtime_ns for path in files]
    assert recall(*TINY) == 0
    assert [path.stat().st_mtime_ns for path in files] == before
    assert "found" in capsys.readouterr().out


def test_a_finished_run_is_found_without_the_imports_that_a_run_needs():
    assert recall(*TINY) == 0
    code = """import sys
from recall_lab.cli import run
code = run.main(sys.argv[1:])
sys.exit(str({"torch", "pandas", "scipy"} & set(sys.modules) or code or "found"))"""
    done = subprocess.run([sys.executable, "-c", code, *TINY], check=False, capture_output=True, text=True)
    assert done.stderr == "found\n"
    assert done.stdout.startswith("found ")


def test_the_commands_are_kept():
    """Each once, and only those that run something; the description is that of the experiment."""
    words = [*TINY, "name=kept", "seed=3"]
    for _ in range(2):
        assert recall(*words) == 0
    assert recall(*words, "--cfg", "job") == 0
    assert recall(*words, "mixer.heads=0") == 2
    kept = folders.commands(Path("outputs/kept"))
    assert [shlex.split(each["command"]) for each in kept] == [["recall-lab", "run", *words]]
    assert run_probe("outputs/kept", "probe=retrieval", "test.probe_sequences=2") == 0
    assert folders.commands(Path("outputs/kept"))[1] == {
        "command": "recall-lab probe outputs/kept probe=retrieval test.probe_sequences=2",
        "description": "",
    }


def test_the_description_of_an_experiment_is_kept():
    own = Path("mine/experiment/own.yaml")
    own.parent.mkdir(parents=True)
    own.write_text("# @package _global_\n# Mine,\n# in two lines.\nname: own  # not this\nseed: 2\n")
    assert recall("--config-dir", "mine", "experiment=own", *TINY) == 0
    (kept,) = folders.commands(Path("outputs/own"))
    assert kept["description"] == "Mine,\nin two lines."


def test_a_report_is_made_for_runs_of_earlier_commands_too(no_figures):
    assert recall(*TINY) == 0
    assert not Path("outputs/main/report.html").exists()
    assert recall(*TINY, "report=true") == 0
    assert Path("outputs/main/report.html").exists()


def test_the_output_folder_does_not_change_the_identity(no_figures):
    assert recall(*TINY, "name=a") == recall(*TINY, "name=b", "root=elsewhere", "report=true") == 0
    (one,), (other,) = run_folders("a"), list(Path("elsewhere/b").glob("*/status.json"))
    assert one.name == other.parent.name
    assert (one / "rows.json").read_text() == (other.parent / "rows.json").read_text()
    assert Path("elsewhere/b/report.html").exists()
    assert not Path("outputs/a/report.html").exists()


def test_1_and_1_0_are_the_same_setting():
    assert recall("-m", *TINY, SERIAL, "train.clip=1,1.0") == 0
    assert len(run_folders("main")) == 1


def test_an_option_may_stand_between_overrides():
    assert recall(*TINY, SERIAL, "-m", "seed=0,1") == 0
    assert len(run_folders("main")) == 2


def test_experiments_with_names_of_their_own_are_no_sweep(tmp_path, capsys):
    """Their runs would be in other folders than the sweep's, where no failure is noted and no report is made."""
    (tmp_path / "mine/experiment").mkdir(parents=True)
    for name in ("one", "two"):
        (tmp_path / f"mine/experiment/{name}.yaml").write_text(f"# @package _global_\nname: {name}\n")
    words = ["--config-dir", str(tmp_path / "mine"), "-m", *TINY, SERIAL, "experiment=one,two"]
    assert recall(*words) == 2
    assert "would put runs into different folders" in capsys.readouterr().err
    assert run_folders("one") == run_folders("two") == []
    assert recall(*words, "name=both") == 0


def test_a_worker_whose_command_was_killed_starts_no_further_run(tmp_path, monkeypatch):
    settings = resolved(compose(TINY), {"task": "mqar", "mixer": "softmax"})
    monkeypatch.setenv("RECALL_LAB_PID", "1")
    monkeypatch.setattr(runner, "PARENT", 0)
    assert runner.execute(settings, tmp_path) == runner.FAILED
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["rows.json", pytest.param("config.yaml", marks=pytest.mark.slow)])
def test_a_finished_run_that_lost_a_file_is_repeated(name):
    assert recall(*TINY) == 0
    (folder,) = run_folders("main")
    rows = (folder / "rows.json").read_text()
    (folder / name).unlink()
    assert "no finished run yet: 1 lost" in shell("report", "outputs/main").stderr
    assert recall(*TINY) == 0
    assert (folder / "rows.json").read_text() == rows


@pytest.mark.slow
@pytest.mark.parametrize(("name", "content"), [("rows.json", "[]"), ("status.json", "{"), ("config.yaml", "a: [")])
def test_the_other_runs_of_a_sweep_with_a_damaged_one_are_reported(name, content, capsys):
    assert recall("-m", *TINY, SERIAL, "seed=0,1") == 0
    damaged, sound = run_folders("main")
    (damaged / name).write_text(content)
    made = report.make(Path("outputs/main"))
    assert set(pd.read_parquet("outputs/main/table.parquet")["run"]) == {sound.name}
    (line,) = made.failed
    assert line.startswith(f"{damaged / name} is damaged")
    assert shell("report", "outputs/main").returncode == 1
    with pytest.raises(ValueError, match="is damaged"):
        results.collect(Path("outputs/main"))
    if name == "status.json":
        assert recall(*TINY, f"seed={folders.read_config(damaged)['seed']}") == 0
        assert report.make(Path("outputs/main")).failed == []


@pytest.mark.parametrize("name", ["rows.json", "status.json", "checkpoint.pt"])
def test_a_damaged_file_is_named(name):
    assert recall(*TINY) == 0
    (folder,) = run_folders("main")
    path = folder / name
    path.write_bytes(path.read_bytes()[:20])
    done = shell("report" if name != "checkpoint.pt" else "probe", str(folder.parent), *(
        ["probe=retrieval"] if name == "checkpoint.pt" else []
    ))  # fmt: skip
    assert done.returncode == 2
    assert f"{path} is damaged" in done.stderr
    assert done.stderr.count("\n") == 1


def test_different_settings_have_different_folders():
    for setting in ("seed=1", "train.lr=0.02", "mixer.heads=2", "data_seed=3"):
        assert recall(*TINY, setting) == 0
    assert len(run_folders("main")) == 4


def test_a_folder_that_is_not_a_sweep_is_not_touched(capsys):
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


@pytest.mark.slow
def test_report_on_what_has_no_results(monkeypatch):
    Path("empty").mkdir()
    for folder, message in (("empty", "empty was not written by recall-lab run"), ("none", "none was not written")):
        done = shell("report", folder)
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
    monkeypatch.setattr(building, "check", lambda settings: None)  # nothing is refused before the start
    assert recall(*TINY, "name=half", "mixer.heads=3") == 1
    done = shell("report", "outputs/half")
    assert done.returncode == 2
    assert "no finished run yet: 1 failed" in done.stderr
    assert not Path("outputs/half/report.html").exists()


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
        [sys.executable, "-c", "import recall_lab.files as r; print(r.CONF)"], cwd=empty, env=environment, text=True
    )
    assert where.strip() == str(tmp_path / "site" / "recall_lab" / "conf")


def test_files_of_the_operating_system_are_ignored():
    Path("outputs/main").mkdir(parents=True)
    for name in (".DS_Store", "Thumbs.db", ".gitkeep"):
        Path("outputs/main", name).touch()
    assert recall(*TINY) == 0


def test_a_run_of_another_format_is_refused(capsys):
    assert recall(*TINY) == 0
    (folder,) = run_folders("main")
    status = files.read_json(folder / "status.json")
    del status["format"]
    files.write_json(folder / "status.json", status)
    assert recall(*TINY, "seed=1") == 2
    printed = capsys.readouterr().err
    assert f"{folder} has format 1, this version of recall_lab reads format 2 only" in printed
    assert printed.count("\n") == 1
    assert len(run_folders("main")) == 1


def test_the_identity_holds_every_setting_that_determines_the_result():
    """If two data seeds shared a folder, one of them would not be run."""
    plain = composed()
    assert folders.identity(plain) == folders.identity(composed("name=other", "report=false", "select=[train.clip]"))
    circumstances = ("threads=2", "device=cpu", "deterministic=false", "train.keep=true")
    changes = ("seed=1", "data_seed=1", "train.lr=0.1", "mixer.heads=2", "optimizer.eps=1e-6", "schedule=linear")
    for change in (*changes, *circumstances, "task.pairs=4", "test.tokens=9", "probe=[cost]", "mixer=linear"):
        assert folders.identity(plain) != folders.identity(composed(change)), change


def composed(*overrides: str) -> dict:
    """The settings of a run, as the command line resolves them."""
    made = compose([*overrides])
    return resolved(made, {"task": "mqar", "mixer": "softmax"})


def test_a_package_that_is_not_installed_has_no_version(monkeypatch):
    import importlib.metadata

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert provenance.version("recall_lab") == "unknown"
