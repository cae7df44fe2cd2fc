"""How queries distribute weight over past tokens: A where the mechanism is linear in v, the size of ∂o/∂v elsewhere."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from recall_lab.checks import flag, whole_number
from recall_lab.mixer.base import Trace
from recall_lab.mixer.layer import AnyTrace, LayerTrace
from recall_lab.probe.base import Row, bins, state_vector
from recall_lab.probe.jacobian import influence_of_inputs
from recall_lab.probe.queries import derivative, double, exact
from recall_lab.probe.rows import mean_row, spread_rows
from recall_lab.shapes import Attention, State
from recall_lab.task.base import IGNORE

CELLS = 128
"""Largest number of rows, and of columns, of the matrix of weights that is stored in rows."""


@torch.no_grad()
def effective_attention(
    trace: AnyTrace,
    rng: object,
    *,
    top: int = 4,
    sink: int = 1,
    token_bins: int = 8,
    matrix: bool = True,
) -> list[Row]:
    """Statistics per head of the effective attention A of the queries that have an answer, or of all if none has one.

    top         number of largest shares that top_mass sums
    sink        number of first tokens that sink_mass covers
    token_bins  number of bins, equally wide in the logarithm, of the number of tokens up to the query, for
                target_share_by_tokens; 0: no such rows
    matrix      whether to add the weights of the first sequence, thinned to at most 128 × 128: see `matrix_rows`

    A short convolution of width c carries a token into the keys and values of its own position and the c − 1 positions
    after it. These hold an answer; without a convolution, the position of the answer alone.

    Let p_ts = |A_ts| / Σ_s |A_ts| be the shares of the query at t. Mean and quantiles over queries (column statistic):
      target_weight     A on the answer: the sum over the positions that hold it
      target_share      p on the answer
      target_share_by_tokens  the same by t + 1, the number of tokens up to the query (column tokens: mean of the bin)
      entropy           entropy of p, in nats
      effective_tokens  e^entropy; 0 where all weights are zero
      top_mass          sum of the `top` largest shares
      distance          Σ_s p_ts (t − s)
      sink_mass         Σ_s p_ts over the first `sink` tokens
    One value per head: static_share (see `static_share`), and residual, ‖A v − o‖/‖o‖, 0 where A v and o are zero.
    For a mechanism that is not linear in v, A is its influence (see `influence`), every metric has the prefix
    influence_, and there is no residual. For a layer without queries, keys and values, its inputs take the place of the
    values (see `influence_of_inputs`).
    Raises ValueError for an option outside its range.
    """
    whole_number("top", top)
    whole_number("sink", sink, 0)
    whole_number("token_bins", token_bins, 0)
    flag("matrix", matrix)
    linear = trace if isinstance(trace, Trace) and trace.mixer.linear_in_v else None
    attention = linear.mixer.effective_attention(linear.q, linear.k, linear.gates) if linear else _influence(trace)
    prefix = "" if linear else "influence_"
    width = {"d_key": trace.k.shape[-1]} if isinstance(trace, Trace) else {}
    has_answer = trace.source != IGNORE
    held = max(1, trace.mixer.short_conv) if isinstance(trace, Trace) else 1
    queries = has_answer if has_answer.any() else torch.ones_like(has_answer)
    rows: list[Row] = []
    for head in range(attention.shape[1]):
        found = spread(attention[:, head], queries, trace.source, top, sink, token_bins, held)
        found.append(mean_row("static_share", static_share(attention[:, head], queries)))
        if linear:
            o = linear.o[:, head]
            error = (attention[:, head] @ linear.v[:, head] - o).norm() / o.norm().clamp(min=torch.finfo(o.dtype).tiny)
            found.append({"metric": "residual", "value": float(error)})
        if matrix:
            found += matrix_rows(attention[0, head], trace.source[0])
        where = {"layer": trace.layer, "head": head, **width}
        rows += [{**where, **row, "metric": prefix + row["metric"]} for row in found]
    return rows


def _influence(trace: AnyTrace) -> Attention:
    assert isinstance(trace, Trace | LayerTrace)
    return influence(trace) if isinstance(trace, Trace) else influence_of_inputs(trace)


def spread(
    attention: Float[Tensor, "b t s"],
    queries: Bool[Tensor, "b t"],
    source: Int[Tensor, "b t"],
    top: int,
    sink: int,
    token_bins: int,
    width: int = 1,
) -> list[Row]:
    """The rows of `effective_attention` with a column statistic, for one head, over the queries marked True.

    width  number of positions that hold an answer: its own, given by source, and those after it
    """
    sequence, position = queries.nonzero(as_tuple=True)
    weight = attention[sequence, position]  # q s, one row per marked query
    total = weight.abs().sum(-1, keepdim=True)
    share = weight.abs() / total.clamp(min=1e-30)
    entropy = torch.special.entr(share).sum(-1)
    token = torch.arange(share.shape[-1], device=share.device)
    answer = source[sequence, position]
    held = answer != IGNORE
    rows: list[Row] = []
    if held.any():
        after, query_sequence = token - answer[held][:, None], sequence[held]
        on_answer = (after >= 0) & (after < width)
        target = (share[held] * on_answer).sum(-1)
        rows += spread_rows("target_weight", (weight[held] * on_answer).sum(-1), query_sequence)
        rows += spread_rows("target_share", target, query_sequence)
        seen = position[held].cpu().numpy() + 1
        for chosen in bins(seen - 1, token_bins) if token_bins else []:
            tokens = float(seen[chosen].mean())
            rows += spread_rows("target_share_by_tokens", target[chosen], query_sequence[chosen], tokens=tokens)
    measured = {
        "entropy": entropy,
        "effective_tokens": entropy.exp() * (total[:, 0] > 0),
        "top_mass": share.topk(min(top, share.shape[-1])).values.sum(-1),
        "distance": (share * (position[:, None] - token)).sum(-1),
        "sink_mass": share[:, :sink].sum(-1),
    }
    return rows + [row for metric, values in measured.items() for row in spread_rows(metric, values, sequence)]


def static_share(attention: Float[Tensor, "b t s"], queries: Bool[Tensor, "b t"]) -> Float[Tensor, "b"]:
    """Share of the variance of A that does not depend on the query: Var_s(E_t A_ts)/Var(A), one value per sequence.

    t runs over the marked queries in the second half of the sequence, s over the tokens in the first half, so that
    every query sees every token. 1: all queries have the same weights; 0: the mean weights of all tokens are equal.
    The numerator is corrected for the variance that a mean over few queries has by chance. The result is 0 if all
    weights are equal, or if fewer than two queries are marked.
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


