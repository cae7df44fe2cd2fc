"""The weights of every query over the past: exact where the mechanism is linear in v, an influence elsewhere."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from recall_lab.checks import flag, whole_number
from recall_lab.mixer.base import Trace
from recall_lab.probe.base import Row, bins, state_vector
from recall_lab.probe.queries import derivative, double, exact
from recall_lab.probe.rows import mean_row, spread_rows
from recall_lab.shapes import Attention, State
from recall_lab.task.base import IGNORE

CELLS = 128
"""The largest number of rows and columns of the matrix that is written out."""


@torch.no_grad()
def effective_attention(
    trace: Trace,
    rng: object,
    *,
    top: int = 4,
    sink: int = 1,
    token_bins: int = 8,
    matrix: bool = True,
) -> list[Row]:
    """How the weights of the queries with an answer are distributed, per head; of all queries where none has one.

    top         how many of the largest |weights| top_mass sums
    sink        how many of the first tokens sink_mass sums
    token_bins  bins of the number of tokens that a query sees, of equal width in the logarithm, for
                target_share_by_tokens; 0: no such rows
    matrix      whether the weights of the first sequence are written out too, thinned to 128 × 128: see `matrix_rows`

    With |A| the absolute weights of a query divided by their sum, as distributions over queries (column statistic):
      target_weight     A at the position that holds the answer
      target_share      |A| at that position; target_share_by_tokens: by the number of tokens seen (column tokens)
      entropy           of |A|, in nats
      effective_tokens  e^entropy; 0 where all weights are zero
      top_mass          Σ of the `top` largest |A|
      distance          Σ |A|_ts (t − s)
      sink_mass         Σ of |A| over the first `sink` tokens
    and, per head, static_share (see `static_share`) and residual, ‖A v − o‖/‖o‖, 0 where A v and o are zero.
    For a mechanism that is not linear in v, the same of its influence (see `influence`), with the prefix influence_.
    Raises ValueError for an option outside its range.
    """
    whole_number("top", top)
    whole_number("sink", sink, 0)
    whole_number("token_bins", token_bins, 0)
    flag("matrix", matrix)
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
            o = trace.o[:, head]
            error = (attention[:, head] @ trace.v[:, head] - o).norm() / o.norm().clamp(min=torch.finfo(o.dtype).tiny)
            found.append({"metric": "residual", "value": float(error)})
        if matrix:
            found += matrix_rows(attention[0, head], trace.source[0])
        where = {"layer": trace.layer, "head": head, "d_key": trace.k.shape[-1]}
        rows += [{**where, **row, "metric": prefix + row["metric"]} for row in found]
    return rows


def spread(
    attention: Float[Tensor, "b t s"],
    queries: Bool[Tensor, "b t"],
    source: Int[Tensor, "b t"],
    top: int,
    sink: int,
    token_bins: int,
) -> list[Row]:
    """The distributions of `effective_attention` for one head, over the marked queries."""
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
        index, asker = answer[held][:, None], sequence[held]
        target = share[held].gather(1, index)[:, 0]
        rows += spread_rows("target_weight", weight[held].gather(1, index)[:, 0], asker)
        rows += spread_rows("target_share", target, asker)
        seen = position[held].cpu().numpy() + 1
        for chosen in bins(seen - 1, token_bins) if token_bins else []:
            tokens = float(seen[chosen].mean())
            rows += spread_rows("target_share_by_tokens", target[chosen], asker[chosen], tokens=tokens)
    measured = {
        "entropy": entropy,
        "effective_tokens": entropy.exp() * (total[:, 0] > 0),
        "top_mass": share.topk(min(top, share.shape[-1])).values.sum(-1),
        "distance": (share * (position[:, None] - token)).sum(-1),
        "sink_mass": share[:, :sink].sum(-1),
    }
    return rows + [row for metric, values in measured.items() for row in spread_rows(metric, values, sequence)]


def static_share(attention: Float[Tensor, "b t s"], queries: Bool[Tensor, "b t"]) -> Float[Tensor, "b"]:
    """Var_s(E_t A_ts)/Var(A) per sequence, over the marked queries t of the second half and the tokens s of the first.

    0: every query weighs tokens of its own; 1: all queries weigh the tokens alike. All these queries see all these
    tokens. The variance that a mean over so few queries has by chance is subtracted. 0 where all weights are equal,
    and where fewer than two queries are marked.
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


