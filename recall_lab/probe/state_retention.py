"""What a state retains: answers to keys by age and load, a linear decoder, singular values, information in bits."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recall_lab.checks import choice, flag, number, require, whole_number
from recall_lab.mixer.base import Trace
from recall_lab.probe.base import Row, bins, effective_rank, positions, state_vector
from recall_lab.probe.queries import answers, double, exact, query_scale, state_before
from recall_lab.probe.rows import mean_row, share_row
from recall_lab.shapes import State
from recall_lab.task.base import IGNORE
from recall_lab.theory import information


@torch.no_grad()
def state_retention(
    trace: Trace,
    rng: np.random.Generator,
    *,
    after: Sequence[float | int] = (0.25, 0.5, 1.0),
    read: str = "asked",
    age_bins: int = 16,
    age_reads: int = 50,
    spectrum: bool = True,
    lags: Sequence[int] = (1, 4, 16),
    ridge: float | int = 1e-3,
    state_rank: bool = False,
) -> list[Row]:
    """Measures what the state holds at several positions of the sequence.

    after       shares of the sequence after which the state is measured; 1: after the last token
    read        which keys are queried: "all" keys written so far whose pair has not been overwritten by then, or only
                those "asked", which the batch itself queries
    age_bins    number of bins, equally wide in the logarithm, of the age of a pair in tokens; 0: no rows by age
    age_reads   least number of answers per bin; a bin with fewer is merged with its neighbour
    spectrum    whether the singular values of S are measured, for mechanisms that have a matrix S in their state
    lags        lags of a linear decoder; a lag that exceeds the position is skipped; []: no such rows
    ridge       the decoder's penalty, in units of the mean diagonal of its kernel
    state_rank  whether the effective state size is computed; its time grows as length³

    Every row has the columns layer, d_key and position (number of tokens up to the state); rows on keys also have pairs
    (keys in the state). With o the answer to a key and v the value written with it, over all queried keys and heads:
      top1            share of the answers whose nearest candidate value, in angle, is v
      error           E‖o − v‖²/E‖v‖²
      cosine          mean cosine of o and v
      …_by_age        the same per bin of the age of the pair (column age: mean of the bin)
      bits            least information in the state, summed over heads, that allows this top1 (Fano's inequality,
                      `information.bits_kept`)
      bits_per_entry  the same per number of the state
    A key is queried at the scale of the trace's own queries (`query_scale`).
    norm: norm of the state, flattened to a vector. effective_rank, stable_rank, participation, singular_value: see
    `spectra`. decode_top1, decode_control, selectivity, decode_r2: see `decode`. state_rank, state_effective_rank: see
    `effective_state_size`.
    Raises ValueError for an option outside its range, and for a decoder with fewer than 4 sequences.
    """
    choice("read", read, ("all", "asked"))
    whole_number("age_bins", age_bins, 0)
    whole_number("age_reads", age_reads, 0)
    number("ridge", ridge, 0)
    flag("spectrum", spectrum)
    flag("state_rank", state_rank)
    for lag in lags:
        whole_number("lags", lag, 0)
    rows: list[Row] = []
    for position in positions(trace, after):
        state = state_before(trace, position + 1)
        entries = sum(part[0, 0].numel() for part in state.values())
        found = keyed(trace, position, read, entries, age_bins, age_reads)
        found.append(mean_row("norm", state_vector(state).norm(dim=-1)))
        if spectrum and "S" in state:
            found += spectra(state["S"])
        for lag in [lag for lag in lags if lag <= position]:
            found += decode(trace, position, state, lag, ridge, rng)
        rows += [{"position": position + 1, **row} for row in found]
    if state_rank:
        rows += effective_state_size(trace)
    return [{"layer": trace.layer, "d_key": trace.k.shape[-1], **row} for row in rows]


def keyed(trace: Trace, position: int, read: str, entries: int, age_bins: int, age_reads: int) -> list[Row]:
    """Rows on the answers to keys that are queried at that position, with its history, key and value unchanged.

    entries: number of elements of the state per head. The other arguments are those of `state_retention`. No rows if no
    key is to be queried.
    """
    b, h, _, _ = trace.k.shape
    wanted = _wanted(trace, position, read)
    if not wanted.any():
        return []
    columns = wanted.any(0).nonzero()[:, 0]
    wanted = wanted[:, columns]
    k, v = trace.k[:, :, columns], trace.v[:, :, columns]
    queries = query_scale(trace) * k / k.square().sum(-1, keepdim=True).clamp(min=1e-12)
    o = answers(trace, queries, position, state_before(trace, position))
    mask = wanted[:, None].expand(b, h, -1)
    error = (o - v).square().sum(-1) / v.square().sum(-1)[mask].mean()
    measured: list[tuple[Callable[..., Row], str, Tensor]] = [
        (share_row, "top1", nearest(o, v, trace.candidates)),
        (mean_row, "error", error),
        (mean_row, "cosine", torch.cosine_similarity(o, v, dim=-1)),
    ]
    sequence = torch.arange(b, device=mask.device)[:, None, None].expand(mask.shape)
    # The load of the state: all pairs that the oracle wrote; for a model, the pairs that the task queries.
    held = wanted if trace.candidates is None else _wanted(trace, position, "all")
    load = {"pairs": float(held.sum(1).double().mean())}
    rows = [row(metric, values[mask], sequence[mask], **load) for row, metric, values in measured]
    options = float(wanted.sum(1).double().mean()) if trace.candidates is None else float(len(trace.candidates))
    bits = float(information.bits_kept(load["pairs"], 1 - rows[0]["value"], options))
    rows.append({"metric": "bits", "value": h * bits, **load})
    rows.append({"metric": "bits_per_entry", "value": bits / max(entries, 1), **load})
    age = position - columns
    reads = mask.sum((0, 1)).cpu().numpy()
    for chosen in bins(age.cpu().numpy(), age_bins, reads, age_reads) if age_bins else []:
        inside = mask[:, :, chosen]
        if inside.any():
            where = load | {"age": float((age[chosen] * inside).sum() / inside.sum())}
            read_by = sequence[:, :, chosen][inside]
            rows += [row(f"{m}_by_age", values[:, :, chosen][inside], read_by, **where) for row, m, values in measured]
    return rows


def _wanted(trace: Trace, position: int, read: str) -> Bool[Tensor, "b s"]:
    """Which positions s ≤ position have a key to query: sources of the batch's queries, or keys not written again."""
    if read == "asked":
        wanted = torch.zeros(trace.k.shape[0], position + 2, dtype=torch.bool, device=trace.k.device)
        skipped = (trace.source == IGNORE) | (trace.source > position)
        return wanted.scatter(1, torch.where(skipped, position + 1, trace.source), True)[:, : position + 1]
    k = torch.nn.functional.normalize(trace.k[:, :, : position + 1], dim=-1)
    again = ((k @ k.mT) > 1 - 1e-5).triu(1).any(-1).all(1)
    return ~again & (k.square().sum(-1) > 0).all(1)


