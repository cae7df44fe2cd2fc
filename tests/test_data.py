"""The cells of a task's grid, the streams of random numbers, and the batches that training draws from them."""

import threading
from typing import ClassVar

import numpy as np
import pytest
from conftest import CPU, small_model, small_training

from recall_lab.data import ahead, arrays, stream, training_cells
from recall_lab.data import test_cells as cells_tested
from recall_lab.task.mqar import MQAR
from recall_lab.train import train


class Recorder(MQAR):
    """A task that keeps the bytes of every batch it has drawn."""

    kept: ClassVar[list[bytes]] = []

    def sample(self, sequences, rng):
        batch = super().sample(sequences, rng)
        self.kept.append(batch.tokens.tobytes() + batch.targets.tobytes())
        return batch


def recorded(mixer: str, seed: int, data_seed: int) -> list[bytes]:
    Recorder.kept.clear()
    train(small_model(mixer, seed), Recorder(vocab=32, length=16, pairs=4), small_training(), data_seed, CPU)
    return list(Recorder.kept)


def test_the_same_data_for_every_mixer_and_model_seed():
    seen = recorded("softmax", 0, data_seed=0)
    assert len(seen) > 30
    assert recorded("delta_rule", 1, data_seed=0) == seen
    assert not set(recorded("softmax", 0, data_seed=1)) & set(seen)


def test_streams_are_independent():
    """No sequence occurs in two splits if the space of sequences is large."""
    task = MQAR(vocab=8192, length=64, pairs=16)
    drawn = {}
    for split in ("train", "validation", "test"):
        for number in range(4):
            for row in task.sample(256, stream(0, split, {"length": 64}, number)).tokens:
                drawn.setdefault(row.tobytes(), set()).add((split, number))
    assert all(len(origins) == 1 for origins in drawn.values())
    assert len(drawn) == 3 * 4 * 256


def test_a_stream_is_a_function_of_its_arguments():
    def first(*arguments):
        return stream(*arguments).integers(2**62)

    base = first(0, "train", {"length": 8, "pairs": 2}, 3)
    assert base == first(0, "train", {"pairs": 2, "length": 8}, 3)
    assert first(0, "train", {}) == first(0, "train", {}, 0)
    others = [
        first(1, "train", {"length": 8, "pairs": 2}, 3),
        first(0, "test", {"length": 8, "pairs": 2}, 3),
        first(0, "train", {"length": 8, "pairs": 1}, 3),
        first(0, "train", {"length": 8, "pairs": 2}, 4),
    ]
    assert len({base, *others}) == 5


def test_derived_cells():
    assert training_cells(MQAR(), None) == [
        {"length": 8, "pairs": 1},
        {"length": 16, "pairs": 2},
        {"length": 32, "pairs": 4},
        {"length": 64, "pairs": 8},
    ]
    trained = [{"length": 64, "pairs": 8}]
    assert cells_tested(MQAR(), None, trained) == [*trained, {"length": 128, "pairs": 16}, {"length": 256, "pairs": 32}]


def test_derived_cells_that_are_impossible_are_left_out_and_named(caplog):
    """Two and four times the pairs would need more keys than the vocabulary has."""
    assert cells_tested(MQAR(vocab=16, pairs=7), None, [{}]) == [{}]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0].startswith("a cell of the derived grid is left out: length=128, pairs=14: pairs=14")
    assert messages[1].startswith("a cell of the derived grid is left out: length=256, pairs=28: pairs=28")


def test_a_grid_of_values_means_every_combination():
    assert training_cells(MQAR(), {"length": [32, 64], "pairs": [1, 2]}) == [
        {"length": 32, "pairs": 1},
        {"length": 32, "pairs": 2},
        {"length": 64, "pairs": 1},
        {"length": 64, "pairs": 2},
    ]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([{"pears": 2}], "cells: {'pears': 2}: .*has no parameter 'pears'"),
        ([{"pairs": 2}, {"pairs": 2}], "cells: {'pairs': 2}: .* occur once"),
        ([], "cells=.*: must hold at least one cell"),
        ({"pairs": []}, r"cells.pairs=\[\]: must be a list of values"),
    ],
)
def test_impossible_cells_are_refused(cells, message):
    with pytest.raises(ValueError, match=message):
        training_cells(MQAR(), cells)


def test_batches_prepared_ahead_are_the_same_in_the_same_order():
    seen = []

    def draw(step):
        seen.append(step)
        return step**2

    assert list(ahead(draw, range(3, 9), 2)) == list(ahead(draw, range(3, 9), 0)) == [9, 16, 25, 36, 49, 64]
    assert list(ahead(draw, range(1), 2)) == [0]
    seen.clear()
    before = threading.active_count()
    batches = ahead(draw, range(100), 2)
    assert [next(batches), next(batches)] == [0, 1]
    batches.close()
    assert seen == [0, 1, 2, 3][: len(seen)]  # at most two more than were used
    assert threading.active_count() == before


def test_an_error_in_the_background_is_raised_where_the_batch_is_used():
    batches = ahead(lambda step: 1 // (2 - step), range(5), 2)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(batches)


def test_training_is_the_same_with_batches_prepared_ahead(monkeypatch):
    curves = []
    for depth in (0, 2):
        monkeypatch.setattr("recall_lab.train.ahead", lambda draw, steps, _, depth=depth: ahead(draw, steps, depth))
        curve = train(small_model(), MQAR(vocab=32, length=16, pairs=4), small_training(), 0, CPU)
        curves.append([{name: x for name, x in point.items() if name != "seconds"} for point in curve])
    assert curves[0] == curves[1]


def test_scored_positions_are_indices_in_the_order_of_the_targets():
    batch = MQAR(vocab=32, length=16, pairs=4).sample(3, np.random.default_rng(0))
    tokens, scored, targets = arrays(batch)
    assert tokens.shape == (3, 16)
    assert batch.targets.ravel()[scored.numpy()].tolist() == targets.tolist() == batch.targets[batch.scored].tolist()
