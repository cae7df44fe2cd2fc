"""`recall-lab claim`: the settings an experiment is given, runs with twice the steps, and the table that is judged."""

from pathlib import Path

import pandas as pd
import pytest
from command_line import TINY, recall

from recall_lab.claim.base import untrained
from recall_lab.cli import claim


def test_an_experiment_is_given_the_settings_that_have_an_effect():
    words = ["train.steps=20", "oracle.pairs=8", "seed=0,1", "device=cpu", "size=small"]
    found = claim.effective(["access", "tasks"], words, None)
    assert found["access"] == ["oracle.pairs=8", "seed=0,1", "device=cpu"]
    assert found["tasks"] == ["train.steps=20", "seed=0,1", "device=cpu", "size=small"]
    with pytest.raises(ValueError, match=r"oracle\.pairs has no effect in this kind of run"):
        claim.effective(["tasks"], ["oracle.pairs=8"], None)


def test_mixers_that_an_experiment_compares_must_be_among_those_given(empty_folder, monkeypatch):
    """Nothing is started; a superset, and all that a pattern matches, are accepted."""
    started = []
    monkeypatch.setattr(claim, "run", lambda jobs, *_: started.extend(jobs) or [])
    with pytest.raises(ValueError, match="mixer=linear: must include softmax, delta_rule, which experiment random"):
        claim.claim(["delta", "mixer=linear"])
    with pytest.raises(ValueError, match=r"must include .*, softmax, .* which experiment cost compares"):
        claim.claim(["cost", "mixer=linear,gla"])
    for words in (["equivalence", "mixer=glob(*)"], ["gates", "seed=0"]):
        with pytest.raises(ValueError, match="no experiment has results"):
            claim.claim(words)
    assert [job.name for job in started] == ["equivalence", "selective_gates", "needle_in_noise", "updates"]


def test_twice_the_steps_with_one_seed():
    assert claim.twice("beyond_capacity", [], None) == ["seed=0", "train.steps=3600"]
    words = ["size=large", "seed=0,1", "train.steps=50", "mixer=linear"]
    assert claim.twice("beyond_capacity", words, None) == ["size=large", "mixer=linear", "seed=0", "train.steps=100"]
    assert claim.twice("beyond_capacity", ["size=large"], None)[-1] == "train.steps=40000"


def test_the_table_says_whether_a_series_is_trained_to_the_end(empty_folder):
    """Two seeds, and seed 0 with twice the steps: two untrained runs are equally bad, so that nothing is gained."""
    tiny = [*TINY, "root=claim", "mixer=linear", "train.lr=1e-9"]
    assert recall("-m", *tiny, "seed=0,1", "name=tasks", "hydra/launcher=basic") == 0

    def table():
        return claim.collect(dict(claim._measured("tasks", Path("claim/tasks"), [])))

    before = table()
    assert set(before["trained_to_end"]) == {"unknown"}
    assert recall(*tiny, "seed=0", "train.steps=12", f"name=tasks{claim.TWICE}") == 0
    after = table()
    assert set(after["trained_to_end"]) == {"end"}
    assert set(after["experiment"]) == {"tasks"}
    assert set(after["train.steps"]) == {6}
    assert untrained(after) == ""
    assert untrained(before) == "not trained to the end: linear (twice the steps were not tried)"
    assert untrained(pd.concat([before, after])) != ""
