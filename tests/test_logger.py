"""Loggers: what they are given, that no result depends on them, and that none is lost with them."""

import importlib.util
import json
import os
import signal
import struct
import sys
from pathlib import Path

import pytest
from command_line import TINY, background, recall, run_folders, shell, started, states

from recall_lab import folders, results
from recall_lab.files import read_json

pytestmark = pytest.mark.usefixtures("empty_folder")

OWN = """
import json
from dataclasses import dataclass
from recall_lab.logger.base import Logger

@dataclass
class Own(Logger):
    faulty: str = ""
    error: str = "OSError(28, 'No space left on device')"

    def _add(self, name, content):
        with self.path.open("a") as file:
            file.write(json.dumps([name, content]) + "\\n")
        if name == self.faulty:
            raise eval(self.error)

    def start(self, config, run, curve):
        self.path = run / f"own{self.faulty}.jsonl"
        self._add("start", [config["seed"], list(curve)])

    def point(self, point): self._add("point", dict(point))
    def table(self, rows): self._add("table", list(rows))
    def close(self, finished): self._add("close", finished)
"""


@pytest.fixture
def own(tmp_path) -> list[str]:
    """Options that choose a logger of the user's own."""
    (tmp_path / "mine" / "logger").mkdir(parents=True)
    (tmp_path / "mine" / "own.py").write_text(OWN)
    (tmp_path / "mine" / "logger" / "own.yaml").write_text("# @package logger.own\n_target_: own.Own\n")
    return ["--config-dir", "mine", "logger=own"]


def calls(run: Path, faulty: str = "") -> list:
    """Method and argument of every call of the logger `Own(faulty)`."""
    return [json.loads(line) for line in (run / f"own{faulty}.jsonl").read_text().splitlines()]


def test_a_logger_gets_the_settings_the_curve_and_the_rows_and_the_run_stays_the_same(own, capsys):
    assert recall(*own, *TINY, "name=logged") == 0
    (run,) = run_folders("logged")
    curve, rows = read_json(run / "curve.json"), read_json(run / "rows.json")["rows"]
    assert len(curve) == 2
    points = [["point", point] for point in curve]
    assert calls(run) == [["start", [0, []]], *points, ["table", rows], ["close", True]]

    assert recall(*TINY, "name=logged") == 0
    assert "found" in capsys.readouterr().out
    assert recall(*TINY, "name=plain") == 0
    (plain,) = run_folders("plain")
    assert plain.name == run.name
    assert (plain / "rows.json").read_text() == (run / "rows.json").read_text()
    config = folders.read_config(plain)
    assert folders.read_config(run) == config | {"logger": [{"_target_": "own.Own"}]}
    assert "logger" not in config
    columns, without = (set(results.collect(Path("outputs", name))) for name in ("logged", "plain"))
    assert columns == without


def test_a_resumed_run_tells_the_logger_what_was_logged_before(own):
    cut = ["+logger.own.faulty=point", "+logger.own.error='KeyboardInterrupt()'"]
    assert recall(*own, *TINY, *cut, "train.steps=9") == 130
    (run,) = run_folders("main")
    assert states("main") == ["interrupted"]
    first = calls(run, "point")
    assert [name for name, _ in first] == ["start", "point", "close"]
    assert first[-1] == ["close", False]
    assert recall(*own, *TINY, *cut, "train.steps=9") == 130  # the first point was not in a checkpoint: it comes again
    assert recall(*own, *TINY, "train.steps=9") == 0
    assert [name for name, _ in calls(run, "point")] == ["start", "point", "close"] * 2
    assert [name for name, _ in calls(run)] == ["start", "point", "point", "point", "table", "close"]

    (run / "status.json").write_text((run / "status.json").read_text().replace('"finished"', '"interrupted"'))
    (run / "own.jsonl").unlink()
    assert recall(*own, *TINY, "train.steps=9") == 0
    curve = read_json(run / "curve.json")
    assert calls(run)[0] == ["start", [0, curve]]
    assert [name for name, _ in calls(run)] == ["start", "table", "close"]


def test_a_logger_that_fails_costs_a_warning_and_no_result(own, capsys):
    methods = ["start", "point", "table", "close"]
    faulty = [f"+logger.{name}={{_target_: own.Own, faulty: {name}}}" for name in methods]
    assert recall(*own, *TINY, *faulty) == 0
    assert states("main") == ["finished"]
    (run,) = run_folders("main")
    for method in methods:
        called = [name for name, _ in calls(run, method)]
        assert called.count(method) == 1
        assert called[-1] == method  # the last that it is asked for
    assert calls(run)[-1] == ["close", True]
    assert capsys.readouterr().out.count("Own: No space left on device; the run goes on without this logger") == 1
    assert (run / "run.log").read_text().count("OSError") == 4


