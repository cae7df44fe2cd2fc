"""What a query can change at a fixed history: rank, one-hot residual, independence, subsets, and a swap of queries."""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import linprog
from torch import Tensor

from recall_lab.mixer.base import Trace
from recall_lab.probe.base import (
    IGNORE,
    Row,
    answers,
    double,
    effective_rank,
    gather,
    mean_row,
    memory_before,
    query_scale,
    share_row,
    weights,
)

TOLERANCE = 1e-9
"""Relative error, in float64, below which a map counts as linear, and two weights as equal."""


@torch.no_grad()
def dynamic_access(
    trace: Trace,
    rng: np.random.Generator,
    *,
    sequences: int = 4,
    places: int = 16,
    sharpen: Sequence[float | int] = (1, 4, 16, 64),
    subsets: Sequence[int] = (),
    draws: int = 20,
    purity: float | int = 0.9,
) -> list[Row]:
    """What other queries would see from the last place of a sequence, its history unchanged. In float64 throughout.

    sequences  how many of the trace's are looked at
    places     how many tokens, and asking places, are looked at where all would be too many
    sharpen    factors on a query, tried where a one-hot weight is looked for
    subsets    sizes, up to n, of the random subsets of tokens that a query is asked to select; none: not tried
    draws      subsets of each size
    purity     share of Σ|A| that a selected subset must hold

    A row each, with columns layer, head, d_key and tokens (n):
      rank              of the query → weights matrix: singular values above σ₁ · max(shape) · 2.2e-16
      access_rank       e^H of its singular values
      one_hot_residual  mean over tokens i of min_q ‖e_i − A(q)‖²; where A is linear in q it is 1 − rank/n
      independence      most of the squared change of A that a small change of query can put on the token asked for:
                        max_δq (δA_i)²/‖δA‖², mean over tokens
      held_range        change of that token's weight for the best change of query, over the norm of the latter, with
                        all other weights held; 0 where it cannot be changed alone
      moved             weight that an answer gains when its own query takes the place of another's
      moved_share       the same of |A|/Σ|A|
      selectable        share of subsets T (column subset) that some query selects, giving the members equal weights
                        and together at least `purity` of Σ|A|, by linear programme: see `least_leak` where A is linear
                        in q, `is_face` where log A is, over the tokens that any query has reached; none elsewhere
    None for a mechanism that is not linear in v.
    """
    if not trace.mixer.linear_in_v:
        return []
    trace = double(_first(trace, sequences))
    last, (b, h, n, d) = trace.q.shape[2] - 1, trace.k.shape
    keys = query_scale(trace) * trace.k
    random = torch.from_numpy(rng.standard_normal((b, h, n, d))).to(keys)
    random = random / random.norm(dim=-1, keepdim=True) * keys.norm(dim=-1, keepdim=True)
    seen = weights(trace, torch.cat([keys, random], dim=2), last)
    linear = _linear(trace, keys, last)
    if linear:
        readers = weights(trace, torch.eye(d, dtype=keys.dtype, device=keys.device).expand(b, h, -1, -1), last)
    else:
        sharp = weights(trace, torch.cat([factor * keys for factor in sharpen], dim=2), last)
        hulls = softmax_keys(trace, keys, last) if subsets else None
    some = np.sort(rng.permutation(n)[:places])
    independent, held = independence(trace, keys[:, :, some], torch.from_numpy(some), last)
    gained, gained_share = moved(trace, places, last, rng)
    rows: list[Row] = []
    for head in range(h):
        sigma = torch.linalg.svdvals(seen[:, head])
        limit = sigma[:, :1] * max(seen.shape[-2:]) * torch.finfo(sigma.dtype).eps
        residual = span_residual(seen[:, head]) if linear else best_residual(sharp[:, head])
        found = [
            mean_row("rank", (sigma > limit).sum(-1)),
            mean_row("access_rank", effective_rank(sigma)),
            mean_row("one_hot_residual", residual),
            mean_row("independence", independent[:, head]),
            mean_row("held_range", held[:, head]),
        ]
        if gained.numel():
            found += [mean_row("moved", gained[:, head]), mean_row("moved_share", gained_share[:, head])]
        for size in [size for size in subsets if size <= n]:
            hits = []
            for draw in range(draws):
                members = np.isin(np.arange(n), rng.choice(n, size, replace=False))
                if linear:
                    leak = least_leak(readers[draw % b, head].mT.cpu().numpy(), members)
                    hits.append(leak <= (1 - purity) / purity * size)
                elif hulls is not None:
                    reached = (seen[draw % b, head] > 0).any(0).cpu().numpy()
                    hull = hulls[draw % b, head].cpu().numpy()[reached]
                    hits.append(reached[members].all() and is_face(hull, members[reached]))
            if hits:
                found.append(share_row("selectable", np.array(hits), subset=size))
        rows += [{"layer": trace.layer, "head": head, "d_key": d, "tokens": n, **row} for row in found]
    return rows