def influence(trace: Trace, chunk: int = 1 << 23) -> Attention:
    """‖∂o_t/∂v_s‖_F/√d_value, b h t s; for a mechanism that is linear in v this is |A|.

    Forward mode through the mechanism's recurrence, for a block of positions s at a time: the derivatives of the state
    by the values of one block have at most `chunk` numbers (or are those of a single position). So memory grows with
    n², as the result does, and not with n² d². In float64, because a long product of derivatives may become too small
    for float32.
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
        d_state = trace.v.new_zeros(*trace.v.shape[:2], 0, numbers)  # of the state by the values since start
        for t in range(start, length):
            after, d_o, d_state = _derivatives(trace, t, after, d_state, t < stop)
            power = d_o.square().sum(-1).unflatten(-1, (-1, width)).sum(-1)  # b h s
            found[:, :, t, start : start + power.shape[-1]] = (power / width).sqrt().to(found)
            state = after if t == stop - 1 else state
    return found


def _derivatives(
    trace: Trace, t: int, state: State, d_state: Float[Tensor, "b h c x"], new: bool
) -> tuple[State, Float[Tensor, "b h e v"], Float[Tensor, "b h e y"]]:
    """The state after position t, and the derivatives of o_t and of that state by the values so far.

    state    the state before t
    d_state  derivatives of that state, as one vector, by c numbers
    new      whether the channels of v_t follow these c numbers
    Sequences and heads do not mix in a recurrence, so one direction serves all of them at once.
    """
    here = slice(t, t + 1)
    q, k, v = trace.q[:, :, here], trace.k[:, :, here], trace.v[:, :, here]
    gates = {name: gate[:, :, here] for name, gate in trace.gates.items()}
    shapes = {name: part.shape for name, part in state.items()}
    sizes = [part.shape[2:].numel() for part in state.values()] + [v.shape[-1]]

    def step(x: Float[Tensor, "b h z"]) -> Float[Tensor, "b h w"]:
        """The state and v_t as one vector → o_t and the next state as one vector."""
        *parts, values = x.split(sizes, dim=-1)
        before = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        o, after = trace.mixer.recurrence(q, k, values[:, :, None], gates, before)
        return torch.cat([o.flatten(2), state_vector(after)], dim=-1)

    def along(directions: Float[Tensor, "b h c z"]) -> Float[Tensor, "b h c w"]:
        moved = directions.permute(2, 0, 1, 3)
        return torch.func.vmap(lambda d: derivative(step, x, d))(moved).permute(1, 2, 0, 3)

    x = torch.cat([*(part.flatten(2) for part in state.values()), v.flatten(2)], dim=-1)
    inputs = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand(*x.shape[:2], -1, -1)
    split = d_state.shape[-1]
    by_values = inputs[:, :, split:] if new else inputs[:, :, :0]
    if d_state.shape[2] < split:
        found = along(torch.cat([F.pad(d_state, (0, v.shape[-1])), by_values], dim=2))
    else:  # the derivatives by the inputs serve all directions
        by_inputs = along(inputs)
        found = d_state @ by_inputs[:, :, :split]
        found = torch.cat([found, by_inputs[:, :, split:]], dim=2) if new else found
    after = trace.mixer.recurrence(q, k, v, gates, state)[1]
    return after, found[..., : v.shape[-1]], found[..., v.shape[-1] :]


def matrix_rows(attention: Float[Tensor, "t s"], source: Int[Tensor, "t"], cells: int = CELLS) -> list[Row]:
    """Entries of the causal part of A, a row each: metric weight, columns query (t), token (s), source and block.

    Up to `cells` positions: every entry, with block 1. Beyond: of every block of queries and every block of tokens one
    entry. Its query is the first of the block that has an answer, or else the first of the block; its token is the one
    of the block with the largest |A|. A mean would hide a single large weight, and cancel signs.
    source: the position that holds the query's answer, IGNORE where it has none. block: the positions in a block, so
    that an entry's cell in the picture is (query // block, token // block).
    """
    length = attention.shape[0]
    block = -(-length // cells)
    source, attention = source.cpu(), attention.cpu()
    rows: list[Row] = []
    for start in range(0, length, block):
        asking = (source[start : start + block] != IGNORE).nonzero()
        query = start + (int(asking[0]) if len(asking) else 0)
        seen = attention[query, : query + 1]
        tokens = torch.cat([some.abs().argmax(0, keepdim=True) for some in seen.split(block)])
        tokens = tokens + block * torch.arange(len(tokens))
        where = {"query": query, "source": int(source[query]), "block": block}
        entries: Sequence[tuple[int, float]] = list(zip(tokens.tolist(), seen[tokens].tolist(), strict=True))
        rows += [{"metric": "weight", "value": value, "token": token, **where} for token, value in entries]
    return rows