def nearest(
    o: Float[Tensor, "b h m v"], v: Float[Tensor, "b h m v"], candidates: Float[Tensor, "n v"] | None
) -> Bool[Tensor, "b h m"]:
    """Whether the candidate nearest to o in angle is also the one nearest to v. candidates: None for the m values v."""
    hits = []
    for some, truth in zip(o.split(8), v.split(8), strict=True):
        options = torch.nn.functional.normalize(truth if candidates is None else candidates, dim=-1).mT
        hits.append((some @ options).argmax(-1) == (truth @ options).argmax(-1))
    return torch.cat(hits)


def spectra(S: Float[Tensor, "b h k v"]) -> list[Row]:
    """Measures of the singular values σ of the matrix state S, averaged over sequences and heads.

    effective_rank  e^H of σ/Σσ (Roy and Vetterli 2007)
    stable_rank     ‖S‖_F²/‖S‖₂²
    participation   (Σσ²)²/Σσ⁴
    singular_value  σ_j/Σσ, one row per j (column index: 1 for the largest)
    """
    sigma = torch.linalg.svdvals(exact(S)).flatten(0, 1)
    share = sigma / sigma.sum(-1, keepdim=True).clamp(min=1e-300)
    power = sigma.square()
    rows = [
        mean_row("effective_rank", effective_rank(sigma)),
        mean_row("stable_rank", power.sum(-1) / power.amax(-1).clamp(min=1e-300)),
        mean_row("participation", power.sum(-1).square() / power.square().sum(-1).clamp(min=1e-300)),
    ]
    means = enumerate(share.mean(0).tolist(), start=1)
    return rows + [{"metric": "singular_value", "value": value, "index": index} for index, value in means]


