"""Folders of sweeps with made-up runs, for tests of tables and reports."""

import copy
import json
import re
from functools import cache
from pathlib import Path

import yaml

from recall_lab import files, folders
from recall_lab.cli.base import compose, resolved

STATUS = {
    "format": folders.FORMAT,
    "started": "2025-01-01T00:00:00",
    "sweep": "",
    "seconds": 2.0,
    **dict.fromkeys(("git", "version", "torch", "numpy", "python", "device", "threads"), "1"),
}


def write(
    folder: Path, mixer: str = "linear", task: str = "mqar", seed: int = 0, state: str = "finished", **more
) -> Path:
    """A finished run with an accuracy in two cells, and a training curve."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / folders.MARK).touch()
    heads, facts = more.pop("heads", 1), more
    run = folder / f"{re.sub('[^a-z]', '', mixer + task)}-{heads}-{seed}"
    run.mkdir()
    config = {
        "seed": seed,
        "data_seed": 0,
        "mixer": {"_target_": f"{mixer}.M", "heads": heads},
        "task": {"_target_": f"{task}.T", "length": 16},
        "choice": {"mixer": mixer, "task": task},
    }
    rows = [
        {"split": split, "metric": metric, "value": value, "task.length": length}
        for split, lengths in (("validation", (16,)), ("test", (16, 64)))
        for length in lengths
        for metric, value in (("accuracy", heads / 100 + length / 1000), ("chance", 0.1), ("state_elements", 9.0))
    ]
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (run / "rows.json").write_text(json.dumps({"format": folders.FORMAT, "rows": rows}), encoding="utf-8")
    (run / "curve.json").write_text(json.dumps([{"step": 1, "accuracy": 0.5}]), encoding="utf-8")
    (run / "status.json").write_text(json.dumps(STATUS | {"state": state} | facts), encoding="utf-8")
    return run


def composed(*overrides: str, mixer: str = "delta_rule", task: str = "mqar") -> dict:
    """The settings of a run, as the command line would resolve them; a copy, which a test may change."""
    return copy.deepcopy(_composed(mixer, task, overrides))


@cache
def _composed(mixer: str, task: str, overrides: tuple[str, ...]) -> dict:
    return resolved(compose([f"mixer={mixer}", f"task={task}", *overrides]), {"task": task, "mixer": mixer})


def finished(sweep: Path, name: str, config: dict, rows: list[dict], **facts) -> Path:
    """A run with these settings and rows; nothing is trained."""
    run = sweep / name
    run.mkdir(parents=True)
    (sweep / folders.MARK).touch()
    folders.write_config(run, config)
    facts = {"state": "finished", "threads": config["threads"]} | facts
    files.write_json(run / "status.json", STATUS | facts)
    files.write_json(run / "rows.json", {"format": folders.FORMAT, "rows": rows})
    return run
