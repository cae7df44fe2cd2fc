"""`recall-lab clean`: nothing is deleted without a flag, and never a result."""

from pathlib import Path

import pytest

from recall_lab import files, folders
from recall_lab.cli.clean import clean

pytestmark = pytest.mark.usefixtures("empty_folder")

PARENT = Path("outputs/main")


@pytest.fixture(autouse=True)
def _runs(empty_folder):
    """A run in each of several states, each with weights of 3000 bytes."""
    for name, state in (("a", "finished"), ("b", "incomplete"), ("c", "failed"), ("d", "died"), ("e", "interrupted")):
        run = PARENT / name
        (run / "weights").mkdir(parents=True)
        (run / "weights/000100.pt").write_bytes(b"x" * 1000)
        (run / "checkpoint.pt").write_bytes(b"x" * 2000)
        folders.write_config(run, {"choice": {"mixer": "softmax", "task": "mqar"}, "seed": 0})
        files.write_json(run / "status.json", {"format": folders.FORMAT, "state": state, "started": name})
        (run / "rows.json").write_text('{"rows": []}\n')
    (PARENT / folders.MARK).touch()


def present() -> set[str]:
    return {path.relative_to(PARENT).as_posix() for path in PARENT.rglob("*") if path.name != ".lock"}


def test_without_a_flag_nothing_is_deleted():
    before = present()
    first, second = clean("outputs/main").splitlines()
    assert first == "checkpoints of finished runs: 1, 3.0 kB; --checkpoints deletes them"
    assert second.startswith("failed runs: 2, ")
    assert second.endswith("kB; --failed deletes them")
    assert present() == before


def test_the_weights_of_finished_runs_are_deleted():
    before = present()
    assert clean("outputs/main", checkpoints=True).startswith(
        "checkpoints of finished runs: 1 of 1 deleted, of 3.0 kB\n"
    )
    assert before - present() == {"a/checkpoint.pt", "a/weights", "a/weights/000100.pt"}
    assert clean("outputs/main", checkpoints=True).startswith("checkpoints of finished runs: 0, 0 B\n")
    assert folders.status(PARENT / "a")["state"] == "finished"


def test_failed_runs_are_deleted_except_one_that_is_being_worked_on():
    before = present()
    with folders.locked(PARENT / "d"):
        _, second = clean("outputs/main", failed=True).splitlines()
    assert second.startswith("failed runs: 1 of 2 deleted, of ")
    assert second.endswith("; kept, because another process is working on them: 1")
    assert {name.partition("/")[0] for name in before - present()} == {"c"}


def test_a_folder_of_others_is_refused():
    Path("mine").mkdir()
    with pytest.raises(folders.ForeignFolder, match="was not written by recall-lab run"):
        clean("mine", checkpoints=True, failed=True)
