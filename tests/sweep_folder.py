"""A sweep's folder with made-up runs, for tests of reports."""

import json
import re
from pathlib import Path

import yaml

from recall_lab import folders

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
