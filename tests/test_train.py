"""Training and evaluation: streams, scoring, the schedule, stopping, and going on after an interruption."""

from typing import ClassVar

import hydra
import numpy as np
import pytest
import torch
from conftest import config
from torch import nn

from recall_lab.model import Model
from recall_lab.task.base import IGNORE
from recall_lab.task.mqar import MQAR
from recall_lab.train import NotFinite, Training, evaluate, stream, train, training_cells
from recall_lab.train import test_cells as grid

CPU = torch.device("cpu")
TASK = MQAR(vocab=32, length=16, pairs=4)


def setting(**changed) -> Training:
    plain = hydra.utils.instantiate(config().train, _convert_="all")
    fields = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
    small = {"steps": 30, "tokens": 512, "validate_every": 10, "validation_sequences": 16}
    return Training(**{**fields, **small, **changed})


def model(mixer: str = "softmax", seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(TASK.vocab, hydra.utils.instantiate(config(f"mixer={mixer}").mixer), d_model=16, layers=1)


class Recorder(MQAR):
    """A task that keeps the bytes of every batch it has given."""

    kept: ClassVar[list[bytes]] = []

    def sample(self, sequences, rng):
        batch = super().sample(sequences, rng)
        self.kept.append(batch.tokens.tobytes() + batch.targets.tobytes())
        return batch


def recorded(net: Model, data_seed: int) -> list[bytes]:
    Recorder.kept.clear()
    train(net, Recorder(vocab=32, length=16, pairs=4), setting(), data_seed, CPU)
    return list(Recorder.kept)


def test_the_same_data_for_every_mixer_and_model_seed():
    seen = recorded(model("softmax", 0), 0)
    assert len(seen) > 30
    assert recorded(model("delta_rule", 1), 0) == seen
    assert not set(recorded(model("softmax", 0), 1)) & set(seen)


def test_streams_are_independent():
    """No sequence in two splits, where the space of sequences is large."""
    task = MQAR(vocab=8192, length=64, pairs=16)
    drawn = {}
    for split in ("train", "validation", "test"):
        for number in range(4):
            for row in task.sample(256, stream(0, split, {"length": 64}, number)).tokens:
                drawn.setdefault(row.tobytes(), set()).add((split, number))
    assert all(len(places) == 1 for places in drawn.values())
    assert len(drawn) == 3 * 4 * 256


def test_a_stream_is_a_function_of_its_names():
    def first(*names):
        return stream(*names).integers(2**62)

    base = first(0, "train", {"length": 8, "pairs": 2}, 3)
    assert base == first(0, "train", {"pairs": 2, "length": 8}, 3)
    others = [
        first(1, "train", {"length": 8, "pairs": 2}, 3),
        first(0, "test", {"length": 8, "pairs": 2}, 3),
        first(0, "train", {"length": 8, "pairs": 1}, 3),
        first(0, "train", {"length": 8, "pairs": 2}, 4),
    ]
    assert len({base, *others}) == 5


class Solver(nn.Module):
    """Answers by the task's own definition, through the path that scores models."""

    def __init__(self, task, shift=0):
        super().__init__()
        self.task, self.shift = task, shift

    def forward(self, tokens, scored):
        answer = np.roll(self.task.solve(tokens.numpy()), self.shift, axis=1)[scored.numpy()]
        answer = np.where(answer == IGNORE, 0, answer)
        return 20 * torch.nn.functional.one_hot(torch.from_numpy(answer).long(), self.task.vocab).float()


def test_the_solution_scores_one_where_models_are_scored():
    scores = evaluate(Solver(TASK), TASK, {}, 0, "test", 50, CPU)
    assert scores["accuracy"] == scores["sequence_accuracy"] == 1
    assert scores["loss_bits"] < 1e-5
    assert (scores["tokens"], scores["sequences"]) == (200, 50)
    assert evaluate(Solver(TASK, 1), TASK, {}, 0, "test", 50, CPU)["accuracy"] < 0.05


def test_scores_against_counting_by_hand(monkeypatch):
    """Accuracy per token and per sequence and the loss, over several batches, from the full logits."""
    monkeypatch.setattr("recall_lab.train.EVALUATION_TOKENS", 4 * 32)
    net, cell = model(), {"length": 32, "pairs": 4}
    scores = evaluate(net, TASK, cell, 0, "test", 9, CPU)
    right, whole, bits = [], [], []
    for number, count in enumerate((4, 4, 1)):
        batch = TASK.at(**cell).sample(count, stream(0, "test", cell, number))
        logits = net(torch.from_numpy(batch.tokens)).detach().double().log_softmax(-1).numpy()
        for row, targets in zip(logits, batch.targets, strict=True):
            hits = [row[t].argmax() == y for t, y in enumerate(targets) if y != IGNORE]
            bits += [-row[t, y] / np.log(2) for t, y in enumerate(targets) if y != IGNORE]
            right += hits
            whole.append(all(hits))
    assert scores["accuracy"] == pytest.approx(np.mean(right))
    assert scores["sequence_accuracy"] == pytest.approx(np.mean(whole))
    assert scores["loss_bits"] == pytest.approx(np.mean(bits), rel=1e-5)


def test_r2_of_a_continuous_task():
    task = hydra.utils.instantiate(config("task=subset_average").task)

    class Mean(nn.Module):
        def forward(self, tokens, scored):
            return torch.from_numpy(task.solve(tokens.numpy())[scored.numpy()]) * 0.5

    batch = task.sample(32, stream(0, "test", {}, 0))
    targets = batch.targets[batch.scored].astype(float)
    expected = (0.25 * targets**2).sum() / ((targets - targets.mean(0)) ** 2).sum()
    scores = evaluate(Mean(), task, {}, 0, "test", 32, CPU)
    assert scores["error"] == pytest.approx(expected, rel=1e-4)
    assert scores["r2"] == pytest.approx(1 - expected, rel=1e-4)
    assert "accuracy" not in scores


def test_cells():
    assert training_cells(MQAR(), None)[0] == {"length": 8, "pairs": 1}
    assert training_cells(MQAR(), None)[-1] == {"length": 64, "pairs": 8}
    assert grid(MQAR(), None, [{"length": 64, "pairs": 8}])[-1] == {"length": 256, "pairs": 32}
    assert grid(MQAR(), None, [{"length": 128, "pairs": 16}])[1:] == [{"length": 256, "pairs": 32}], "each cell once"
    with pytest.raises(ValueError, match="has no parameter 'pears'"):
        training_cells(MQAR(), [{"pears": 2}])


def test_impossible_cells_of_a_derived_grid_are_logged_with_the_reason(caplog):
    task = MQAR(vocab=16, pairs=7)
    assert grid(task, None, [{}]) == [{}]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "length=128, pairs=14: pairs=14 and distractors=0 but vocab=16 " in caplog.messages[0]


def test_schedule():
    training = setting(steps=100, warmup=0.1)
    rates = [training.rate(step) for step in range(100)]
    assert np.all(np.diff(rates[:10]) > 0)
    assert np.all(np.diff(rates[11:]) < 0)
    assert max(rates) == pytest.approx(0.01)
    assert rates[-1] < 1e-5


def test_training_learns_and_stops_when_solved():
    net = model()
    easy = MQAR(vocab=8, length=8, pairs=1)
    curve = train(net, easy, setting(steps=2000, validate_every=25, solved=0.99), 0, CPU)
    assert curve[-1]["worst_accuracy"] >= 0.99
    assert curve[-1]["step"] < 2000
    assert all(point["worst_accuracy"] < 0.99 for point in curve[:-1])


def test_goes_on_after_an_interruption_as_if_there_had_been_none(tmp_path):
    whole = model()
    curve = train(whole, TASK, setting(solved=None), 0, CPU)

    class Stop(Exception):
        pass

    def stop(point):
        if point["step"] == 20:
            raise Stop

    cut = model()
    with pytest.raises(Stop):  # the report of step 20 comes before its checkpoint: step 10 is what is left
        train(cut, TASK, setting(solved=None), 0, CPU, tmp_path / "c.pt", stop)
    resumed = model(seed=5)
    again = train(resumed, TASK, setting(solved=None), 0, CPU, tmp_path / "c.pt")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert [point["step"] for point in again] == [10, 20, 30]
    assert [p["train_loss"] for p in again] == [p["train_loss"] for p in curve]


def test_a_loss_that_is_not_finite_stops_training():
    net = model()
    with torch.no_grad():
        net.read_out.bias[0] = torch.nan
    with pytest.raises(NotFinite, match="step 0 is nan"):
        train(net, TASK, setting(), 0, CPU)


def test_checkpoints_hold_weights_only(tmp_path):
    train(model(), TASK, setting(), 0, CPU, tmp_path / "c.pt")
    saved = torch.load(tmp_path / "c.pt", weights_only=True)
    assert set(saved) == {"model", "optimizer", "curve"}
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "train.steps=0: a whole number of at least 1"),
        ({"lr": -1.0}, "train.lr=-1.0: a number above 0"),
        ({"warmup": 2.0}, "train.warmup=2.0: a share"),
    ],
)
def test_impossible_settings(changed, message):
    with pytest.raises(ValueError, match=message):
        setting(**changed)


def test_bf16_and_compile_are_options():
    curve = train(model(), TASK, setting(steps=10, bf16=True), 0, CPU)
    assert np.isfinite(curve[-1]["train_loss"])
    assert curve[-1]["train_loss"] != train(model(), TASK, setting(steps=10), 0, CPU)[-1]["train_loss"]
