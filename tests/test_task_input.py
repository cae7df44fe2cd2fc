"""Input checks of tasks: every field is checked, messages name value and limit, and impossible cells are named."""

from dataclasses import fields
from types import NoneType
from typing import get_args

import jaxtyping
import numpy as np
import pytest
from conftest import config
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from task_helpers import TASKS, build, check, rng

from recall_lab.task.base import IGNORE, Batch, Task
from recall_lab.task.induction import Induction
from recall_lab.task.mqar import MQAR
from recall_lab.task.state_tracking import StateTracking
from recall_lab.task.subset_average import SubsetAverage
from recall_lab.task.updates import Updates

FIELDS = [(name, f.name, set(get_args(f.type) or [f.type])) for name in TASKS for f in fields(build(name))]


@pytest.mark.parametrize(("name", "field", "types"), FIELDS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_value_of_the_wrong_type_is_refused(name, field, types, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the task must refuse, not a type check
    if str in types:
        wrong, message = [1, None, True, "?"], "must be one of "
    elif float in types:
        wrong, message = [True, "x", "0.5", float("nan"), float("inf"), -0.1, 1.1], "must be a number from 0 to 1"
    else:
        wrong = [2.5, 64.0, True, False, "x", "8", float("nan"), float("inf"), -1, np.float64(8)]
        message = "must be a whole number of at least "
    for value in [*wrong, *([] if NoneType in types else [None]), [8]]:
        with pytest.raises(ValueError, match=message) as refusal:
            build(name).at(**{field: value})
        assert str(refusal.value).startswith(f"{field}={value!r}: {message}")


@pytest.mark.parametrize("name", TASKS)
def test_any_change_of_a_parameter_is_valid_or_refused(name):
    """A change of a parameter is refused in one line that names it, or the task has all its properties."""
    default = build(name)
    options = [option(default, f.name) for f in fields(default)]

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(
        st.lists(st.sampled_from([pair for pairs in options for pair in pairs]), min_size=1, max_size=6),
        st.integers(0, 9),
    )
    def holds(changes, seed):
        task = default
        for field, value in changes:
            try:
                task = task.at(**{field: value})
            except ValueError as refusal:
                message = str(refusal)
                assert "\n" not in message
                assert f"{field}={value!r}" in message or f"not {value}" in message, message
        check(task, 4, seed)

    holds()


def option(task: Task, field: str) -> list[tuple[str, object]]:
    """Values to try in a field: smaller, larger, extreme and impossible ones."""
    value = getattr(task, field)
    if isinstance(value, str):
        with pytest.raises(ValueError, match="one of ") as refusal:
            task.at(**{field: "?"})
        values = str(refusal.value).split("one of ")[1].split(", ")
    elif isinstance(value, int):
        values = [-1, 0, 1, 2, 3, value - 1, value + 1, value // 2, 2 * value, 5 * value]
    elif isinstance(value, float):
        values = [-1.0, 0.0, 0.5, 1.0]
    else:
        values = [None, 0, 1, 2, 5, 100] if field != "depth" else [None, -0.1, 0.0, 0.3, 1.0, 1.1]
    return [(field, value) for value in values]


@pytest.mark.parametrize("name", TASKS)
def test_every_key_has_an_effect(name):
    """At the defaults, or together with another change: several queries, for example, need several needles."""
    default = build(name)
    changes = [change for f in fields(default) for change in option(default, f.name)]

    def drawn(*changes):
        try:
            batch = default.at(**dict(changes)).sample(32, rng())
        except ValueError:
            return None
        return batch.tokens.tobytes(), batch.targets.tobytes()

    for f in fields(default):
        own = [change for change in changes if change[0] == f.name]
        others = [(), *((change,) for change in changes if change[0] != f.name)]
        pairs = ((drawn(*other), drawn(*other, change)) for other in others for change in own)
        assert any(before and after and before != after for before, after in pairs), f.name


@pytest.mark.parametrize(
    ("name", "cell", "message"),
    [
        ("mqar", {"pairs": 17}, r"pairs=17.* length of at least 68 .*not 64"),
        ("mqar", {"vocab": 16}, r"pairs=8 .*vocab=16, .* only 7 keys and 8 values"),
        ("mqar", {"vocab": 17}, r"^vocab=17: must be even$"),
        ("mqar", {"queries": 9}, r"^queries=9 but pairs=8: must be at most pairs$"),
        ("mqar", {"distractors": 17}, r"distractors=17 need a length of at least 66 .*not 64"),
        (
            "mqar",
            {"key_parts": 3, "key_alphabet": 64},
            r"key_parts=3 and key_alphabet=64 need 192 ids for keys, but there are only 127",
        ),
        ("mqar", {"key_parts": 2, "key_alphabet": 2}, r"pairs=8 .*key_alphabet=2 give only 4 keys"),
        ("mqar", {"gap_exponent": -1.0}, r"^gap_exponent=-1.0: must be a number from 0 to 1$"),
        ("mqar", {"gap_exponent": 12}, r"^gap_exponent=12: must be a number from 0 to 1$"),  # weights underflow
        ("paired_recall", {"pairs": 64}, r"pairs=64.*length of at least 65, not 64"),
        ("paired_recall", {"queries": 33}, r"queries=33.*length of at least 65, not 64"),
        ("needle", {"length": 4}, r"length of at least 5, not 4"),
        ("needle", {"keys": 124, "length": 512}, r"keys=124 .* only 123"),
        ("needle", {"keys": 2, "queries": 2, "depth": 0.5}, r"^depth=0.5 but queries=2 and values=1: must be null"),
        ("needle", {"depth": 1.5}, r"^depth=1.5: must be a number from 0 to 1$"),
        ("needle", {"haystack": "hay"}, r"^haystack='hay': must be one of repeat, noise, needles$"),
        ("needle", {"haystack": "needles", "vocab": 11}, r"need 2 values, but vocab=11 .* only 1"),
        ("selective_copying", {"data": 33}, r"data=33 need a length of at least 66 .*not 64"),
        ("updates", {"pairs": 13}, r"pairs=13 and updates=8 need a length of at least 68, not 64"),
        ("updates", {"updates": 121, "length": 512}, r"need 129 values, but vocab=256 has only 128"),
        ("noisy_recall", {"pairs": 22}, r"pairs=22 need a length of at least 66, not 64"),
        ("induction", {"length": 2}, r"^length=2: must be a whole number of at least 3$"),
        ("copying", {"length": 63}, r"^length=63: must be even"),
        ("joint_recall", {"pairs": 11}, r"contexts=3 and pairs=11 need a length of at least 135, not 128"),
        ("joint_recall", {"contexts": 300, "length": 4096}, r"need 2400 values, but vocab=256 has only 0"),
        ("joint_recall", {"pairs": 43, "length": 1024}, r"need 129 values, but vocab=256 has only 126"),
        ("state_tracking", {"group": "a5"}, r"^group='a5': must be one of parity, s3, s4, s5$"),
        ("subset_average", {"points": 65, "length": 128}, r"points=65 but pool=64"),
        ("subset_average", {"subset": 33}, r"subset=33 but points=32"),
        ("mqar", {"gap": 1}, r"MQAR has no parameter 'gap'; it has length, vocab, pairs"),
    ],
)
def test_invalid_parameters_are_refused(name, cell, message):
    with pytest.raises(ValueError, match=message) as refusal:
        build(name).at(**cell)
    assert "\n" not in str(refusal.value)


def test_nothing_to_score_is_refused():
    with pytest.raises(ValueError, match="nothing to score in 2 sequences of 3 positions"):
        Batch(np.zeros((2, 3), dtype=np.int32), np.full((2, 3), IGNORE, dtype=np.int32))
    with pytest.raises(ValueError, match="nothing to score in 2 sequences of 3 positions"):
        Batch(np.zeros((2, 3, 4), dtype=np.float32), np.full((2, 3, 5), IGNORE, dtype=np.float32))
    with pytest.raises(ValueError, match="nothing to score in 0 sequences"):
        MQAR().sample(0, rng())


@pytest.mark.parametrize("name", TASKS)
def test_scaled_cells(name):
    task = build(name)
    mixture, beyond = task.scaled((1 / 8, 1 / 4, 1 / 2, 1)), task.scaled((2, 4))
    assert len(mixture.cells) == 4
    assert mixture.impossible == []
    assert task.at(**mixture.cells[-1]) == task
    assert set(mixture.cells[0]) == set(task.scales)
    assert beyond.cells
    assert len(beyond.cells) + len(beyond.impossible) == 2
    for cell in mixture.cells + beyond.cells:
        check(task.at(**cell), 4)


def test_scaled_leaves_zero_at_zero():
    assert [cell["updates"] for cell in Updates(updates=0).scaled((0.5, 2)).cells] == [0, 0]


def test_scaled_holds_each_cell_once():
    """Small sizes round down to the same cell."""
    assert StateTracking(length=4).scaled((1 / 8, 1 / 4, 1 / 2, 1)).cells == [{"length": n} for n in (1, 2, 4)]
    assert Induction(length=4).scaled((1 / 8, 1 / 4)).impossible == [
        "length=1: length=1: must be a whole number of at least 3"
    ]


def test_scaled_gives_the_reason_for_what_is_impossible():
    scaled = MQAR(vocab=32).scaled((1, 2, 4))
    assert [cell["pairs"] for cell in scaled.cells] == [8]
    assert len(scaled.impossible) == 2
    assert scaled.impossible[0].startswith("length=128, pairs=16: pairs=16 and distractors=0 but vocab=32, ")
    assert SubsetAverage().scaled((2, 4)).impossible == [
        "length=256, points=128: points=128 but pool=64: must be at most pool"
    ]


def test_a_task_outside_the_package(tmp_path, monkeypatch):
    """A user's own task, in a file and with a yaml outside the package, works like any other."""
    (tmp_path / "my_task.py").write_text(OUTSIDE)
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "my_task.yaml").write_text("_target_: my_task.First\nlength: 6\n")
    monkeypatch.syspath_prepend(tmp_path)
    task = instantiate(config(f"hydra.searchpath=[file://{tmp_path}/conf]", "task=my_task").task)
    assert task.scaled((1, 2)).cells == [{"length": 6}, {"length": 12}]
    check(task)
    for value in (2.5, None, True, "6"):
        with pytest.raises(ValueError, match=f"^length={value!r}: must be a whole number of at least 2$"):
            task.at(length=value)


OUTSIDE = '''
from dataclasses import dataclass

import numpy as np

from recall_lab.checks import whole_number
from recall_lab.task.base import Batch, Task, unscored


@dataclass(frozen=True, kw_only=True)
class First(Task):
    """Random digits: at the end, what was the first? Factor: `source`, its position."""

    length: int = 8
    vocab = 10
    chance = 0.1

    def __post_init__(self):
        whole_number("length", self.length, 2)

    def sample(self, sequences, rng):
        tokens = rng.integers(10, size=(sequences, self.length), dtype=np.int32)
        source = unscored(sequences, self.length)
        source[:, -1] = 0
        return Batch(tokens, self.solve(tokens), {"source": source})

    def solve(self, tokens):
        targets = unscored(*tokens.shape)
        targets[:, -1] = tokens[:, 0]
        return targets

    def roles(self, tokens):
        roles = np.full(tokens.shape, "filler")
        roles[:, -1] = "query"
        return roles
'''
