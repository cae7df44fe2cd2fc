"""Every task of conf/task: its sampler agrees with its definition, and draws what its docstring says."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import random
import subprocess
import sys
from dataclasses import fields
from functools import cache
from itertools import combinations, permutations, product

import numpy as np
import pytest
import yaml
from conftest import CONF, config, names
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare

import recall_lab.task
from recall_lab.task.base import IGNORE, Batch, Task, distinct, earliest, others, spell
from recall_lab.task.induction import Induction
from recall_lab.task.joint_recall import JointRecall
from recall_lab.task.mqar import MQAR
from recall_lab.task.needle import HAYSTACKS, Needle
from recall_lab.task.noisy_recall import NoisyRecall
from recall_lab.task.paired_recall import PairedRecall
from recall_lab.task.selective_copying import SelectiveCopying
from recall_lab.task.state_tracking import GROUPS, StateTracking
from recall_lab.task.subset_average import SubsetAverage
from recall_lab.task.updates import Updates

TASKS = names("task")
MODULES = [module.name for module in pkgutil.iter_modules(recall_lab.task.__path__)]
UNLIKELY = 1e-4
"""A chi-square test below this fails; seeds are fixed, so it does so always or never."""


@cache
def build(name: str) -> Task:
    return instantiate(config(f"task={name}").task)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def global_state() -> tuple[str, str]:
    return repr(np.random.get_state()), repr(random.getstate())  # noqa: NPY002


def uniform(counts: np.ndarray) -> bool:
    return chisquare(counts).pvalue > UNLIKELY


def spread(values: np.ndarray, classes: int) -> bool:
    """Whether values of range(classes) are uniform."""
    return uniform(tally(values.reshape(-1, 1), [(value,) for value in range(classes)]))


def tally(rows: np.ndarray, patterns: list[tuple[int, ...]]) -> np.ndarray:
    """How often each pattern stands in the rows; none may be of another kind."""
    found, counts = np.unique(rows, axis=0, return_counts=True)
    count = dict(zip(map(tuple, found.tolist()), counts.tolist(), strict=True))
    assert set(count) <= set(patterns)
    return np.array([count.get(pattern, 0) for pattern in patterns])


def check(task: Task, sequences: int = 8, seed: int = 0) -> Batch:
    """What must hold of any task at any size."""
    batch = task.sample(sequences, rng(seed))
    tokens, targets, scored = batch.tokens, batch.targets, batch.scored
    assert tokens.shape[:2] == targets.shape[:2] == (sequences, task.length)
    assert scored.any(axis=1).all()
    solution = task.solve(tokens)
    roles = task.roles(tokens)
    if task.continuous:
        assert tokens.dtype == targets.dtype == np.float32
        assert tokens.shape[2:] == (task.width,)
        assert targets.shape[2:] == (task.vocab,)
        assert (targets[~scored] == IGNORE).all()
        np.testing.assert_allclose(solution, targets, atol=1e-6)
        assert roles.shape == tokens.shape[:2]
    else:
        assert tokens.dtype == targets.dtype == np.int32
        assert tokens.min() >= 0
        assert tokens.max() < task.vocab
        assert targets[scored].min() >= 0
        assert targets[scored].max() < task.vocab
        np.testing.assert_array_equal(solution, targets)
        assert roles.shape == tokens.shape
    asks = roles == "query"
    np.testing.assert_array_equal(asks if asks.ndim == 2 else asks.any(axis=2), scored)
    for name, factor in batch.factors.items():
        assert (factor[~scored] == IGNORE).all()
        assert f"`{name}`" in type(task).__doc__
    if "source" in batch.factors:
        row, place = scored.nonzero()
        source = batch.factors["source"][scored]
        held = tokens[row, source].reshape(source.size, -1)
        assert (held == targets[scored][:, None]).any(axis=1).all()
        assert (batch.age[scored] == place - source).all()
        assert (batch.age[scored] > 0).all()
        assert (batch.age[~scored] == IGNORE).all()
    return batch


# Every task, at every size.


@pytest.mark.parametrize("name", TASKS)
def test_default(name):
    task = build(name)
    check(task, 64)
    assert task == type(task)(), "the yaml's values are the class's defaults"
    if not task.continuous:
        batch = task.sample(4000, rng())
        classes, counts = np.unique(batch.targets[batch.scored], return_counts=True)
        assert classes.size == round(1 / task.chance)
        assert uniform(counts)


@pytest.mark.parametrize("name", TASKS)
def test_any_parameters(name):
    """Each parameter is moved in turn; a change is refused in one line that names it, or the task holds."""
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
    """Values to try in a field: smaller, larger, on the edge and impossible ones."""
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
    """At the defaults, or next to another change (only several needles can be asked several times)."""
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


@pytest.mark.parametrize("name", TASKS)
def test_seeded(name):
    task, before = build(name), global_state()
    first, again, other = (task.sample(32, rng(seed)) for seed in (1, 1, 2))
    for one, two in [(first.tokens, again.tokens), (first.targets, again.targets)]:
        assert one.tobytes() == two.tobytes()
    assert first.factors.keys() == again.factors.keys()
    assert all(first.factors[key].tobytes() == again.factors[key].tobytes() for key in first.factors)
    assert first.tokens.tobytes() != other.tokens.tobytes()
    assert global_state() == before, "a global generator was used"


@pytest.mark.parametrize("name", TASKS)
def test_streams_share_no_sequence(name):
    streams = [np.random.default_rng(seed) for seed in np.random.SeedSequence(0).spawn(2)]
    train, test = ({row.tobytes() for row in build(name).sample(1000, stream).tokens} for stream in streams)
    assert len(train) == len(test) == 1000
    assert not train & test


@pytest.mark.parametrize("name", TASKS)
def test_shifted_labels_score_near_chance(name):
    batch, task = build(name).sample(256, rng()), build(name)
    scored = batch.scored & np.roll(batch.scored, 1, axis=1)
    truth, shifted = batch.targets[scored], np.roll(batch.targets, 1, axis=1)[scored]
    if task.continuous:
        assert ((truth - shifted) ** 2).sum() / ((truth - truth.mean(axis=0)) ** 2).sum() > task.chance
    elif scored.any():
        spread = (task.chance * (1 - task.chance) / scored.sum()) ** 0.5
        assert (truth == shifted).mean() < task.chance + 4 * spread


@pytest.mark.parametrize("name", TASKS)
def test_smallest_vocabulary_is_unambiguous(name):
    task = build(name)
    if "vocab" not in [f.name for f in fields(task)]:
        pytest.skip("no vocabulary to choose")
    for vocab in range(1, task.vocab + 1):
        try:
            smallest = task.at(vocab=vocab)
            break
        except ValueError:
            continue
    assert smallest.vocab < task.vocab
    check(smallest, 1000)


@pytest.mark.parametrize("name", TASKS)
def test_scaled_cells(name):
    task = build(name)
    mixture = list(task.scaled((1 / 8, 1 / 4, 1 / 2, 1)))
    assert len(mixture) == 4
    assert task.at(**mixture[-1]) == task
    assert set(mixture[0]) == set(task.scales)
    beyond = list(task.scaled((2, 4)))
    assert beyond
    for cell in mixture + beyond:
        check(task.at(**cell), 4)


def test_scaled_keeps_nothing_at_nothing():
    assert [cell["updates"] for cell in Updates(updates=0).scaled((0.5, 2))] == [0, 0]


def test_scaled_leaves_out_what_is_impossible():
    assert [cell["pairs"] for cell in MQAR(vocab=32).scaled((1, 2, 4))] == [8]


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module):
    """Each task shows an example, and what it shows is so."""
    result = doctest.testmod(importlib.import_module(f"recall_lab.task.{module}"))
    assert result.failed == 0
    assert result.attempted > 0 or module == "base"


@pytest.mark.parametrize("name", TASKS)
def test_every_parameter_is_documented(name):
    body = ast.parse(inspect.getsource(type(build(name)))).body[0].body
    own = [i for i, node in enumerate(body) if isinstance(node, ast.AnnAssign) and node.target.id != "scales"]
    assert {body[i].target.id for i in own} == {f.name for f in fields(build(name))}
    for i in own:
        assert isinstance(body[i + 1], ast.Expr), body[i].target.id
        assert isinstance(body[i + 1].value.value, str)
    lines = (CONF / "task" / f"{name}.yaml").read_text().splitlines()
    assert all("  # " in line for line in lines[1:]), "a comment a key"
    assert set(yaml.safe_load("\n".join(lines))) == {"_target_", *(f.name for f in fields(build(name)))}


def test_tasks_need_no_torch():
    code = (
        ";".join(f"import recall_lab.task.{module}" for module in MODULES)
        + ";import sys;assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CONF.parent)


def test_task_from_outside(tmp_path, monkeypatch):
    """A task in a file of one's own, named by a yaml of one's own, is a task like any other."""
    (tmp_path / "my_task.py").write_text(OUTSIDE)
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "my_task.yaml").write_text("_target_: my_task.First\nlength: 6\n")
    monkeypatch.syspath_prepend(tmp_path)
    task = instantiate(config(f"hydra.searchpath=[file://{tmp_path}/conf]", "task=my_task").task)
    assert list(task.scaled((1, 2))) == [{"length": 6}, {"length": 12}]
    check(task)
    for value in (2.5, None, True, "6"):
        with pytest.raises(ValueError, match=f"^length={value!r}: a whole number of at least 2$"):
            task.at(length=value)


OUTSIDE = '''
from dataclasses import dataclass

import numpy as np

from recall_lab.task.base import Batch, Task, unscored, whole


@dataclass(frozen=True, kw_only=True)
class First(Task):
    """Random digits: at the end, what was the first? Factor: `source`, its place."""

    length: int = 8
    vocab = 10
    chance = 0.1

    def __post_init__(self):
        whole(self, length=2)

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


# What is refused.


def test_nothing_to_score_is_refused():
    with pytest.raises(ValueError, match="nothing to score in 2 sequences of 3 places"):
        Batch(np.zeros((2, 3), dtype=np.int32), np.full((2, 3), IGNORE, dtype=np.int32))
    with pytest.raises(ValueError, match="nothing to score in 2 sequences of 3 places"):
        Batch(np.zeros((2, 3, 4), dtype=np.float32), np.full((2, 3, 5), IGNORE, dtype=np.float32))
    with pytest.raises(ValueError, match="nothing to score in 0 sequences"):
        MQAR().sample(0, rng())


@pytest.mark.parametrize(
    ("name", "cell", "message"),
    [
        ("mqar", {"pairs": 17}, r"pairs=17.* length of at least 68 .*not 64"),
        ("mqar", {"vocab": 16}, r"pairs=8 .*vocab=16 .* only 7 keys and 8 values"),
        ("mqar", {"vocab": 17}, r"vocab=17: an even number"),
        ("mqar", {"queries": 9}, r"queries=9 but pairs=8"),
        ("mqar", {"distractors": 17}, r"distractors=17 need a length of at least 66 .*not 64"),
        (
            "mqar",
            {"key_parts": 3, "key_alphabet": 64},
            r"key_parts=3 of key_alphabet=64: only 127 ids for keys, at least 192",
        ),
        ("mqar", {"key_parts": 2, "key_alphabet": 2}, r"pairs=8 .*key_alphabet=2 has only 4 keys"),
        ("mqar", {"gap_exponent": -1.0}, r"gap_exponent=-1.0: at least 0"),
        ("paired_recall", {"pairs": 64}, r"pairs=64.*length of at least 65, not 64"),
        ("paired_recall", {"queries": 33}, r"queries=33.*length of at least 65, not 64"),
        ("needle", {"length": 4}, r"length of at least 5, not 4"),
        ("needle", {"keys": 124, "length": 512}, r"keys=124 .* only 123"),
        ("needle", {"keys": 2, "queries": 2, "depth": 0.5}, r"depth=0.5 places one needle, but queries=2"),
        ("needle", {"depth": 1.5}, r"depth=1.5: from 0 to 1"),
        ("needle", {"haystack": "hay"}, r"haystack='hay': one of repeat, noise, needles"),
        ("needle", {"haystack": "needles", "vocab": 11}, r"need 2 values, but vocab=11 .* only 1"),
        ("selective_copying", {"data": 33}, r"data=33 need a length of at least 66 .*not 64"),
        ("updates", {"pairs": 13}, r"pairs=13 and updates=8 need a length of at least 68, not 64"),
        ("updates", {"updates": 121, "length": 512}, r"need 129 values, but vocab=256 has only 128"),
        ("noisy_recall", {"pairs": 22}, r"pairs=22 need a length of at least 66, not 64"),
        ("induction", {"length": 2}, r"length=2: a whole number of at least 3"),
        ("copying", {"length": 63}, r"length=63: an even number"),
        ("joint_recall", {"pairs": 11}, r"contexts=3 of pairs=11 need a length of at least 135, not 128"),
        ("joint_recall", {"pairs": 43, "length": 1024}, r"need 129 values, but vocab=256 has only 126"),
        ("state_tracking", {"group": "a5"}, r"group='a5': one of parity, s3, s4, s5"),
        ("subset_average", {"points": 65, "length": 128}, r"points=65 but pool=64"),
        ("subset_average", {"subset": 33}, r"subset=33 but points=32"),
        ("mqar", {"pairs": True}, r"pairs=True: a whole number"),
        ("mqar", {"gap": 1}, r"MQAR has no parameter 'gap'; it has length, vocab, pairs"),
    ],
)
def test_refused(name, cell, message):
    with pytest.raises(ValueError, match=message) as refusal:
        build(name).at(**cell)
    assert "\n" not in str(refusal.value)


# The draws they share.


@pytest.mark.parametrize(("count", "pool"), [(2, 4), (3, 5), (1, 9), (2, 9)])
def test_distinct_is_uniform_over_ordered_choices(count, pool):
    drawn = distinct(rng(), 40_000, count, pool)
    assert uniform(tally(drawn, list(permutations(range(pool), count))))


def test_distinct_where_numbers_need_64_bits():
    drawn = distinct(rng(), 50, 3000, 2**30)
    assert all(np.unique(row).size == 3000 for row in drawn)
    assert abs(drawn.mean() / 2**29 - 1) < 0.01
    with pytest.raises(ValueError, match="5 different values asked of a pool of 4"):
        distinct(rng(), 1, 5, 4)


def test_others_is_uniform_over_what_is_left():
    taken = np.tile([6, 0, 3], (20_000, 1))
    assert uniform(tally(others(rng(), 2, taken, 8), list(product([1, 2, 4, 5, 7], repeat=2))))


@pytest.mark.parametrize("count", [1, 4, 9])
def test_earliest_is_a_sort(count):
    clock = rng().standard_exponential((100, 9), dtype=np.float32)
    clock[:, 0] = 0
    np.testing.assert_array_equal(earliest(clock, count), clock.argsort(axis=1)[:, :count])


@pytest.mark.parametrize(("parts", "letters"), [(1, 5), (2, 3), (3, 4), (5, 2)])
def test_spelt_keys_are_different_and_correlated_as_said(parts, letters):
    keys = letters**parts
    spelt = spell(np.arange(keys)[None], parts, letters)[0]
    embedded = np.eye(1 + parts * letters)[spelt].sum(axis=1)
    cosine = embedded @ embedded.T / parts
    assert len(np.unique(spelt, axis=0)) == keys
    assert spelt.min() == 1
    assert spelt.max() == parts * letters
    mean = (cosine.sum() - keys) / (keys * (keys - 1))
    assert mean == pytest.approx((letters ** (parts - 1) - 1) / (keys - 1))


# Each task's own promises.


@pytest.mark.parametrize("vocab", [16, 64])
def test_mqar_filler_is_nobody_s_and_keys_are_bound_once(vocab):
    task = MQAR(vocab=vocab, length=64, pairs=7)
    batch = task.sample(1000, rng())
    for row, scored in zip(batch.tokens, batch.scored, strict=True):
        key, value, rest = row[0:14:2], row[1:14:2], row[14:]
        assert np.unique(key).size == np.unique(value).size == 7
        assert set(key) <= set(range(1, vocab // 2))
        assert set(value) <= set(range(vocab // 2, vocab))
        assert sorted(rest[scored[14:]]) == sorted(key)
        assert (rest[~scored[14:]] == 0).all()


@pytest.mark.parametrize("exponent", [0.01, 0.5, 1.0])
def test_mqar_gaps_are_draws_without_replacement(exponent):
    """The joint law of (first, second, third pair's slot), exactly and against numpy's own choice."""
    slots, pairs = 5, 3
    p = (np.arange(slots) + 1.0) ** (exponent - 1)
    p /= p.sum()
    orders = list(permutations(range(slots), pairs))
    exact = [p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b]) for a, b, c in orders]
    task = MQAR(length=2 * pairs + 2 * slots, pairs=pairs, gap_exponent=exponent)
    batch = task.sample(30_000, rng())
    asked = batch.factors["source"][:, 2 * pairs :: 2]
    drawn = np.stack([(asked == 2 * i + 1).argmax(axis=1) for i in range(pairs)], axis=1)
    count = tally(drawn, orders)
    assert chisquare(count, np.array(exact) * len(drawn)).pvalue > UNLIKELY
    draw = rng(1)
    naive = np.array([draw.choice(slots, size=pairs, replace=False, p=p) for _ in range(5000)])
    assert chi2_contingency([count, tally(naive, orders)]).pvalue > UNLIKELY


def test_mqar_queries_and_distractors():
    task = MQAR(length=40, pairs=6, queries=2, distractors=3, gap_exponent=1.0)
    batch = check(task, 5000)
    assert (batch.scored.sum(axis=1) == 2).all()
    assert spread(batch.factors["source"][batch.scored] // 2, 6)
    behind = batch.tokens[:, 12:]
    assert ((behind >= 128).sum(axis=1) == 3).all()
    assert uniform((behind[:, 1::2] >= 128).sum(axis=0)), "distractors may stand in any slot"
    for row in batch.tokens[:100]:
        bound = row[:-1][(row[1:] >= 128)]
        assert np.unique(bound).size == 9


def test_correlated_keys_in_a_batch():
    task = PairedRecall(length=16, pairs=8, key_parts=4, key_alphabet=2)
    key = task.sample(2000, rng()).tokens[:, :8, :4]
    same = (key[:, :, None] == key[:, None]).mean(axis=-1)
    assert (same.sum(axis=(1, 2)).mean() - 8) / 56 == pytest.approx(7 / 15, abs=0.01)
    check(task)
    check(task.at(queries=3, distractors=2), 100)
    check(MQAR(key_parts=4, key_alphabet=2, queries=3, distractors=5), 100)


def test_paired_recall_asks_each_key_before_any_twice():
    batch = PairedRecall(length=14, pairs=4).sample(500, rng())
    times = np.apply_along_axis(np.bincount, 1, batch.factors["source"][:, 4:])
    assert set(times.ravel()) == {2, 3}
    empty = PairedRecall(length=14, pairs=4, queries=3, distractors=1).sample(4000, rng())
    assert uniform(empty.scored[:, 4:].sum(axis=0)), "a query may stand at any place"
    assert ((empty.tokens == 0).all(axis=2).sum(axis=1) == 6).all()


@pytest.mark.parametrize("haystack", HAYSTACKS)
@pytest.mark.parametrize("depth", [0.0, 0.33, 0.5, 1.0])
@pytest.mark.parametrize("keys", [1, 3])
def test_needle_stands_once_at_the_stated_depth(haystack, depth, keys):
    task = Needle(length=65, haystack=haystack, depth=depth, keys=keys)
    batch = check(task, 300)
    stretch, unit = 63, 3 if haystack == "needles" else 1
    hay = (stretch - 3 * keys) // unit
    for row, target, source, said in zip(
        batch.tokens, batch.targets[:, -1], batch.factors["source"][:, -1], batch.factors["depth"][:, -1], strict=True
    ):
        assert (row == target).sum() == 1
        assert (row[:stretch] == row[-1]).sum() == 1
        assert row[source - 2] == 0
        before = row[: source - 2]
        if haystack != "needles":
            assert (before > 0).sum() - 2 * (before == 0).sum() == round(depth * hay)
        elif keys == 1:
            assert before.size == 3 * round(depth * hay)
        assert said == round(100 * round(depth * hay) / hay)
    if keys == 1 and depth in (0, 1):
        assert (batch.factors["source"][:, -1] == (2 if depth == 0 else stretch - 1)).all()


@pytest.mark.parametrize("haystack", HAYSTACKS)
def test_needle_anywhere(haystack):
    batch = Needle(length=35, haystack=haystack).sample(5000, rng())
    place = batch.factors["source"][:, -1] - 2
    assert spread(place // (3 if haystack == "needles" else 1), 11 if haystack == "needles" else 31)


def test_needle_haystacks():
    repeat, noise, needles = (Needle(length=50, haystack=h, words=4).sample(400, rng()).tokens for h in HAYSTACKS)
    motif = 1 + np.arange(48) % 4
    assert ((repeat[:, :48] != motif).sum(axis=1) == 3).all()
    words = noise[:, :48][(noise[:, :48] > 0) & (noise[:, :48] <= 4)]
    assert words.size == 400 * 45
    assert spread(words - 1, 4)
    assert (needles[:, 0:48:3] == 0).all()
    assert (needles[:, 1:48:3] > 4).all()
    assert ((needles[:, 1:48:3] == needles[:, -1:]).sum(axis=1) == 1).all(), "the asked key is bound once"


def test_needle_variants():
    """Multi-value asks for the values in the order of the text, multi-query for each key's."""
    task = Needle(length=80, haystack="noise", keys=4, values=3, queries=2)
    batch = check(task, 200)
    assert (batch.scored.sum(axis=1) == 6).all()
    source = batch.factors["source"][batch.scored].reshape(200, 2, 3)
    assert (np.diff(source, axis=2) > 0).all()
    needles = (batch.tokens[:, :72] == 0).sum(axis=1)
    assert (needles == 12).all()


def test_selective_copying_chooses_any_places():
    batch = SelectiveCopying(length=8, data=3).sample(10_000, rng())
    place = batch.factors["source"][:, -3:]
    assert uniform(tally(place, list(combinations(range(5), 3))))
    last = SelectiveCopying().sample(2000, rng()).factors["source"][:, -1]
    assert np.unique(last).size > 20, "the last datum is tied to no place"


def test_updates_change_the_value_and_come_in_any_order():
    task = Updates(length=10, pairs=2, updates=1)
    batch = task.sample(12_000, rng())
    key = batch.tokens[:, 0:6:2]
    pattern = (key != key[:, :1]).astype(int)
    orders = [(0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert uniform(tally(pattern, orders))

    batch = check(Updates(length=128, pairs=8, updates=24), 500)
    row, place = batch.scored.nonzero()
    asked, target = batch.tokens[row, place], batch.targets[row, place]
    source, times, stale = (batch.factors[name][batch.scored] for name in ("source", "rebindings", "stale"))
    bound = batch.tokens[row, 0:64:2] == asked[:, None]
    assert (bound.sum(axis=1) == times + 1).all()
    assert (source == 2 * (31 - bound[:, ::-1].argmax(axis=1)) + 1).all()
    assert ((stale == IGNORE) == (times == 0)).all()
    assert (times.reshape(500, 8).sum(axis=1) == 24).all()
    again = stale != IGNORE
    assert (batch.tokens[row, stale - 1] == asked)[again].all()
    assert (batch.tokens[row, stale] != target)[again].all()
    assert (stale < source)[again].all()
    assert not (bound & (2 * np.arange(32) + 1 > stale[:, None]) & (2 * np.arange(32) + 1 < source[:, None]))[
        again
    ].any()


def test_noisy_recall_has_no_empty_place_and_asks_after_all_pairs():
    batch = check(NoisyRecall(vocab=40, words=4, length=30, pairs=5), 1000)
    noise = batch.tokens[batch.tokens < 4]
    assert noise.size == 1000 * 15
    assert spread(noise, 4)
    first = batch.scored.argmax(axis=1)
    assert (np.max(batch.factors["source"], axis=1) < first).all()
    source = batch.factors["source"][batch.scored].reshape(1000, 5)
    assert uniform(tally(source.argsort(axis=1), list(permutations(range(5)))))


def test_induction_marks_any_place():
    batch = Induction(length=12).sample(5000, rng())
    assert spread(batch.factors["source"][:, -1] - 1, 10)
    assert ((batch.tokens == 0).sum(axis=1) == 2).all()


def test_joint_recall_orders_each_context_anew():
    tokens = JointRecall(length=30, contexts=2, pairs=3).sample(3000, rng()).tokens
    first, second = tokens[:, 1:7:2], tokens[:, 8:14:2]
    assert uniform(tally((first[:, :, None] == second[:, None]).argmax(axis=2), list(permutations(range(3)))))


def test_joint_recall_needs_the_context():
    task = JointRecall(length=64, contexts=3, pairs=4)
    batch = check(task, 300)
    for row, scored, targets in zip(batch.tokens, batch.scored, batch.targets, strict=True):
        asked = list(zip(row[:-1][scored[1:]], row[scored], strict=True))
        assert len(set(asked)) == 12
        for key in np.unique(row[scored]):
            assert np.unique(targets[scored & (row == key)]).size == 3


@pytest.mark.parametrize("group", GROUPS)
def test_state_tracking_is_the_word_problem(group):
    task = StateTracking(group=group, length=20)
    batch = check(task, 400)
    assert task.vocab == {"parity": 2, "s3": 6, "s4": 24, "s5": 120}[group]
    assert spread(batch.tokens, task.vocab)
    if group == "parity":
        np.testing.assert_array_equal(batch.targets, batch.tokens.cumsum(axis=1) % 2)
        assert spread(batch.tokens @ 2 ** np.arange(20) % 64, 64)
    idle = np.zeros((1, 5), dtype=np.int32)
    assert (task.solve(idle) == 0).all()


def test_subset_average():
    task = SubsetAverage(length=40, points=6, subset=2, dim=8, pool=9)
    batch = check(task, 500)
    vector, member = batch.tokens[:, :6, :8], batch.tokens[:, :, 8:]
    np.testing.assert_allclose((vector**2).sum(axis=2), 1, rtol=1e-5)
    assert (member[:, :6].sum(axis=2) == 1).all()
    assert spread(member[:, 0].argmax(axis=1), 9)
    assert (member[:, 6:].sum(axis=2) == 2).all()
    assert (batch.tokens[:, 6:, :8] == 0).all()
    for query in (6, 7, -1):
        chosen = np.einsum("bpi,bi->bp", member[:, :6], member[:, query]).nonzero()[1].reshape(500, 2)
        assert uniform(tally(chosen, list(combinations(range(6), 2))))
    truth = batch.targets[batch.scored]
    blind = np.repeat(vector.mean(axis=1), 34, axis=0)
    error = ((truth - blind) ** 2).sum() / ((truth - truth.mean(axis=0)) ** 2).sum()
    assert error == pytest.approx(1 - 2 / 6, abs=0.02)
