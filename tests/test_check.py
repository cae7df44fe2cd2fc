"""`recall-lab check`: its lines, its exit status, what it refuses, and reference arrays."""

import re

import numpy as np
import pytest
import torch
from command_line import shell
from conftest import golden

from recall_lab.cli import check as command
from recall_lab.cli.base import parse
from recall_lab.contract import golden as reference
from recall_lab.contract import mixer as contract
from recall_lab.contract import task as task_contract
from recall_lab.contract.base import Finding
from recall_lab.mixer.gated_linear import GatedLinear
from recall_lab.mixer.gla import GLA


def seen(mixer):
    """A check that takes no time, and tells what it was given."""
    return Finding(True, f"{type(mixer).__name__} {mixer.d_model} {mixer.heads} {mixer.d_key} {mixer.short_conv}")


def refuses(mixer):
    raise ZeroDivisionError("no")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(contract, "CHECKS", (seen,))
    monkeypatch.setattr(task_contract, "CHECKS", (task_contract.vocabulary_and_shapes,))


@pytest.mark.usefixtures("quick")
def test_every_value_is_checked_with_its_settings(capsys):
    words = ["mixer=linear,delta_rule", "mixer.d_key=8,4", "mixer.short_conv=2", "task=mqar", "task.vocab=32"]
    assert command.check(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "mixer=linear mixer.d_key=8 mixer.short_conv=2, with d_model=16, heads=2",
        "  ok      seen: Linear 16 2 8 2",
        "  none failed",
    ]
    found = [line.split("seen: ")[1] for line in lines if "seen" in line]
    assert found == ["Linear 16 2 8 2", "Linear 16 2 4 2", "DeltaRule 16 2 8 2", "DeltaRule 16 2 4 2"]
    assert lines[-3] == "task=mqar task.vocab=32"
    assert "  ok      vocabulary and shapes: tokens 0 … 31, targets 16 … 31, vocab 32" in lines


@pytest.mark.usefixtures("quick")
def test_the_mechanisms_of_a_hybrid_and_a_given_number_of_heads(capsys):
    assert command.check(["mixer=hybrid", "mixer.second.heads=4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "hybrid" in line] == [
        "mixer=hybrid mixer.second.heads=4, mechanism 1 of 2, with d_model=16",
        "mixer=hybrid mixer.second.heads=4, mechanism 2 of 2, with d_model=16",
    ]
    assert [line for line in lines if "seen" in line] == [
        "  ok      seen: DeltaRule 16 1 16 4",
        "  ok      seen: Softmax 16 4 4 4",
    ]


def test_the_status_is_one_where_a_check_failed_and_others_go_on(monkeypatch, capsys):
    monkeypatch.setattr(contract, "CHECKS", (seen, refuses, contract.neutral_gates))
    assert command.check(["mixer=linear", "mixer.d_key=0"]) == 1
    assert "FAILED  construction: ValueError: d_key=0: must be a whole number of at least 1" in capsys.readouterr().out
    assert command.check(["mixer=linear"]) == 1
    out = capsys.readouterr().out
    assert "  FAILED  refuses: ZeroDivisionError: no (" in out
    assert "  -       neutral gates: not applicable: it has no gates\n" in out
    assert out.endswith("  1 failed: refuses\n")
    assert command.check(["task=mqar", "task.pairs=77"]) == 1
    assert "  FAILED  construction: ValueError: pairs=77" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to check: give mixer=NAME, task=NAME or both"),
        (["train.steps=3"], "train.steps has no effect: check examines mixers and tasks"),
        (["experiment=quickstart"], "experiment has no effect"),
        (["~mixer.heads"], "a setting cannot be removed"),
    ],
)
def test_what_has_no_effect_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        command.check(words)


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("mixer=glob(gated*,exclude=*product)", ["gated_delta", "gated_linear"]),
        ("mixer.budget=range(1,4)", ["1", "2", "3"]),
        ("mixer=linear", ["linear"]),
        ("mixer=glob(x*)", "mixer=glob(x*): there is no such mixer; there are based, "),
        ("mixer.heads=glob(*)", "mixer.heads=glob(*): glob(…) lists the options of a group, as of mixer"),
        ("mixer.heads=interval(1,4)", "mixer.heads=interval(1,4): an interval has no list of values"),
    ],
)
def test_values_of_a_sweep(word, found):
    (override,) = parse([word])
    if isinstance(found, list):
        assert command.values(override) == found
    else:
        with pytest.raises(ValueError, match=f"^{re.escape(found)}"):
            command.values(override)


def test_golden_arrays_need_a_mixer():
    with pytest.raises(ValueError, match="--golden has reference arrays of a mechanism: give mixer=NAME as well"):
        command.check(["task=mqar"], golden="x.npz")


