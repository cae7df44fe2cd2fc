"""What a command shows while it runs, and its worker processes."""

import io
import os
import pty
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from command_line import TINY, command, recall, run_folders
from rich.console import Console

from recall_lab import display, files, folders, overview, workers
from recall_lab.cli.base import compose, resolved
from recall_lab.display import Display
from recall_lab.sweep import ENVIRONMENT, FAILED, WORKER_OF, Sweep

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def sweep() -> Sweep:
    """A command with five runs: one running, one that another process has, two that have ended, one new."""
    parent = Path("outputs/main")
    folders.claim(parent)
    made = Sweep(parent, "command")
    made.begin()
    made.plan({name: f"softmax on mqar, seed {seed}" for seed, name in enumerate("abcde")})
    going = {"phase": "training", "done": 57, "total": 200, "accuracy": 0.25, "left": 100.0}
    states = {
        "a": ("running", "started"),
        "b": ("running", "skipped"),
        "c": ("finished", "finished"),
        "d": ("failed",) * 2,
    }
    for seed, (name, (state, event)) in enumerate(states.items()):
        run = parent / name
        run.mkdir()
        folders.write_config(run, {"choice": {"mixer": "softmax", "task": "mqar"}, "seed": seed})
        facts = {"format": folders.FORMAT, "state": state, "started": "", "seconds": 30.0}
        files.write_json(run / "status.json", facts | (going if state == "running" else {}))
        (run / "rows.json").write_text("[]")
        made.note(name, "started")
        made.note(name, event)
    return made


def rendered(shown: Display) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(shown.render())
    return console.file.getvalue()


def test_the_display_shows_the_running_runs_and_the_totals(sweep):
    shown = Display(sweep)
    with folders.locked(sweep.folder / "a"), folders.locked(sweep.folder / "b"):
        first, *running = rendered(shown).splitlines()
    assert first.strip() == "2 running, 1 done, 1 failed, 1 new; time left: 2 min"
    assert len(running) == 2
    for line, seed in zip(running, (0, 1), strict=True):
        assert line.startswith(f"softmax on mqar, seed {seed}  ")
        assert re.search(r"step 57 of 200 +accuracy 0\.250 +2 min left$", line.rstrip())
    assert set(shown.ended) == {"c", "d"}
    sweep.note("a", "interrupted")
    assert [each.state for each in overview.of_command(sweep, shown.ended)] == [
        "interrupted", "interrupted", "done", "failed", "new",
    ]  # fmt: skip


def test_without_a_terminal_there_is_a_line_of_totals_now_and_then(sweep, monkeypatch, capsys):
    monkeypatch.setattr(display, "MINUTE", 0.01)
    shown = Display(sweep)
    shown.start()
    while not (printed := capsys.readouterr().out):
        time.sleep(0.01)
    shown.stop()
    assert printed.startswith("progress  1 done, 1 failed, 2 interrupted, 1 new\n")


def pool(monkeypatch) -> workers.Pool:
    monkeypatch.setenv(ENVIRONMENT, "command")
    monkeypatch.setenv(WORKER_OF, str(os.getpid()))
    parent = Path("outputs/main")
    folders.claim(parent)
    Sweep(parent, "command").begin()
    return workers.Pool(parent, 1)


def settings(*overrides: str) -> dict:
    return resolved(compose([*TINY, *overrides]), {"task": "mqar", "mixer": "softmax"})


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_and_the_run_resumed(monkeypatch, capsys):
    """The first one is killed as soon as it has started the run."""
    made = pool(monkeypatch)
    config = settings()
    name = folders.identity(config)

    def kill_the_first() -> None:
        while made.sweep.attempts(name) == 0:
            time.sleep(0.01)
        made.workers[0].process.kill()

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    try:
        assert made.do((config, 0)) < FAILED
    finally:
        killer.join()
        made.close()
    assert folders.status(made.folder / name)["state"] == "finished"
    assert len(made.workers) == 2
    assert [worker.process.poll() is not None for worker in made.workers] == [True, True]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"killed    {name} ")
    assert second.startswith(f"finished  {name} ")


def test_a_worker_that_cannot_start_ends_the_run(monkeypatch):
    made = pool(monkeypatch)
    monkeypatch.setattr(workers.sys, "executable", "/bin/false")
    config = settings()
    assert made.do((config, 0)) == FAILED
    made.close()
    assert "no process for it could be started" in made.sweep.last()[folders.identity(config)]["text"]
    assert len(made.workers) == 4
    assert made.do((config, 0)) == FAILED
    assert len(made.workers) == 4


def test_lines_are_sent_when_they_are_complete():
    sent = io.BytesIO()
    lines = workers.Lines("stdout", io.TextIOWrapper(sent, write_through=True))
    for text in ("a", "b\nc\n", "", "d"):
        assert lines.write(text) == len(text)
    lines.flush()
    assert sent.getvalue() == b'{"stream": "stdout", "text": "ab"}\n{"stream": "stdout", "text": "c"}\n'


@pytest.mark.slow
def test_a_terminal_shows_steps_that_move_before_the_first_validation():
    """And Ctrl-C says how to go on."""
    some = ["train.steps=100000", "train.validate_every=100000", "train.solved=null", "seed=0,1", "name=long"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm", "COLUMNS": "120"}
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execv(sys.executable, command("run", "-m", *TINY, *some, "hydra.launcher.n_jobs=2"))
    printed, steps = "", set()
    begun = time.monotonic()
    while len(steps) < 4 and time.monotonic() - begun < 300:
        printed += os.read(terminal, 65536).decode(errors="replace")
        steps = set(re.findall(r"step (\d+) of 100000", printed))
    os.write(terminal, b"\x03")
    try:
        while part := os.read(terminal, 65536):
            printed += part.decode(errors="replace")
    except OSError:
        pass  # the terminal is closed
    assert len(steps) >= 4
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed)  # without colours
    assert "2 running" in printed
    assert "interrupted; the same command resumes the runs" in printed
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert [folders.status(run)["state"] for run in run_folders("long")] == ["interrupted"] * 2


@pytest.mark.slow
def test_results_of_workers_are_those_of_one_process():
    assert recall("-m", *TINY, "seed=0,1,2", "hydra.launcher.n_jobs=2", "name=workers") == 0
    assert recall("-m", *TINY, "seed=0,1,2", "hydra/launcher=basic", "name=one") == 0
    found = [{run.name: (run / "rows.json").read_text() for run in run_folders(name)} for name in ("workers", "one")]
    assert found[0] == found[1]
    assert len(found[0]) == 3
