"""Retrieval: how often a model answers right, as a whole and by whatever a plot may split by."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from recall_lab.probe.base import IGNORE, Row, bins, mean_row, share_row
from recall_lab.task.base import Batch


@torch.no_grad()
def retrieval(
    model,
    batch: Batch,
    rng: np.random.Generator,
    *,
    by: Sequence[str] = ("age",),
    values: int = 12,
) -> list[Row]:
    """Accuracy of the model on one batch, with Wilson intervals.

    by      factors of the batch to split by; age is query place − place of the answer
    values  how many values of a factor get rows of their own; where there are more they are put in that many bins,
            equal in the logarithm

    accuracy, sequence_accuracy: share of scored places, and of sequences with every one of them, answered right;
    loss_bits: mean −log₂ p of the right answer; accuracy_by_FACTOR: with the factor as a column.
    Where the answers are vectors: squared_error, and squared_error_by_FACTOR.
    Raises ValueError for a factor that the batch does not have.
    """
    device = next(model.parameters()).device
    scored = batch.scored
    logits = model(torch.from_numpy(batch.tokens).to(device), torch.from_numpy(scored).to(device)).float()
    targets = batch.targets[scored]
    if targets.dtype.kind == "f":
        error = F.mse_loss(logits, torch.from_numpy(targets).to(logits), reduction="none").mean(-1).cpu().numpy()
        rows, metric, score, row = [mean_row("squared_error", error)], "squared_error", error, mean_row
    else:
        truth = torch.from_numpy(targets.astype(np.int64)).to(device)
        hit = (logits.argmax(-1) == truth).cpu().numpy()
        whole = np.ones(scored.shape, dtype=bool)
        whole[scored] = hit
        bits = F.cross_entropy(logits, truth, reduction="none") / np.log(2)
        rows = [
            share_row("accuracy", hit),
            share_row("sequence_accuracy", whole[scored.any(1)].all(1)),
            mean_row("loss_bits", bits),
        ]
        metric, score, row = "accuracy", hit, share_row
    place = np.nonzero(scored)[1]
    for factor in by:
        level, known = _levels(batch, factor, place)
        if not known.any():
            continue
        for chosen in _groups(level[known], values):
            rows.append(
                row(f"{metric}_by_{factor}", score[known][chosen], **{factor: float(level[known][chosen].mean())})
            )
    return [{"length": scored.shape[1], **row} for row in rows]


def _levels(batch: Batch, factor: str, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The factor at every scored place, and where it is known."""
    source = "source" if factor == "age" else factor
    if source not in batch.factors:
        has = [*batch.factors, *(["age"] if "source" in batch.factors else [])]
        raise ValueError(f"by={factor!r}: this task's factors are {', '.join(has) or 'none'}")
    level = batch.factors[source][batch.scored]
    return (place - level if factor == "age" else level), level != IGNORE


def _groups(level: np.ndarray, values: int) -> list[np.ndarray]:
    distinct = np.unique(level)
    if len(distinct) <= values:
        return [np.flatnonzero(level == value) for value in distinct]
    return bins(level, values)