def decode(
    trace: Trace, position: int, state: State, lag: int, ridge: float | int, rng: np.random.Generator
) -> list[Row]:
    """Rows on a linear decoder per head, predicting v at position − lag from the state after `position`.

    Ridge regression in its dual form, fitted on half of the sequences and tested on the other half:
      decode_top1     share of the predictions whose nearest candidate value, in angle, is v
      decode_control  the same for a decoder fitted to values shuffled between sequences
      selectivity     decode_top1 − decode_control (Hewitt and Liang, arXiv 1909.03368)
      decode_r2       R² of the predictions
    Raises ValueError for fewer than 4 sequences.
    """
    b, h = trace.k.shape[:2]
    require(
        b >= 4,
        f"probe.state_retention.lags needs at least 4 sequences, but there are {b}: raise test.probe_sequences "
        "(with the oracle: oracle.reads), or set probe.state_retention.lags=[]",
    )
    x = exact(state_vector(state).transpose(0, 1))  # h b x
    y = exact(trace.v[:, :, position - lag].transpose(0, 1))  # h b v
    order = torch.from_numpy(rng.permutation(b)).to(x.device)
    shuffle = torch.from_numpy(rng.permutation(b // 2)).to(x.device)
    fit, test = order[: b // 2], order[b // 2 :]
    y_mean = y[:, fit].mean(1, keepdim=True)
    x, y = x - x[:, fit].mean(1, keepdim=True), y - y_mean
    kernel = x[:, fit] @ x[:, fit].mT
    penalty = ridge * kernel.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-300)
    kernel = kernel + penalty[:, None, None] * torch.eye(len(fit), dtype=x.dtype, device=x.device)
    targets = torch.cat([y[:, fit], y[:, fit][:, shuffle]], dim=-1)
    predicted = x[:, test] @ (x[:, fit].mT @ torch.linalg.solve(kernel, targets))
    decoded, control = predicted.chunk(2, dim=-1)
    truth = y[:, test]
    candidates = None if trace.candidates is None else exact(trace.candidates)
    sequence = test.expand(1, h, -1)
    top1, baseline = (
        share_row(metric, nearest((o + y_mean)[None], (truth + y_mean)[None], candidates), sequence, lag=lag)
        for metric, o in (("decode_top1", decoded), ("decode_control", control))
    )
    r2 = 1 - (decoded - truth).square().sum() / truth.square().sum().clamp(min=1e-300)
    return [
        top1,
        baseline,
        {"metric": "selectivity", "value": top1["value"] - baseline["value"], "lag": lag},
        {"metric": "decode_r2", "value": float(r2), "lag": lag},
    ]


def effective_state_size(trace: Trace, cuts: int = 8) -> list[Row]:
    """Rank of A[i:, :i], which maps the values at positions < i to the outputs at positions ≥ i, at evenly spaced i.

    state_rank            number of singular values, in float64, above σ₁ · max(shape) · ε
    state_effective_rank  effective rank (`effective_rank`)
    Both are means over sequences and heads, with the column position (i). The effective state size is the largest over
    i.
    No rows for a mechanism that is not linear in v. Source: Parnichkun et al., arXiv 2504.19561.
    """
    if not trace.mixer.linear_in_v:
        return []
    trace = double(trace)
    attention = trace.mixer.effective_attention(trace.q, trace.k, trace.gates)
    length = attention.shape[-1]
    rows = []
    for cut in sorted({max(1, round(length * part / (cuts + 1))) for part in range(1, cuts + 1)}):
        if cut >= length:
            continue
        sigma = torch.linalg.svdvals(attention[:, :, cut:, :cut])
        limit = sigma[..., :1] * max(cut, length - cut) * torch.finfo(sigma.dtype).eps
        rows.append(mean_row("state_rank", (sigma > limit).sum(-1), position=cut))
        rows.append(mean_row("state_effective_rank", effective_rank(sigma), position=cut))
    return rows