def _first(trace: Trace, sequences: int) -> Trace:
    gates = {name: gate[:sequences] for name, gate in trace.gates.items()}
    cut = {name: getattr(trace, name)[:sequences] for name in ("q", "k", "v", "o", "source")}
    return replace(trace, gates=gates, **cut)


def _linear(trace: Trace, queries: Float[Tensor, "b h m k"], place: int) -> bool:
    """Whether A(q) is linear in q, tried on two queries, their sum and a multiple."""
    one, two = queries[:, :, :1], queries[:, :, -1:]
    a, b, both = weights(trace, torch.cat([one, two, 3 * one - 2 * two], dim=2), place).unbind(2)
    return bool((both - 3 * a + 2 * b).abs().max() < TOLERANCE * a.abs().max().clamp(min=1e-300))


def softmax_keys(trace: Trace, queries: Float[Tensor, "b h m k"], place: int) -> Float[Tensor, "b h s k"] | None:
    """Vectors κ with A_i(q) ∝ e^{κ_i·q + b_i} over the tokens that have any weight; None where there are none such.

    Tried are the keys, and, where every query sees the same tokens, the slopes of log A.
    """
    d = trace.k.shape[-1]
    basis = torch.eye(d, dtype=queries.dtype, device=queries.device).expand(*trace.k.shape[:2], -1, -1)
    tried = torch.cat([queries[:, :, :1], queries[:, :, -1:], queries[:, :, :1] - queries[:, :, -1:]], dim=2)
    seen = weights(trace, torch.cat([torch.zeros_like(basis[:, :, :1]), basis, tried], dim=2), place)
    level, there = seen.clamp(min=1e-300).log(), seen > 1e-300
    slopes = (level[:, :, 1 : d + 1] - level[:, :, :1]).mT
    same = bool((there == there[:, :, :1]).all())
    for keys in [trace.k * d**-0.5, *([slopes] if same else [])]:
        rest = level[:, :, d + 1 :] - tried @ keys.mT
        step, both = rest - rest[:, :, :1], there[:, :, d + 1 :] & there[:, :, d + 1 : d + 2]
        middle = (step * both).sum(-1, keepdim=True) / both.sum(-1, keepdim=True).clamp(min=1)
        if ((step - middle) * both).abs().max() < 1e-6:
            return keys
    return None


def span_residual(seen: Float[Tensor, "b m s"]) -> Float[Tensor, "b s"]:
    """‖e_i − P e_i‖² for the span of the rows: what the best query leaves where all of the span can be reached."""
    _, sigma, right = torch.linalg.svd(seen, full_matrices=False)
    kept = sigma > sigma[:, :1] * max(seen.shape[-2:]) * torch.finfo(sigma.dtype).eps
    return 1 - (right.square() * kept[..., None]).sum(1)


def best_residual(seen: Float[Tensor, "b m s"]) -> Float[Tensor, "b s"]:
    """min over the given queries of ‖e_i − A(q)‖² = 1 − 2A_i + ‖A‖²."""
    return (1 - 2 * seen + seen.square().sum(-1, keepdim=True)).amin(1)


