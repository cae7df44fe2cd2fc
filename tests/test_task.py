"""Every task of conf/task: its sampler agrees with its definition, and its data, docstring and yaml are complete."""

import ast
import doctest
import hashlib
import importlib
import inspect
import pkgutil
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest
import yaml
from conftest import CONF
from task_helpers import TASKS, build, check, rng, uniform

import recall_lab.task
from recall_lab.contract import task as contract
from recall_lab.contract.base import examine
from recall_lab.task.base import IGNORE, alphabet

MODULES = [module.name for module in pkgutil.iter_modules(recall_lab.task.__path__)]


@pytest.mark.parametrize("name", TASKS)
def test_contract(name):
    task = build(name)
    assert [finding for finding in examine(contract.CHECKS, task) if not finding.holds] == []
    assert task == type(task)(), "the values in the yaml equal the defaults of the class"


@pytest.mark.parametrize("name", [name for name in TASKS if not build(name).continuous])
def test_classes_are_equally_frequent(name):
    batch, task = build(name).sample(4000, rng()), build(name)
    classes, counts = np.unique(batch.targets[batch.scored], return_counts=True)
    assert classes.size == round(1 / task.chance)
    assert uniform(counts)


@pytest.mark.parametrize("name", TASKS)
def test_age_is_the_distance_to_the_source(name):
    batch = build(name).sample(32, rng())
    if "source" not in batch.factors:
        pytest.skip("an answer has several sources or none")
    position = batch.scored.nonzero()[1]
    assert (batch.age[batch.scored] == position - batch.factors["source"][batch.scored]).all()
    assert (batch.age[~batch.scored] == IGNORE).all()


DATA = {
    "copying": "06e7ce2764d81b1b",
    "induction": "c53450b3d5464464",
    "joint_recall": "ce36ca4d23c52573",
    "mqar": "e5502d22306b56fc",
    "needle": "46865196fd517d22",
    "noisy_recall": "260a33ea9dc8b2ed",
    "paired_recall": "db2174a771200c94",
    "selective_copying": "e93a42d18d414344",
    "state_tracking": "20bf30a51ea6f50f",
    "subset_average": "97936c21e35d39a2",
    "updates": "0bf30e789562e9bd",
}
"""Task → hash of its first batch at the defaults. If the data changed, results of earlier runs would be invalid."""


@pytest.mark.parametrize("name", TASKS)
def test_data_do_not_change(name):
    batch = build(name).sample(64, rng(3))
    digest = hashlib.sha256()
    for array in (batch.tokens, batch.targets, *(batch.factors[factor] for factor in sorted(batch.factors))):
        digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    assert digest.hexdigest()[:16] == DATA[name]


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


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module):
    """Each task shows an example of its data, which is correct."""
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
    assert all("  # " in line for line in lines[1:]), "every key has a comment"
    assert set(yaml.safe_load("\n".join(lines))) == {"_target_", *(f.name for f in fields(build(name)))}


def test_tasks_need_no_torch():
    code = (
        ";".join(f"import recall_lab.task.{module}" for module in MODULES)
        + ";import sys;assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CONF.parent)


def test_limits_of_an_alphabet():
    """2³⁰ keys are possible, 2³¹ are too many for 32-bit numbers."""
    assert alphabet(200, 1, 0, 30, 2) == 2
    with pytest.raises(ValueError, match="give 2147483648 keys: there must be at most 2147483647"):
        alphabet(200, 1, 0, 31, 2)
    with pytest.raises(ValueError, match="need 3 ids for keys, but there are only 1"):
        alphabet(4, 1, 0, 3, None)
    assert alphabet(16, 7, 0, 1, None) == 7
    with pytest.raises(ValueError, match=r"pairs=6 and distractors=2 but .* give only 7 keys and 8 values"):
        alphabet(16, 6, 2, 1, None)
