"""Training resumes from a checkpoint exactly, wherever it was interrupted."""

import itertools
from pathlib import Path

import pytest
import torch
from conftest import CPU, TASK, small_model, small_training

from recall_lab.checkpoint import NotFinite, load
from recall_lab.model import Model
from recall_lab.train import Interrupted, train

UNTIL_THE_END = small_training(solved=None)


def without_seconds(curve: list[dict]) -> list[dict]:
    return [{name: value for name, value in point.items() if name != "seconds"} for point in curve]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Model, list[dict], dict]:
    """The model, curve and checkpoint of a training without interruption."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("uninterrupted") / "checkpoint.pt"
    model = small_model()
    curve = train(model, TASK, UNTIL_THE_END, 0, CPU, path)
    return model, curve, load(path, CPU)


def assert_equal(checkpoint: Path, curve: list[dict], uninterrupted: tuple[Model, list[dict], dict]) -> None:
    """Curve, weights and optimiser state are equal bit for bit."""
    _, expected_curve, expected = uninterrupted
    assert without_seconds(curve) == without_seconds(expected_curve)
    saved = load(checkpoint, CPU)
    torch.testing.assert_close(saved["model"], expected["model"], rtol=0, atol=0)
    torch.testing.assert_close(saved["optimizer"], expected["optimizer"], rtol=0, atol=0)
    assert saved["schedule"] == expected["schedule"]


@pytest.mark.parametrize("step", [0, 1, 9, 10, 13, 29])
def test_stopped_at_any_step_and_resumed_equals_uninterrupted(step, tmp_path, uninterrupted):
    """Validations are at steps 10, 20 and 30; a checkpoint also holds the losses since the last one."""
    calls = itertools.count()
    path = tmp_path / "checkpoint.pt"
    with pytest.raises(Interrupted, match=f"after step {step} of 30"):
        train(small_model(), TASK, UNTIL_THE_END, 0, CPU, path, stop=lambda: next(calls) == step)
    assert load(path, CPU)["step"] == step
    curve = train(small_model(seed=5), TASK, UNTIL_THE_END, 0, CPU, path)
    assert [point["step"] for point in curve] == [10, 20, 30]
    assert_equal(path, curve, uninterrupted)


def test_stopped_every_seven_steps_equals_uninterrupted(tmp_path, uninterrupted):
    path, curve, seconds = tmp_path / "checkpoint.pt", None, []
    while curve is None:
        calls = itertools.count()
        try:
            curve = train(small_model(), TASK, UNTIL_THE_END, 0, CPU, path, stop=lambda: next(calls) == 7)  # noqa: B023
        except Interrupted:
            seconds.append(load(path, CPU)["seconds"])
    assert len(seconds) == 4
    assert seconds[0] > 0
    assert all(before < after for before, after in itertools.pairwise(seconds))
    assert curve[-1]["seconds"] > seconds[-1]
    assert_equal(path, curve, uninterrupted)


def test_a_crash_resumes_from_the_last_validation(tmp_path, uninterrupted):
    class Crash(Exception):
        pass

    def crash(point):
        if point["step"] == 20:
            raise Crash

    path = tmp_path / "checkpoint.pt"
    with pytest.raises(Crash):  # step 20 is reported before its checkpoint is written
        train(small_model(), TASK, UNTIL_THE_END, 0, CPU, path, crash)
    assert load(path, CPU)["step"] == 10
    assert_equal(path, train(small_model(seed=5), TASK, UNTIL_THE_END, 0, CPU, path), uninterrupted)


def test_a_stop_without_a_checkpoint_path_raises_interrupted():
    with pytest.raises(Interrupted):
        train(small_model(), TASK, UNTIL_THE_END, 0, CPU, stop=lambda: True)


def test_a_stop_never_saves_a_loss_that_is_not_finite(tmp_path):
    model = small_model()
    with torch.no_grad():
        model.read_out.bias[0] = torch.nan
    calls = itertools.count()
    with pytest.raises(NotFinite, match="step 0 is nan"):
        train(model, TASK, UNTIL_THE_END, 0, CPU, tmp_path / "checkpoint.pt", stop=lambda: next(calls) == 1)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_one_file_of_plain_values_and_tensors(tmp_path):
    train(small_model(), TASK, UNTIL_THE_END, 0, CPU, tmp_path / "checkpoint.pt")
    assert set(torch.load(tmp_path / "checkpoint.pt", weights_only=True)) >= {
        "model",
        "optimizer",
        "schedule",
        "step",
        "curve",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_checkpoint_that_is_damaged_or_of_another_format_is_refused(tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"PK\x03\x04 not a checkpoint")
    with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged"):
        train(small_model(), TASK, UNTIL_THE_END, 0, CPU, path)
    torch.save({"model": small_model().state_dict()}, path)
    whole = path.read_bytes()
    for size in (0, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged"):
            load(path, CPU)
    torch.save({"model": {}, "optimizer": {}, "curve": []}, path)
    with pytest.raises(ValueError, match=r"checkpoint\.pt: another version wrote it"):
        train(small_model(), TASK, UNTIL_THE_END, 0, CPU, path)
    path.unlink()
    train(small_model("linear"), TASK, UNTIL_THE_END, 0, CPU, path)
    with pytest.raises(ValueError, match=r"checkpoint\.pt: another version wrote it"):
        train(small_model("gated_linear"), TASK, UNTIL_THE_END, 0, CPU, path)


def test_a_checkpoint_that_holds_objects_is_refused(tmp_path):
    """Loading an untrusted checkpoint never runs code."""
    torch.save({"model": Path("x")}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged"):
        load(tmp_path / "checkpoint.pt", CPU)