def jacobian(trace: Trace, queries: Float[Tensor, "b h m k"], place: int) -> Float[Tensor, "b h m s k"]:
    """∂A(q)/∂q at each query, by forward mode, every channel at once."""
    b, h, m, d = queries.shape
    eye = torch.eye(place + 1, dtype=trace.v.dtype, device=trace.v.device).expand(b, h, -1, -1)
    memory = memory_before(trace, place, eye)
    repeated = queries[:, :, :, None].repeat(1, 1, 1, d, 1).flatten(2, 3)
    tangent = torch.eye(d, dtype=queries.dtype, device=queries.device).repeat(m, 1).expand_as(repeated)
    with warnings.catch_warnings():
        # torch's own first use of forward mode loads something that it calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        _, change = torch.func.jvp(lambda q: answers(trace, q, place, memory, eye), (repeated,), (tangent.clone(),))
    return change.unflatten(2, (m, d)).mT


def independence(
    trace: Trace, queries: Float[Tensor, "b h m k"], tokens: Tensor, place: int
) -> tuple[Float[Tensor, "b h m"], Float[Tensor, "b h m"]]:
    """How far a small change of query i can change the weight of tokens[i] alone.

    With J = ∂A/∂q (n × d): the leverage [J J⁺]_ii = max_δq (δA_i)²/‖δA‖², which averages rank(J)/n ≤ d/n over all
    tokens; and with every other weight held, |δA_i|/‖δq‖ at best, the distance of J's row i from the span of the
    others: 1/√[(J Jᵀ)⁺]_ii where the leverage is 1, and nought elsewhere.
    """
    left, sigma, _ = torch.linalg.svd(jacobian(trace, queries, place), full_matrices=False)
    kept = sigma > TOLERANCE * sigma[..., :1].clamp(min=1e-300)
    row = left[:, :, torch.arange(len(tokens)), tokens.to(left.device)]
    leverage = (row.square() * kept).sum(-1)
    inverse = (row.square() * kept / sigma.square().clamp(min=1e-300)).sum(-1)
    alone = leverage > 1 - 1e-6
    return leverage, torch.where(alone, inverse.clamp(min=1e-300).rsqrt(), 0.0)


def moved(
    trace: Trace, count: int, place: int, rng: np.random.Generator
) -> tuple[Float[Tensor, "b h m"], Float[Tensor, "b h m"]]:
    """A_src(own query) − mean of A_src(queries for other answers), at up to `count` asking places of each sequence.

    Also the same of |A|/Σ|A|. Empty where fewer than two answers are asked for.
    """
    b, h = trace.q.shape[:2]
    asked = trace.source != IGNORE
    fewest = int(asked.sum(1).min())
    if fewest < 2:
        return trace.q.new_zeros(b, h, 0), trace.q.new_zeros(b, h, 0)
    order = torch.from_numpy(rng.random(asked.shape)).to(asked.device).masked_fill(~asked, 2).argsort(1)
    chosen = order[:, : min(count, fewest)]
    source = trace.source.gather(1, chosen)
    seen = weights(trace, gather(trace.q, chosen), place)
    results = []
    other = (source[:, :, None] != source[:, None, :])[:, None]
    for weight in (seen, seen.abs() / seen.abs().sum(-1, keepdim=True).clamp(min=1e-300)):
        # on[q, j]: the weight that query q gives to the answer of query j.
        on = weight.gather(3, source[:, None, None].expand(-1, h, source.shape[1], -1))
        others = (on * other).sum(2) / other.sum(2).clamp(min=1)
        results.append(on.diagonal(dim1=2, dim2=3) - others)
    return results[0], results[1]


def is_face(keys: Float[np.ndarray, "n d"], members: np.ndarray) -> bool:
    """Whether the members are a face of the keys' convex hull: k_i·q = c on them, k_j·q ≤ c − 1 on all others.

    Then, and only then, a sharp enough query puts softmax's whole mass on the members, equally.
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
    return found.status == 0


def least_leak(reader: Float[np.ndarray, "n d"], members: np.ndarray) -> float:
    """min_q Σ_{j∉T} |k̃_j·q| under k̃_i·q = 1 for i ∈ T; infinite where no q gives all members that weight."""
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
