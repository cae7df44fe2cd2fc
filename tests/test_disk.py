"""Disks that are full or may not be written: each on a small tmpfs, where one can be mounted."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import TINY, rows, run_folders, shell, states

from recall_lab import files, folders

pytestmark = [pytest.mark.usefixtures("empty_folder"), pytest.mark.slow]

SWEEP = ["run", "-m", *TINY, "seed=range(0,4)", "hydra.launcher.n_jobs=2"]


def mount(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run(["mount", *options, "tmpfs", "outputs"], capture_output=True, text=True, check=False)


@pytest.fixture
def disk(empty_folder) -> Iterator[None]:
    """outputs/ is a disk of 8 MB."""
    Path("outputs").mkdir()
    done = mount("-t", "tmpfs", "-o", "size=8m")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield
    subprocess.run(["umount", "-l", "outputs"], check=True)


def fill(free: int) -> Path:
    """Fills the disk except for some bytes."""
    full = Path("outputs/full")
    available = int(subprocess.check_output(["df", "--output=avail", "-B1", "outputs"], text=True).split()[1])
    full.write_bytes(bytes(available - free))
    return full


@pytest.mark.parametrize("free", [0, 100_000])
def test_a_full_disk(disk, free):
    """One line for each run that fails, and none of a traceback; the finished ones are whole. Once there is space, the
    same command ends with the results of an undisturbed sweep."""
    full = fill(free)
    done = shell(*SWEEP)
    assert done.returncode in (1, 2)
    for line in done.stderr.splitlines():
        assert re.fullmatch(r"recall-lab: .*No space left on device", line), line
    for run in run_folders("main"):
        if folders.status(run)["state"] == "finished":
            assert files.read_json(run / "rows.json")["rows"]
    here = rows("main")
    full.unlink()
    assert shell(*SWEEP).returncode == 0
    assert states("main") == ["finished"] * 4
    assert here.items() <= rows("main").items()
    assert shell(*SWEEP, "root=elsewhere").returncode == 0
    assert rows("main") == rows("../elsewhere/main")


def test_a_disk_that_is_full_when_the_report_is_made(disk):
    """The runs are finished, and one line says why there is no report; it is made once there is space."""
    words = ["run", *TINY, "report=true"]
    assert shell("run", *TINY).returncode == 0
    full = fill(8_000)
    before = rows("main")
    done = shell(*words)
    assert done.returncode == 1
    assert done.stderr == "recall-lab: no report: cannot write outputs/main/settings.parquet: No space left on device\n"
    assert rows("main") == before
    full.unlink()
    done = shell(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert Path("outputs/main/report.html").exists()


def test_a_disk_that_may_not_be_written(disk):
    """Every command that would write says so in one line; what only reads works; the report can go elsewhere."""
    assert shell("run", *TINY).returncode == 0
    before = {path: path.read_bytes() for path in Path("outputs").rglob("*") if path.is_file()}
    assert mount("-o", "remount,ro,size=8m").returncode == 0
    for words in (
        ["run", *TINY, "name=new"],
        ["run", "-m", *TINY, "seed=0,1"],
        ["report", "outputs/main"],
        ["probe", "outputs/main", "probe=[retrieval]"],
        ["clean", "outputs/main", "--checkpoints"],
    ):
        done = shell(*words)
        assert done.returncode in (1, 2)
        assert re.fullmatch(
            r"recall-lab: cannot (write|write to|lock) \S*outputs/\S+: Read-only file system\n", done.stderr
        ), done.stderr
    for words in (["status", "outputs/main"], ["report", "outputs/main", "--to", "here"]):
        done = shell(*words)
        assert (done.returncode, done.stderr) == (0, ""), words
    assert {path: path.read_bytes() for path in before} == before
    assert mount("-o", "remount,rw,size=8m").returncode == 0
    assert shell("run", *TINY, "seed=1").returncode == 0
    assert states("main") == ["finished"] * 2