def influence(trace: Trace, chunk: int = 1 << 20) -> Attention:
    """‖∂o_t/∂v_s‖_F/√d_value; for a mechanism that is linear in v this is |A|.

    Computed by forward-mode differentiation of the recurrence, one block of positions s at a time. The block is chosen
    so that the derivatives of the state with respect to its values have at most `chunk` numbers, which then fit into a
    processor's cache, but it has at least one position. The memory needed thus grows as n², like the result, not as
    n² d². In float64, because a long product of derivatives may underflow in float32.
    """
    found = torch.zeros(*trace.v.shape[:2], *trace.v.shape[2:3] * 2, dtype=trace.v.dtype, device=trace.v.device)
    trace = double(trace)
    length, width = trace.v.shape[2:]
    final = trace.mixer.parallel(trace.q, trace.k, trace.v, trace.gates)[1]
    block = max(1, chunk // (width * max(1, sum(part.numel() for part in final.values()))))
    state = trace.mixer.empty_state(trace.q, trace.v)
    for start in range(0, length, block):
        stop = min(start + block, length)
        after = state
        numbers = sum(part.shape[2:].numel() for part in state.values())
        d_state = trace.v.new_zeros(*trace.v.shape[:2], 0, numbers)  # of the state with respect to v from start on
        for t in range(start, length):
            after, d_o, d_state = _derivatives(trace, t, after, d_state, t < stop)
            power = d_o.square().sum(-1).unflatten(-1, (-1, width)).sum(-1)  # b h s
            found[:, :, t, start : start + power.shape[-1]] = (power / width).sqrt().to(found)
            state = after if t == stop - 1 else state
    return found


def _derivatives(
    trace: Trace, t: int, state: State, d_state: Float[Tensor, "b h c x"], new: bool
) -> tuple[State, Float[Tensor, "b h e v"], Float[Tensor, "b h e y"]]:
    """The state after position t, and the derivatives of o_t and of that state with respect to e input numbers.

    state    the state before position t
    d_state  derivatives of that state (as one vector of x numbers) with respect to c input numbers, channels of values
    new      whether to add the channels of v_t to these inputs: e = c + d_value, else e = c
    Sequences and heads do not mix in a recurrence, so one direction of differentiation covers all of them.
    """
    here = slice(t, t + 1)
    q, k, v = trace.q[:, :, here], trace.k[:, :, here], trace.v[:, :, here]
    gates = {name: gate[:, :, here] for name, gate in trace.gates.items()}
    shapes = {name: part.shape for name, part in state.items()}
    sizes = [part.shape[2:].numel() for part in state.values()] + [v.shape[-1]]

    def step(x: Float[Tensor, "b h z"]) -> Float[Tensor, "b h w"]:
        """Maps the state and v_t, as one vector, to o_t and the next state, as one vector."""
        *parts, values = x.split(sizes, dim=-1)
        before = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        o, after = trace.mixer.recurrence(q, k, values[:, :, None], gates, before)
        return torch.cat([o.flatten(2), state_vector(after)], dim=-1)

    def along(directions: Float[Tensor, "b h c z"]) -> Float[Tensor, "b h c w"]:
        moved = directions.permute(2, 0, 1, 3)
        return torch.func.vmap(lambda d: derivative(step, x, d))(moved).permute(1, 2, 0, 3)

    x = torch.cat([*(part.flatten(2) for part in state.values()), v.flatten(2)], dim=-1)
    split, width = d_state.shape[-1], v.shape[-1]
    by_values = F.pad(torch.eye(width, dtype=x.dtype, device=x.device), (split, 0)).expand(*x.shape[:2], -1, -1)
    by_values = by_values if new else by_values[:, :, :0]
    if d_state.shape[2] < split:
        found = along(torch.cat([F.pad(d_state, (0, width)), by_values], dim=2))
    else:  # fewer inputs than directions: differentiate by the inputs, then apply the chain rule
        by_state = F.pad(torch.eye(split, dtype=x.dtype, device=x.device), (0, width)).expand(*x.shape[:2], -1, -1)
        found = along(torch.cat([by_state, by_values], dim=2))
        found = torch.cat([d_state @ found[:, :, :split], found[:, :, split:]], dim=2)
    after = trace.mixer.recurrence(q, k, v, gates, state)[1]
    return after, found[..., :width], found[..., width:]


def matrix_rows(attention: Float[Tensor, "t s"], source: Int[Tensor, "t"], cells: int = CELLS) -> list[Row]:
    """Entries A_ts with s ≤ t as rows of the metric weight, with the columns query (t), token (s), source and block.

    A sequence of up to `cells` positions gives every entry, and block is 1. A longer one is divided into blocks of
    `block` positions, and every pair of a block of queries and a block of tokens gives one entry: its query is the
    first in its block with an answer, or else the first; its token is the one with the largest |A| in its block. A mean
    would hide a single large weight and cancel signs. A figure draws the entry at (query // block, token // block).
    source is the position that holds the query's answer, or IGNORE.
    """
    length = attention.shape[0]
    block = -(-length // cells)
    source, attention = source.cpu(), attention.cpu()
    rows: list[Row] = []
    for start in range(0, length, block):
        with_answer = (source[start : start + block] != IGNORE).nonzero()
        query = start + (int(with_answer[0]) if len(with_answer) else 0)
        seen = attention[query, : query + 1]
        tokens = torch.cat([some.abs().argmax(0, keepdim=True) for some in seen.split(block)])
        tokens = tokens + block * torch.arange(len(tokens))
        where = {"query": query, "source": int(source[query]), "block": block}
        entries: Sequence[tuple[int, float]] = list(zip(tokens.tolist(), seen[tokens].tolist(), strict=True))
        rows += [{"metric": "weight", "value": value, "token": token, **where} for token, value in entries]
    return rows