def test_what_is_wrong_with_a_logger_is_told_before_anything_starts(own, monkeypatch, capsys):
    find = importlib.util.find_spec
    missing = ("tensorboard", "wandb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in missing else find(name, *more))
    for words, line in {
        ("logger=wandb",): "logger=wandb: wandb is not installed: pip install 'recall_lab[wandb]'",
        ("-m", "logger=[tensorboard]", "seed=0,1"): "pip install 'recall_lab[tensorboard]'",
        ("logger=wandb", "logger.wandb.mode=off"): "logger.wandb.mode='off': must be one of offline, online",
        ("-m", "logger=tensorboard,wandb"): "logger=[tensorboard,wandb]",
        ("+logger.more=3",): "logger: 3 has no _target_",
        ("+logger.more._target_=torch.nn.Linear",): "must be a Logger",
        ("logger=other",): "there is no logger 'other'; there are own, tensorboard, wandb",
    }.items():
        assert recall("--config-dir", "mine", *TINY, *words) == 2
        assert line in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_an_unforeseen_error_before_the_start_ends_the_command(own, capsys):
    """Hydra would make a warning of it, and start the run without a report."""
    Path("mine/own.py").write_text(OWN + "\n    def check(self): raise KeyError('unforeseen')\n")
    sys.modules.pop("own", None)
    for several in ([], ["-m"]):
        assert recall(*own, *several, *TINY) == 2
        error = capsys.readouterr().err
        assert error.startswith("Traceback")
        assert error.endswith("recall-lab: KeyError: 'unforeseen'\n")
    assert not Path("outputs").exists()


def scalars_of_tensorboard(run: Path) -> list[dict[str, float]]:
    """The points in the event files, as in curve.json; every event counts, also one that a reader would leave out."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(run / "tensorboard"), purge_orphaned_data=False)
    log.Reload()
    assert "softmax" in str(log.Tensors("settings/text_summary")[0].tensor_proto)
    assert len(log.Tensors("results/text_summary")) == 1
    points: list[dict[str, float]] = []
    for name in log.Tags()["scalars"]:
        events = log.Scalars(name)
        points = points or [{"step": event.step} for event in events]
        assert [event.step for event in events] == [point["step"] for point in points]
        for point, event in zip(points, events, strict=True):
            point[name] = event.value
    times = [event.wall_time for event in log.Scalars("seconds")]
    taken = [event.value for event in log.Scalars("seconds")]
    assert times[-1] - times[0] == pytest.approx(taken[-1] - taken[0], abs=0.01)
    return points


def scalars_of_wandb(run: Path) -> list[dict[str, float]]:
    """The points in the history of the only offline run; the file is a log of LevelDB's format after seven bytes."""
    from wandb.proto import wandb_internal_pb2

    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    assert path.stem == f"run-{(run / 'wandb' / 'id.txt').read_text()}"
    content, at, parts, points = path.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # the end of a block is filled with zeros
            at += 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record, parts = wandb_internal_pb2.Record.FromString(parts), b""
            items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            if "loss" in items:
                points.append({name: json.loads(x) for name, x in items.items() if not name.startswith("_")})
                points[-1]["step"] = json.loads(items["_step"])
    assert len(list(run.glob("wandb/offline-run-*/files/media/table/results_*.table.json"))) == 1
    return points


READERS = {"tensorboard": scalars_of_tensorboard, "wandb": scalars_of_wandb}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"), [("tensorboard", signal.SIGKILL), ("wandb", signal.SIGKILL), ("wandb", signal.SIGINT)]
)
def test_the_log_is_the_curve_also_after_an_interruption(name, number):
    """A worker of a sweep, which is killed or interrupted with the whole group of processes, and resumed."""
    pytest.importorskip(name)
    words = ["-m", *TINY, "train.steps=100", "train.validate_every=5", "train.solved=null", f"logger={name}"]
    words += ["seed=0,1", "hydra.launcher.n_jobs=2", "name=cut"]
    with background("run", *words, slowed=True) as process:
        started(process, "cut", runs=2)
        os.killpg(process.pid, number)
        process.wait(timeout=60)
    assert states("cut") == ["interrupted" if number == signal.SIGINT else "running"] * 2
    done = shell("run", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "goes on without" not in done.stdout
    for run in run_folders("cut"):
        curve = read_json(run / "curve.json")
        assert len(curve) == 20
        logged = READERS[name](run)
        assert len(logged) == len(curve)
        for ours, theirs in zip(curve, logged, strict=True):
            assert theirs == pytest.approx(ours, rel=1e-6)