def test_the_command_line():
    done = shell("check")
    assert done.returncode == 2
    assert done.stderr.startswith("recall-lab: nothing to check: give mixer=NAME")
    assert done.stderr.count("\n") == 1
    assert " check " in shell("--help").stdout
    assert "layout b h t d" in shell("check", "--help").stdout


@pytest.mark.slow
def test_a_built_in_mixer_and_task_pass():
    done = shell("check", "mixer=delta_rule", "task=induction")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  ok  ") == len(contract.CHECKS) + len(task_contract.CHECKS)


def gla_arrays() -> dict[str, np.ndarray]:
    """Reference arrays of flash-linear-attention, with the names and the layout of --golden."""
    arrays = golden("gla")
    names = {"q": "q", "k": "k", "v": "v", "g": "log_decay", "o": "o"}
    found = {new: arrays[old].transpose(1, 2).numpy() for old, new in names.items()}
    return found | {"state_S": arrays["ht"].numpy()}


def found(make, arrays, tmp_path) -> dict[str, Finding]:
    np.savez(tmp_path / "reference.npz", **arrays)
    return {f.check: f for f in reference.findings(make, reference.load(tmp_path / "reference.npz"))}


def test_reference_arrays_of_another_implementation(tmp_path):
    passed = found(GLA, gla_arrays(), tmp_path)
    assert passed.keys() == {"golden o", "golden state_S"}
    assert all(finding.holds for finding in passed.values())
    wrong = gla_arrays()
    wrong["o"] = wrong["o"] * (1 + 1e-8)
    failed = found(GLA, wrong, tmp_path)
    assert failed["golden o"].failed
    assert failed["golden o"].detail.startswith("largest relative error 1.0e-08 (allowed 1e-10): rms of ")
    assert failed["golden state_S"].holds
    rounded = {name: array.astype(np.float32) for name, array in gla_arrays().items()}
    assert all(finding.holds for finding in found(GLA, rounded, tmp_path).values())


def test_reference_gradients(tmp_path):
    """Of a state that only adds, by the closed form: dv_s = Σ_{t≥s} (q_t·k_s) do_t, scaled like the outputs."""
    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, 2, 2, 9, 4))
    zero, one = np.zeros(q.shape[:3]), np.ones(q.shape[:3])
    A = np.tril(q @ k.swapaxes(2, 3)) / 2
    arrays = {
        "q": q,
        "k": k,
        "v": v,
        "log_decay": zero,
        "write": one,
        "o": A @ v,
        "do": do,
        "dv": A.swapaxes(2, 3) @ do,
    }
    arrays["dwrite"] = (arrays["dv"] * v).sum(3)
    passed = found(GatedLinear, arrays, tmp_path)
    assert passed.keys() == {"golden o", "golden dv", "golden dwrite"}
    assert all(finding.holds for finding in passed.values())
    failed = found(GatedLinear, arrays | {"dv": 2 * arrays["dv"]}, tmp_path)
    assert {name for name, finding in failed.items() if finding.failed} == {"golden dv"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("o"), "lacks o; see `recall-lab check --help`"),
        (lambda a: a.pop("log_decay"), "the file lacks the gates log_decay of GLA"),
        (lambda a: a.update(beta=a["q"]), "beta: neither input nor result of GLA; those are log_decay, o, state_S"),
        (lambda a: a.update(dq=a["q"]), "dq: neither input nor result"),
        (lambda a: a.update(q=a["q"].astype(int)), "q is int64 of shape .*; it must be float32 or float64"),
        (lambda a: a.update(o=a["o"][:, :1]), r"o has shape \(2, 1, 24, 16\), not \(2, 2, 24, 16\)"),
    ],
)
def test_an_incomplete_file_is_refused_in_one_line(change, message, tmp_path):
    arrays = gla_arrays()
    change(arrays)
    with pytest.raises(ValueError, match=message):
        found(GLA, arrays, tmp_path)


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    path = tmp_path / "reference.npz"
    path.write_text("q")
    with pytest.raises(ValueError, match=r"reference\.npz: must be an \.npz of arrays of numbers"):
        reference.load(path)
    torch.manual_seed(0)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"must be an \.npz"):
        reference.load(tmp_path / "one.npy")


def test_reference_arrays_are_lines_of_the_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(contract, "CHECKS", (seen,))
    np.savez(tmp_path / "reference.npz", **gla_arrays())
    assert command.check(["mixer=gla"], golden=str(tmp_path / "reference.npz")) == 0
    assert "  ok      golden o: largest relative error" in capsys.readouterr().out
    np.savez(tmp_path / "reference.npz", **gla_arrays() | {"beta": np.zeros((1, 1, 1))})
    assert command.check(["mixer=gla"], golden=str(tmp_path / "reference.npz")) == 1
    assert "  FAILED  golden: ValueError: beta: neither input nor result of GLA" in capsys.readouterr().out
