"""Atomic writing of files, and the folders of sweeps."""

import io
import json
import math
import sys

import pytest

from recall_lab import files, folders


def test_no_bare_nan_in_json(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "a.json", {"value": math.nan})
    assert list(tmp_path.iterdir()) == []
    files.write_json(tmp_path / "a.json", {"value": 1.5})
    assert json.loads((tmp_path / "a.json").read_text()) == {"value": 1.5}


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, [1])
    with pytest.raises(UnicodeEncodeError), files.replacing(path) as temporary:
        temporary.write_text("[2\ud800")
    assert json.loads(path.read_text()) == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_flatten():
    config = {"name": "x", "seed": 1, "mixer": {"_target_": "a.b", "heads": 2}, "train": {"cells": [{"n": 1}]}}
    assert folders.flatten(config) == {
        "name": "x",
        "seed": 1,
        "mixer._target_": "a.b",
        "mixer.heads": 2,
        "train.cells": '[{"n": 1}]',
    }


def test_claim(tmp_path, monkeypatch):
    folders.claim(tmp_path / "new" / "deep")
    folders.claim(tmp_path / "new" / "deep")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").touch()
    with pytest.raises(folders.ForeignFolder, match="holds other files"):
        folders.claim(tmp_path / "foreign")
    with pytest.raises(folders.ForeignFolder, match="cannot write"):
        folders.claim(tmp_path / "foreign" / "file")

    def refused(**where):  # root may write anywhere
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folders.tempfile, "TemporaryFile", refused)
    with pytest.raises(folders.ForeignFolder, match=r"cannot write to .*deep: Permission denied"):
        folders.claim(tmp_path / "new" / "deep")


def test_a_damaged_config_is_named(tmp_path):
    for content in ("a: [1", "- 1", "\x00", "", "task: {length: 8}\n", "choice:\n  task: mqar\n"):  # some are cut short
        (tmp_path / "config.yaml").write_text(content)
        with pytest.raises(ValueError, match=r"config\.yaml is damaged"):
            folders.read_config(tmp_path)


def test_settings_survive_the_file(tmp_path):
    config = {"a": 1e-5, "b": 1.0, "c": None, "d": "β: [1]", "e": [{"x": 1}], "f": True, "g": "1e-3"}
    config["choice"] = {"task": "mqar", "mixer": "softmax"}
    folders.write_config(tmp_path, config)
    assert folders.read_config(tmp_path) == config


def test_characters_that_a_terminal_lacks_are_replaced(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    files.tolerate_terminal()
    for stream in (sys.stdout, sys.stderr):
        stream.write("β = 1")
        stream.flush()
        assert stream.buffer.getvalue() == b"? = 1"
