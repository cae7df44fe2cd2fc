"""The weights a mechanism gives to every past token: exact where it is linear in v, an influence where it isn't."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from recall_lab.mixer.base import Trace
from recall_lab.probe.base import IGNORE, Row, bins, exact, mean_row, spread_rows
from recall_lab.shapes import Attention


@torch.no_grad()
def effective_attention(
    trace: Trace,
    rng: np.random.Generator,
    *,
    top: int = 4,
    sink: int = 1,
    token_bins: int = 0,
    matrix: bool = False,
) -> list[Row]:
    """How the weights of the asking places are spread, a head at a time; of all places where nothing is asked.

    top     how many of the largest |weights| top_mass counts
    sink    how many first tokens sink_mass counts
    token_bins  bins, equal in the logarithm, of the tokens that a query sees, for target_share_by_tokens; 0: none
    matrix  whether the first sequence's weights are given too, a row an entry (metric weight; columns query, token)

    With |A| the absolute weights of a query divided by their sum, as distributions over queries (column statistic):
      target_weight     A at the place that holds the answer
      target_share      |A| there
      entropy           of |A|, in nats; effective_tokens: e^H
      top_mass          Σ of the `top` largest |A|
      distance          Σ |A|_ts (t − s)
      sink_mass         Σ of |A| over the first `sink` tokens
    and per head static_share (see `static_share`) and residual, ‖A v − o‖/‖o‖ in this very forward pass.
    For a mechanism that is not linear in v all of them are of the influence (see `influence`) and named so.
    """
    linear = trace.mixer.linear_in_v
    attention = trace.mixer.effective_attention(trace.q, trace.k, trace.gates) if linear else influence(trace)
    prefix = "" if linear else "influence_"
    asked = trace.source != IGNORE
    queries = asked if asked.any() else torch.ones_like(asked)
    rows: list[Row] = []
    for head in range(attention.shape[1]):
        found = spread(attention[:, head], queries, trace.source, top, sink, token_bins)
        found.append(mean_row("static_share", static_share(attention[:, head], queries)))
        if linear:
            error = (attention[:, head] @ trace.v[:, head] - trace.o[:, head]).norm() / trace.o[:, head].norm()
            found.append({"metric": "residual", "value": float(error)})
        if matrix:
            found += matrix_rows(attention[0, head], trace.source[0])
        where = {"layer": trace.layer, "head": head, "d_key": trace.k.shape[-1]}
        rows += [{**where, **row, "metric": prefix + row["metric"]} for row in found]
    return rows


def spread(
    attention: Float[Tensor, "b t s"], queries: Tensor, source: Tensor, top: int, sink: int, token_bins: int
) -> list[Row]:
    """The distributions over the marked queries (b t booleans) of one head's weights."""
    row, place = queries.nonzero(as_tuple=True)
    weight = attention[row, place]
    share = weight.abs() / weight.abs().sum(-1, keepdim=True).clamp(min=1e-30)
    entropy = torch.special.entr(share).sum(-1)
    here = torch.arange(share.shape[-1], device=share.device)
    rows: list[Row] = []
    answer = source[row, place]
    held = answer != IGNORE
    if held.any():
        index = answer[held][:, None]
        rows += spread_rows("target_weight", weight[held].gather(1, index))
        target = share[held].gather(1, index)[:, 0]
        rows += spread_rows("target_share", target)
        seen = place[held].cpu().numpy() + 1
        for chosen in bins(seen - 1, token_bins) if token_bins else []:
            rows += spread_rows("target_share_by_tokens", target[chosen], tokens=float(seen[chosen].mean()))
    rows += spread_rows("entropy", entropy)
    rows += spread_rows("effective_tokens", entropy.exp())
    rows += spread_rows("top_mass", share.topk(min(top, share.shape[-1])).values.sum(-1))
    rows += spread_rows("distance", (share * (place[:, None] - here)).sum(-1))
    return rows + spread_rows("sink_mass", share[:, :sink].sum(-1))


def static_share(attention: Float[Tensor, "b t s"], queries: Tensor) -> Float[Tensor, "b"]:
    """Var_i(E_q A_qi)/Var(A) over queries of the second half and tokens of the first, which all of them see.

    0: every query weighs tokens of its own; 1: all queries weigh them alike. The variance that a mean over so few
    queries has by chance is taken off. One number a sequence; zero where all weights are equal, or one query asks.
    """
    half = attention.shape[-1] // 2
    weight = exact(attention[:, half:, :half])
    chosen = queries[:, half:, None].expand(-1, -1, half).to(weight.device)
    count = queries[:, half:].sum(1).clamp(min=1).to(weight.device)
    mean = (weight * chosen).sum(1) / count[:, None]
    grand = mean.mean(1, keepdim=True) if half else mean.sum(1, keepdim=True)
    total = ((weight - grand[:, None]).square() * chosen).sum((1, 2)) / (count * max(half, 1))
    between = (mean - grand).square().sum(1) / max(half, 1)
    within = (total - between) * count / (count - 1).clamp(min=1)
    between = (between - within / count).clamp(min=0)
    found = between / (between + within).clamp(min=1e-300)
    return torch.where((total > 0) & (count > 1), found, 0.0)


def influence(trace: Trace, chunk: int = 1 << 26) -> Attention:
    """‖∂o_t/∂v_s‖_F/√d_v (b h t s): for a mechanism linear in v it would be |A|.

    By batched reverse mode, as many (place, channel) at a time as keep the gradients below `chunk` numbers.
    """
    with torch.enable_grad():
        v = trace.v.detach().clone().requires_grad_()
        o, _ = trace.mixer.parallel(trace.q.detach(), trace.k.detach(), v, trace.gates)
        length, width = o.shape[2:]
        wanted = torch.eye(length * width, dtype=o.dtype, device=o.device).unflatten(1, (length, width))
        size = []
        for some in wanted.split(max(1, chunk // v.numel())):
            # Sequences and heads never mix, so that one cotangent serves all of them at once.
            cotangent = some[:, None, None].expand(-1, *o.shape[:2], -1, -1)
            (gradient,) = torch.autograd.grad(o, v, cotangent, retain_graph=True, is_grads_batched=True)
            size.append(gradient.square().sum(-1))
    power = torch.cat(size).unflatten(0, (length, width)).sum(1)
    return (power / width).sqrt().permute(1, 2, 0, 3).detach()


def matrix_rows(attention: Float[Tensor, "t s"], source: Tensor) -> list[Row]:
    """One row an entry of the causal part; column source: the place that holds the query's answer."""
    query, token = torch.tril_indices(*attention.shape, device=attention.device)
    entries = zip(query.tolist(), token.tolist(), attention[query, token].tolist(), source[query].tolist(), strict=True)
    return [{"metric": "weight", "value": a, "query": t, "token": s, "source": answer} for t, s, a, answer in entries]
