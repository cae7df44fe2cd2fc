"""Retrieval: how often a model answers correctly, overall and by factors of the task such as the age of an answer."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import nn

from recall_lab import metrics
from recall_lab.checks import require, whole_number
from recall_lab.data import arrays, to_device
from recall_lab.probe.base import Row, bins
from recall_lab.probe.rows import mean_row, share_row
from recall_lab.task.base import IGNORE, Batch


@torch.no_grad()
def retrieval(
    model: nn.Module,
    batch: Batch,
    rng: np.random.Generator,
    *,
    by: Sequence[str] = ("age",),
    values: int = 12,
) -> list[Row]:
    """Measures the accuracy of the model on one batch.

    by      factors of the batch by which the accuracy is split; age: the query's position minus that of its answer
    values  largest number of distinct values of a factor that each get a row; more values are sorted into that many
            bins, equally wide in the logarithm

    accuracy            share of the scored positions that are answered correctly
    sequence_accuracy   share of the sequences in which every scored position is answered correctly
    loss_bits           mean −log₂ p of the correct answer, in bits
    accuracy_by_FACTOR  accuracy per value or bin of the factor; the column FACTOR holds its mean in the bin
    For a task with continuous targets, only squared_error and squared_error_by_FACTOR.
    Raises ValueError for a factor that the batch does not have, and if outputs of the
    model are not finite.
    """
    whole_number("values", values)
    device = next(model.parameters()).device
    tokens, scored, targets = to_device(arrays(batch), device)
    outputs = model(tokens, scored).float()
    bad = int((~outputs.isfinite()).sum())
    require(not bad, f"{bad} of the model's {outputs.numel()} outputs are not finite")
    sequence, position = np.nonzero(batch.scored)
    row: Callable[..., Row]
    if targets.is_floating_point():
        metric, row, score = "squared_error", mean_row, metrics.squared_error(outputs, targets).cpu().numpy()
        rows = [mean_row(metric, score, sequence)]
    else:
        hits = metrics.correct(outputs, targets)
        metric, row, score = "accuracy", share_row, hits.cpu().numpy()
        rows = [
            share_row(metric, score, sequence),
            share_row("sequence_accuracy", metrics.correct_sequences(hits.cpu(), torch.from_numpy(batch.scored))),
            mean_row("loss_bits", metrics.loss_bits(outputs, targets), sequence),
        ]
    for factor in by:
        level, known = _levels(batch, factor, position)
        for chosen in _groups(level, known, values):
            where = {factor: float(level[chosen].mean())}
            rows.append(row(f"{metric}_by_{factor}", score[chosen], sequence[chosen], **where))
    return rows


def _levels(
    batch: Batch, factor: str, position: Int[np.ndarray, "p"]
) -> tuple[Int[np.ndarray, "p"], Bool[np.ndarray, "p"]]:
    """The factor at each of the p scored positions, and whether it is known there."""
    source = "source" if factor == "age" else factor
    known = [*batch.factors, *(["age"] if "source" in batch.factors else [])]
    require(source in batch.factors, f"by={factor!r}: this task's factors are {', '.join(known) or 'none'}")
    level = batch.factors[source][batch.scored]
    return (position - level if factor == "age" else level), level != IGNORE


def _groups(level: Int[np.ndarray, "p"], known: Bool[np.ndarray, "p"], values: int) -> list[Int[np.ndarray, "g"]]:
    """Indices of the scored positions whose level is known: one group per level, or per bin of levels."""
    index = np.flatnonzero(known)
    distinct = np.unique(level[index])
    if len(distinct) <= values:
        return [index[level[index] == value] for value in distinct]
    return [index[chosen] for chosen in bins(level[index], values)]
