"""Probe retrieval: counts, splits and intervals for answers that are known to be right or wrong."""

import numpy as np
import pytest
import torch
from probes import value

from recall_lab.probe.retrieval import retrieval
from recall_lab.task.mqar import MQAR


class Answers(torch.nn.Module):
    """A model that answers correctly at marked positions, and is certain of a wrong class at the others."""

    def __init__(self, targets, right, vocab):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        chosen = np.where(right, targets, (targets + 1) % vocab)
        self.logits = torch.nn.functional.one_hot(torch.from_numpy(chosen.astype(np.int64)).clamp(min=0), vocab) * 20.0

    def forward(self, tokens, scored):
        return self.logits.flatten(0, 1)[scored]


def test_retrieval_counts(rng):
    batch = MQAR(vocab=32, length=32, pairs=4, gap_exponent=1.0).sample(50, rng)
    right = np.broadcast_to(np.arange(32) < 20, batch.targets.shape)
    rows = retrieval(Answers(batch.targets, right, 32), batch, rng, by=("age", "source"), values=4)
    hit = right[batch.scored]
    assert value(rows, "accuracy") == pytest.approx(hit.mean())
    complete = (right | ~batch.scored).all(1).mean()
    assert value(rows, "sequence_accuracy") == pytest.approx(complete)
    age = (np.arange(32) - batch.factors["source"])[batch.scored]
    by_age = [row for row in rows if row["metric"] == "accuracy_by_age"]
    assert sum(row["count"] for row in by_age) == len(hit)
    assert sum(row["count"] * row["value"] for row in by_age) == pytest.approx(hit.sum())
    assert sum(row["count"] * row["age"] for row in by_age) == pytest.approx(age.sum())
    by_source = {row["source"]: row["value"] for row in rows if row["metric"] == "accuracy_by_source"}
    assert sorted(by_source) == [1, 3, 5, 7]
    assert by_source[3] == pytest.approx(hit[batch.factors["source"][batch.scored] == 3].mean())
    assert all(row["low"] <= row["value"] <= row["high"] for row in by_age)
    with pytest.raises(ValueError, match="by='depth': this task's factors are source, age"):
        retrieval(Answers(batch.targets, right, 32), batch, rng, by=("depth",))
