"""Cache policies on the weights of a trained softmax model: accuracy by policy and budget."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch import nn

from recall_lab import metrics
from recall_lab.checks import number, require
from recall_lab.data import arrays, to_device
from recall_lab.mixer.cache import Budget, Cache
from recall_lab.probe.base import Row
from recall_lab.probe.rows import share_row
from recall_lab.task.base import Batch

SEQUENCES = 256
"""Sequences per forward pass."""


@torch.no_grad()
def policies(
    model: nn.Module,
    batch: Batch,
    rng: np.random.Generator,
    *,
    policies: Sequence[Mapping[str, Any]] = (
        {"policy": "recall_lab.mixer.window.Window"},
        {"policy": "recall_lab.mixer.sink_window.SinkWindow", "sinks": 1},
        {"policy": "recall_lab.mixer.heavy_hitter.HeavyHitter"},
        {"policy": "recall_lab.mixer.merging.Merging"},
        {"policy": "recall_lab.mixer.random_k.RandomK"},
        {"policy": "recall_lab.mixer.paged.Paged", "page": 4},
        {"policy": "recall_lab.mixer.top_k.TopK"},
        {"policy": "recall_lab.mixer.top_k.TopK", "kept": 2},
        {"policy": "recall_lab.mixer.top_k.TopK", "kept": 4},
    ),
    shares: Sequence[float | int] = (0.0625, 0.125, 0.25, 0.5, 1),
) -> list[Row]:
    """Measures the accuracy of a trained model with each policy and budget, in every layer that attends to a cache.

    policies  for each, the class of the policy, and those of its options that are not its defaults; `kept` is given in
              units of the budget: C = kept · B. Other options, positions among them, are those of the trained model
    shares    budgets B as shares of the sequence length n; B = share · n, rounded

    policy_accuracy             share of the scored positions answered correctly, on the second half of the sequences
    policy_validation_accuracy  the same on the first half, by which a policy may be chosen
    All rows have the columns policy (the module's name, and "C=2B" where `kept` is given), budget (B), share
    (B/n) and kept: the tokens or slots that the last query can choose from, at most n.
    Raises ValueError for fewer than two sequences, a continuous task, a model without softmax attention, a class that
    is not a mixer with a budget, and options or a budget that it does not accept.
    """
    sequences, length = batch.scored.shape
    require(sequences > 1, f"test.probe_sequences={sequences}: must be at least 2, half of them for validation")
    require(batch.targets.dtype.kind == "i", "a continuous task has no accuracy")
    device = next(model.parameters()).device
    parts = [to_device(arrays(part), device) for part in _parts(batch)]
    sequence = np.nonzero(batch.scored)[0]
    second = sequence >= sequences // 2
    rows: list[Row] = []
    for share in shares:
        number("shares", share, above=0)
        budget = max(1, round(share * length))
        for policy in policies:
            changed, kept = _with_policy(model, policy, budget, length)
            right = [metrics.correct(changed(tokens, scored), targets) for tokens, scored, targets in parts]
            hits = torch.cat(right).cpu().numpy()
            name = str(policy["policy"]).split(".")[-2] + (f" C={policy['kept']:g}B" if policy.get("kept") else "")
            columns = {"policy": name, "budget": budget, "share": budget / length, "kept": kept}
            for metric, half in (("policy_accuracy", second), ("policy_validation_accuracy", ~second)):
                rows.append(share_row(metric, hits[half], sequence[half], **columns))
    return rows


def _parts(batch: Batch) -> list[Batch]:
    """The batch in parts of at most SEQUENCES sequences."""
    starts = range(0, len(batch.tokens), SEQUENCES)
    return [Batch(batch.tokens[i : i + SEQUENCES], batch.targets[i : i + SEQUENCES]) for i in starts]


def _with_policy(model: nn.Module, policy: Mapping[str, Any], budget: int, length: int) -> tuple[nn.Module, int]:
    """A copy of the model with this policy in every layer that attends to a cache; and the tokens or slots kept."""
    changed, kept = copy.deepcopy(model), 0
    for block in changed.modules():
        trained = getattr(block, "mixer", None)
        if isinstance(trained, Cache):
            block.mixer = mixer = _replaced(trained, policy, budget)
            kept = _kept(mixer, length)
    require(kept > 0, "no layer of this model is softmax attention over a cache")
    return changed, kept


def _replaced(trained: Cache, policy: Mapping[str, Any], budget: int) -> Budget:
    """A mixer with the policy, the weights of the trained one, and the values of the options that both have."""
    name = policy["policy"]
    try:
        made = resolve_name(str(name))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"policy={name} cannot be imported: {error}") from error
    known = isinstance(made, type) and issubclass(made, Budget)
    require(known, f"policy={name}: must be a class of mixer with a budget")
    own = {field.name for field in dataclasses.fields(made)}
    options = {field.name: getattr(trained, field.name) for field in dataclasses.fields(trained) if field.name in own}
    given = {key: value for key, value in policy.items() if key != "policy"}
    require(given.keys() <= own, f"policy={name} has no option {', '.join(sorted(given.keys() - own))}")
    if given.get("kept") is not None:
        given["kept"] = round(given["kept"] * budget)
    mixer = made(**options | given | {"budget": budget})
    try:
        mixer.load_state_dict(trained.state_dict())
    except RuntimeError as error:
        raise ValueError(f"policy={name} has other weights than {type(trained).__name__}") from error
    return mixer.to(trained.o_proj.weight).eval()


def _kept(mixer: Budget, length: int) -> int:
    """Tokens or slots that the last of `length` queries has: those of the state before it, and its own."""
    q, v = (mixer.o_proj.weight.new_zeros(1, 1, length - 1, width) for width in (mixer.d_key, mixer.d_value))
    return mixer.parallel(q, q, v, {})[1]["k"].shape[2] + 1
