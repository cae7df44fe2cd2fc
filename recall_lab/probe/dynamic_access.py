"""How far a query alone controls the weights over a fixed history: rank, one-hot residual, independence, subsets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import linprog
from torch import Tensor

from recall_lab.checks import require, share, whole_number
from recall_lab.mixer.base import Trace
from recall_lab.probe.base import Row, effective_rank
from recall_lab.probe.queries import answers, derivative, double, gather, query_scale, state_before, weights
from recall_lab.probe.rows import mean_row, share_row
from recall_lab.task.base import IGNORE

TOLERANCE = 1e-9
"""Relative size, in float64, below which a deviation from linearity or a singular value counts as zero."""


@torch.no_grad()
def dynamic_access(
    trace: Trace,
    rng: np.random.Generator,
    *,
    sequences: int = 4,
    positions: int = 16,
    sharpen: Sequence[float | int] = (1, 4, 16, 64),
    subsets: Sequence[int] = (),
    draws: int = 20,
    purity: float | int = 0.9,
) -> list[Row]:
    """Measures the weights A(q) that different queries q have at the last position, its history unchanged.

    The history has n tokens, the last position included. Everything is computed in float64.

    sequences  number of sequences of the trace that are measured
    positions  largest number per sequence of tokens (for independence) and of queries with an answer (for moved)
    sharpen    factors by which keys are scaled in the search for the query with the smallest one-hot residual
    subsets    sizes of the random subsets of tokens for selectable; sizes above n are skipped; []: no such rows
    draws      number of random subsets per size
    purity     smallest share of Σ|A| that the members of a selected subset may hold

    Rows have the columns layer, head, d_key and tokens (n). Metrics:
      rank              rank of the 2n × n matrix of the weights of n keys and n random vectors as queries: the number
                        of singular values above σ₁ · max(shape) · ε
      access_rank       effective rank of that matrix
      one_hot_residual  min_q ‖e_i − A(q)‖², mean over tokens i: over all q where A is linear in q (then 1 − rank/n),
                        elsewhere over the keys times the factors in `sharpen`
      independence      max_δq (δA_i)²/‖δA‖² for a small change δq, at the query along key i: the share of the change
                        that can fall on the weight of token i; mean over tokens i
      held_range        max_δq |δA_i|/‖δq‖ with all other weights held fixed, at the same query; 0 where A_i cannot
                        change alone; mean over tokens i
      moved             A_i(query for answer i) − mean of A_i(queries for other answers), mean over answers i
      moved_share       the same for |A|/Σ|A|
      selectable        share of the random subsets (column subset: their size) that some query selects: it gives all
                        members equal weights, and together at least `purity` of Σ|A|. Decided by a linear program:
                        `least_leak` where A is linear in q; `is_face` where A is a softmax of scores linear in q,
                        among the tokens that have weight under some query; no rows for other mechanisms
    No rows for a mechanism that is not linear in v. Raises ValueError for an option outside its range.
    """
    for option, value in (("sequences", sequences), ("positions", positions), ("draws", draws)):
        whole_number(option, value)
    require(len(sharpen) > 0, "sharpen=[]: must hold at least one factor")
    for size in subsets:
        whole_number("subsets", size)
    share("purity", purity)
    require(purity > 0, f"purity={purity}: must be above 0")
    if not trace.mixer.linear_in_v:
        return []
    trace = double(_first(trace, sequences))
    last, (b, h, n, d) = trace.q.shape[2] - 1, trace.k.shape
    keys = query_scale(trace) * trace.k
    random = torch.from_numpy(rng.standard_normal((b, h, n, d))).to(keys)
    random = random / random.norm(dim=-1, keepdim=True) * keys.norm(dim=-1, keepdim=True)
    seen = weights(trace, torch.cat([keys, random], dim=2), last)  # b h m s
    linear = _linear(trace, keys, last)
    if linear:
        residual = span_residual(seen)
    else:
        residual = best_residual(weights(trace, torch.cat([factor * keys for factor in sharpen], dim=2), last))
    some = np.sort(rng.permutation(n)[:positions])
    independent, held = independence(trace, keys[:, :, some], torch.from_numpy(some).to(keys.device), last)
    gained, gained_share = moved(trace, positions, last, rng)
    sigma = torch.linalg.svdvals(seen)
    limit = sigma[..., :1] * max(seen.shape[-2:]) * torch.finfo(sigma.dtype).eps
    measured = {
        "rank": (sigma > limit).sum(-1),
        "access_rank": effective_rank(sigma),
        "one_hot_residual": residual,
        "independence": independent,
        "held_range": held,
    }
    if gained.numel():
        measured |= {"moved": gained, "moved_share": gained_share}
    selection = _selection(trace, seen, keys, last, linear) if subsets else None
    rows: list[Row] = []
    for head in range(h):
        found = [_mean_row(metric, values[:, head]) for metric, values in measured.items()]
        for size in subsets:
            if size > n or selection is None:
                continue
            chosen = [np.isin(np.arange(n), rng.choice(n, size, replace=False)) for _ in range(draws)]
            hits = [selection.selects(draw % b, head, members, purity) for draw, members in enumerate(chosen)]
            found.append(share_row("selectable", np.array(hits), subset=size))
        rows += [{"layer": trace.layer, "head": head, "d_key": d, "tokens": n, **row} for row in found]
    return rows


def _mean_row(metric: str, values: Float[Tensor, "b *m"] | Int[Tensor, "b *m"]) -> Row:
    """`mean_row` with the first axis as sequences."""
    sequence = torch.arange(len(values)).reshape(-1, *[1] * (values.dim() - 1)).expand(values.shape)
    return mean_row(metric, values, sequence)


def _first(trace: Trace, sequences: int) -> Trace:
    """The first sequences of the trace."""
    return replace(
        trace,
        q=trace.q[:sequences],
        k=trace.k[:sequences],
        v=trace.v[:sequences],
        o=trace.o[:sequences],
        source=trace.source[:sequences],
        gates={name: gate[:sequences] for name, gate in trace.gates.items()},
    )


@dataclass(frozen=True)
class _Selection:
    """Tests whether some query selects a subset of tokens. Exactly one of readers and hulls is None."""

    readers: Float[Tensor, "b h s k"] | None
    """K̃ with A(q) = K̃ q; None where A is not linear in q."""
    hulls: Float[Tensor, "b h s k"] | None
    """κ with A_s(q) ∝ e^{κ_s·q + b_s} (see `softmax_keys`); None where A is linear in q."""
    reached: Bool[Tensor, "b h s"]
    """Which tokens have a positive weight under at least one measured query."""

    def selects(self, sequence: int, head: int, members: Bool[np.ndarray, "s"], purity: float | int) -> bool:
        """Whether some query gives all members equal weights, and together at least `purity` of Σ|A|."""
        if self.readers is not None:
            leak = least_leak(self.readers[sequence, head].cpu().numpy(), members)
            return bool(leak <= (1 - purity) / purity * members.sum())
        assert self.hulls is not None
        reached = self.reached[sequence, head].cpu().numpy()
        hull = self.hulls[sequence, head].cpu().numpy()[reached]
        return bool(reached[members].all()) and is_face(hull, members[reached])


def _selection(
    trace: Trace, seen: Float[Tensor, "b h m s"], keys: Float[Tensor, "b h s k"], position: int, linear: bool
) -> _Selection | None:
    """The test of subsets at that position; None where A is neither linear in q nor a softmax."""
    reached = (seen > 0).any(2)
    if linear:
        basis = torch.eye(keys.shape[-1], dtype=keys.dtype, device=keys.device).expand(*keys.shape[:2], -1, -1)
        return _Selection(weights(trace, basis, position).mT, None, reached)
    hulls = softmax_keys(trace, keys, position)
    return None if hulls is None else _Selection(None, hulls, reached)


def _linear(trace: Trace, queries: Float[Tensor, "b h m k"], position: int) -> bool:
    """Whether A(q) is linear in q, tested on two queries and a combination of them."""
    one, two = queries[:, :, :1], queries[:, :, -1:]
    a, b, both = weights(trace, torch.cat([one, two, 3 * one - 2 * two], dim=2), position).unbind(2)
    return bool((both - 3 * a + 2 * b).abs().max() < TOLERANCE * a.abs().max().clamp(min=1e-300))


def softmax_keys(trace: Trace, queries: Float[Tensor, "b h m k"], position: int) -> Float[Tensor, "b h s k"] | None:
    """Vectors κ with A_s(q) ∝ e^{κ_s·q + b_s} over the tokens with positive weight; None where A has no such form.

    b_s is any constant per token. Two candidates for κ are tested on three queries: k/√d_key and, where all queries
    have the same tokens with positive weight, the slopes log A(e_j) − log A(0) along the unit vectors e_j.
    """
    d = trace.k.shape[-1]
    basis = torch.eye(d, dtype=queries.dtype, device=queries.device).expand(*trace.k.shape[:2], -1, -1)
    tried = torch.cat([queries[:, :, :1], queries[:, :, -1:], queries[:, :, :1] - queries[:, :, -1:]], dim=2)
    seen = weights(trace, torch.cat([torch.zeros_like(basis[:, :, :1]), basis, tried], dim=2), position)
    level, positive = seen.clamp(min=1e-300).log(), seen > 1e-300
    slopes = (level[:, :, 1 : d + 1] - level[:, :, :1]).mT
    same = bool((positive == positive[:, :, :1]).all())
    for keys in [trace.k * d**-0.5, *([slopes] if same else [])]:
        rest = level[:, :, d + 1 :] - tried @ keys.mT
        step, both = rest - rest[:, :, :1], positive[:, :, d + 1 :] & positive[:, :, d + 1 : d + 2]
        middle = (step * both).sum(-1, keepdim=True) / both.sum(-1, keepdim=True).clamp(min=1)
        if ((step - middle) * both).abs().max() < 1e-6:
            return keys
    return None


def span_residual(seen: Float[Tensor, "... m s"]) -> Float[Tensor, "... s"]:
    """‖e_i − P e_i‖² for each token i, with P the projection onto the span of the m rows of weights.

    It equals min_q ‖e_i − A(q)‖² where A(q) takes every value in that span.
    """
    _, sigma, right = torch.linalg.svd(seen, full_matrices=False)
    kept = sigma > sigma[..., :1] * max(seen.shape[-2:]) * torch.finfo(sigma.dtype).eps
    return 1 - (right.square() * kept[..., None]).sum(-2)


def best_residual(seen: Float[Tensor, "... m s"]) -> Float[Tensor, "... s"]:
    """min over the m queries of ‖e_i − A(q)‖² = 1 − 2 A_i + ‖A‖², for each token i."""
    return (1 - 2 * seen + seen.square().sum(-1, keepdim=True)).amin(-2)


def jacobian(trace: Trace, queries: Float[Tensor, "b h m k"], position: int) -> Float[Tensor, "b h m s k"]:
    """∂A(q)/∂q at each of the m queries, by forward-mode differentiation."""
    b, h, m, d = queries.shape
    identity = torch.eye(position + 1, dtype=trace.v.dtype, device=trace.v.device).expand(b, h, -1, -1)
    state = state_before(trace, position, identity)
    repeated = queries[:, :, :, None].repeat(1, 1, 1, d, 1).flatten(2, 3)  # b h (m k) k
    channels = torch.eye(d, dtype=queries.dtype, device=queries.device).repeat(m, 1).expand_as(repeated)
    change = derivative(lambda q: answers(trace, q, position, state, identity), repeated, channels.clone())
    return change.unflatten(2, (m, d)).mT


def independence(
    trace: Trace, queries: Float[Tensor, "b h m k"], tokens: Int[Tensor, "m"], position: int
) -> tuple[Float[Tensor, "b h m"], Float[Tensor, "b h m"]]:
    """How far a small change of the j-th query can change the weight of token i = tokens[j] alone: (leverage, range).

    With J = ∂A/∂q (n × d_key) at the j-th query:
    leverage  [J J⁺]_ii = max_δq (δA_i)²/‖δA‖²; for one J its mean over all n tokens is rank(J)/n ≤ d_key/n
    range     max_δq |δA_i|/‖δq‖ with all other weights held fixed, which is the distance of row i of J from the span
              of its other rows: 1/√[(J Jᵀ)⁺]_ii where the leverage is 1, and 0 elsewhere
    """
    left, sigma, _ = torch.linalg.svd(jacobian(trace, queries, position), full_matrices=False)
    kept = sigma > TOLERANCE * sigma[..., :1].clamp(min=1e-300)
    row = left[:, :, torch.arange(len(tokens), device=left.device), tokens]
    leverage = (row.square() * kept).sum(-1)
    inverse = (row.square() * kept / sigma.square().clamp(min=1e-300)).sum(-1)
    alone = leverage > 1 - 1e-6
    return leverage, torch.where(alone, inverse.clamp(min=1e-300).rsqrt(), 0.0)


def moved(
    trace: Trace, count: int, position: int, rng: np.random.Generator
) -> tuple[Float[Tensor, "b h m"], Float[Tensor, "b h m"]]:
    """How much more weight an answer has under its own query than under queries for other answers, at that position.

    First A_i(query for answer i) − mean of A_i(queries for other answers), second the same for |A|/Σ|A|. m is `count`,
    or the number of queries with an answer in the sequence with the fewest; 0 if that is below 2.
    """
    b, h = trace.q.shape[:2]
    has_answer = trace.source != IGNORE
    fewest = int(has_answer.sum(1).min())
    if fewest < 2:
        return trace.q.new_zeros(b, h, 0), trace.q.new_zeros(b, h, 0)
    order = torch.from_numpy(rng.random(has_answer.shape)).to(has_answer.device).masked_fill(~has_answer, 2).argsort(1)
    chosen = order[:, : min(count, fewest)]
    source = trace.source.gather(1, chosen)
    seen = weights(trace, gather(trace.q, chosen), position)
    results = []
    other = (source[:, :, None] != source[:, None, :])[:, None]
    for weight in (seen, seen.abs() / seen.abs().sum(-1, keepdim=True).clamp(min=1e-300)):
        # on[q, j]: the weight that query q gives to the answer of query j.
        on = weight.gather(3, source[:, None, None].expand(-1, h, source.shape[1], -1))
        others = (on * other).sum(2) / other.sum(2).clamp(min=1)
        results.append(on.diagonal(dim1=2, dim2=3) - others)
    return results[0], results[1]


def is_face(keys: Float[np.ndarray, "n d"], members: Bool[np.ndarray, "n"]) -> bool:
    """Whether the members form a face of the convex hull of the keys.

    That is, some q and c have k_i·q = c for all members i and k_j·q ≤ c − 1 for all other tokens j. If and only if so,
    the softmax weights of a query can come arbitrarily close to being equal on the members and zero elsewhere.
    """
    inside, outside = keys[members], keys[~members]
    if not len(outside):
        return True
    found = linprog(
        np.zeros(keys.shape[1] + 1),
        A_ub=np.c_[outside, -np.ones(len(outside))],
        b_ub=-np.ones(len(outside)),
        A_eq=np.c_[inside, -np.ones(len(inside))],
        b_eq=np.zeros(len(inside)),
        bounds=(None, None),
    )
    return bool(found.status == 0)


def least_leak(reader: Float[np.ndarray, "n d"], members: Bool[np.ndarray, "n"]) -> float:
    """min_q Σ_{j∉T} |k̃_j·q| subject to k̃_i·q = 1 for all members i ∈ T; infinite where no q satisfies this."""
    inside, outside = reader[members], reader[~members]
    n, d = outside.shape
    slack = np.eye(n)
    found = linprog(
        np.r_[np.zeros(d), np.ones(n)],
        A_ub=np.block([[outside, -slack], [-outside, -slack]]),
        b_ub=np.zeros(2 * n),
        A_eq=np.c_[inside, np.zeros((len(inside), n))],
        b_eq=np.ones(len(inside)),
        bounds=[(None, None)] * d + [(0, None)] * n,
    )
    return float(found.fun) if found.status == 0 else np.inf
