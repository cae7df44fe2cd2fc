"""Loss, accuracy and error: pure functions of a model's outputs at the scored positions and their targets.

Letters: p scored positions of a batch, in the order of `outputs[scored]`; n sequences with a scored position; w
channels of a target. Targets are class ids (p), or vectors (p w) in a continuous task.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


def loss(logits: Float[Tensor, "p classes"], targets: Shaped[Tensor, "p *w"]) -> Float[Tensor, ""]:
    """The training loss: mean cross entropy in nats, or the mean squared error where targets are vectors."""
    if targets.is_floating_point():
        return F.mse_loss(logits, targets)
    return F.cross_entropy(logits, targets)


def correct(logits: Float[Tensor, "p classes"], targets: Int[Tensor, "p"]) -> Bool[Tensor, "p"]:
    """Whether the class with the largest logit is the target. The mean is the accuracy per scored token."""
    return logits.argmax(dim=-1) == targets


def correct_sequences(correct: Bool[Tensor, "p"], scored: Bool[Tensor, "b t"]) -> Bool[Tensor, "n"]:
    """Whether every scored position of a sequence is correct. Sequences with no scored position are left out.

    correct  as returned by `correct`
    scored   True at the scored positions
    """
    every = torch.ones_like(scored)
    every[scored] = correct
    return every.all(dim=1)[scored.any(dim=1)]


def loss_bits(logits: Float[Tensor, "p classes"], targets: Int[Tensor, "p"]) -> Float[Tensor, "p"]:
    """−log₂ of the target's probability under the softmax of the logits, in bits."""
    return F.cross_entropy(logits, targets, reduction="none") / math.log(2)


def squared_error(outputs: Float[Tensor, "p w"], targets: Float[Tensor, "p w"]) -> Float[Tensor, "p"]:
    """Mean squared difference over the channels of each position."""
    return F.mse_loss(outputs, targets, reduction="none").mean(dim=-1)


def normalised_error(squared: Float[Tensor, "p"], targets: Float[Tensor, "p w"]) -> float:
    """Σ‖output − target‖² / Σ‖target − mean target‖², in float64; 1 for the best constant output. R² is 1 minus this.

    squared  as returned by `squared_error` for the same positions
    """
    return float(squared.double().mean()) / variance(targets)


def variance(targets: Float[Tensor, "p w"]) -> float:
    """Mean over the channels of the targets' variance, in float64."""
    return float(targets.double().var(dim=0, correction=0).mean())


def standard_error(values: Float[np.ndarray, "p"], sequence: Int[np.ndarray, "p"]) -> float:
    """Standard error of the mean x̄ of all values, with sequences as clusters; NaN for a single sequence.

    √(G/(G−1) · Σ_g (Σ_{i∈g} (x_i − x̄))²) / N over G sequences and N values. Values of one sequence may depend on each
    other, and sequences may differ in their number of values. With one value per sequence this is s/√N.

    sequence  the index of each value's sequence
    """
    _, groups = np.unique(sequence, return_inverse=True)
    residual = np.bincount(groups, weights=values - values.mean())
    count = len(residual)
    return float((count / (count - 1) * np.square(residual).sum()) ** 0.5 / values.size) if count > 1 else math.nan
