"""What a state keeps: keyed read-outs by age and load, what a linear decoder finds without a key, spectrum and bits."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recall_lab.theory import information
from recall_lab.mixer.base import Trace
from recall_lab.probe.base import (
    IGNORE,
    Row,
    answers,
    bins,
    double,
    effective_rank,
    exact,
    mean_row,
    memory_before,
    places,
    query_scale,
    share_row,
    state_vector,
)
from recall_lab.shapes import State


@torch.no_grad()
def state_retention(
    trace: Trace,
    rng: np.random.Generator,
    *,
    at: Sequence[float | int] = (1,),
    read: str = "all",
    age_bins: int = 16,
    spectrum: bool = True,
    lags: Sequence[int] = (),
    ridge: float | int = 1e-3,
    state_rank: bool = False,
) -> list[Row]:
    """What the state holds at some places of the sequence.

    at          shares of the sequence at which the state is looked at (1: behind the last token)
    read        which keys are asked for: all that were written and not written again, or those asked by the batch
    age_bins    bins of the age of a pair, equal in the logarithm; 0: no rows by age
    spectrum    rows on the singular values of S, for mechanisms whose memory is one matrix
    lags        lags at which a linear decoder is trained, where the state has seen that much; none: no such rows
    ridge       the decoder's penalty, in units of the mean of its kernel's diagonal
    state_rank  whether the effective state size is computed (length³)

    Rows carry layer, d_key, place (tokens seen) and, where keys are read, the number of pairs.
    Keyed read-out, all heads together, over all pairs and (…_by_age, column age) by age:
      top1       share of read-outs nearest, in angle, to the value that was written
      error      E‖o − v‖²/E‖v‖², with keys asked for at the scale of the trace's own queries
      cosine     between o and v
    bits, bits_per_entry: Fano's bound for that top-1 (`theory.information.bits_kept`), over the numbers carried.
    norm: of all numbers carried; effective_rank, stable_rank, participation: of S.
    decode_top1, decode_control, selectivity, decode_r2: see `decode`.
    state_rank: see `effective_state_size`.
    """
    if read not in ("all", "asked"):
        raise ValueError(f"read={read!r}: all or asked")
    if any(lag < 0 for lag in lags):
        raise ValueError(f"lags={list(lags)}: at least 0 each")
    rows = []
    for place in places(trace, at):
        memory = memory_before(trace, place + 1)
        found = keyed(trace, place, read, age_bins, entries=sum(part[0, 0].numel() for part in memory.values()))
        found.append(mean_row("norm", state_vector(memory).norm(dim=-1)))
        if spectrum and "S" in memory:
            found += spectra(memory["S"])
        for lag in [lag for lag in lags if lag <= place]:
            found += decode(trace, place, memory, lag, ridge, rng)
        rows += [{"place": place + 1, **row} for row in found]
    if state_rank:
        rows += effective_state_size(trace)
    return [{"layer": trace.layer, "d_key": trace.k.shape[-1], **row} for row in rows]


def keyed(trace: Trace, place: int, read: str, age_bins: int, entries: int) -> list[Row]:
    """Every key asked for at that place, history and present token as they are; entries: numbers carried a head."""
    b, h, _, _ = trace.k.shape
    wanted = _wanted(trace, place, read)
    if not wanted.any():
        return []
    # Only places that some sequence wants are read.
    columns = wanted.any(0).nonzero()[:, 0]
    wanted = wanted[:, columns]
    k, v = trace.k[:, :, columns], trace.v[:, :, columns]
    queries = query_scale(trace) * k / k.square().sum(-1, keepdim=True).clamp(min=1e-12)
    o = answers(trace, queries, place, memory_before(trace, place))
    right = nearest(o, v, trace.candidates)
    cosine = torch.cosine_similarity(o, v, dim=-1)
    size = v.square().sum(-1)
    error = (o - v).square().sum(-1)
    mask = wanted[:, None].expand(b, h, -1)
    error = error / size[mask].mean()
    # How full the memory is: of the oracle all that was written, of a model what its task asks for.
    held = wanted if trace.candidates is None else _wanted(trace, place, "all")
    pairs = float(held.sum(1).double().mean())
    where = {"pairs": pairs}
    rows = [
        share_row("top1", right[mask], **where),
        mean_row("error", error[mask], **where),
        mean_row("cosine", cosine[mask], **where),
    ]
    options = wanted.sum(1).double().mean() if trace.candidates is None else len(trace.candidates)
    bits = float(information.bits_kept(pairs, 1 - rows[0]["value"], float(options)))
    rows.append({"metric": "bits", "value": h * bits, **where})
    rows.append({"metric": "bits_per_entry", "value": bits / max(entries, 1), **where})
    age = place - columns.cpu().numpy()
    for chosen in bins(age, age_bins) if age_bins else []:
        inside = mask[:, :, chosen]
        if inside.any():
            there = where | {
                "age": float((torch.as_tensor(age[chosen], device=mask.device) * inside).sum() / inside.sum())
            }
            rows.append(share_row("top1_by_age", right[:, :, chosen][inside], **there))
            rows.append(mean_row("error_by_age", error[:, :, chosen][inside], **there))
            rows.append(mean_row("cosine_by_age", cosine[:, :, chosen][inside], **there))
    return rows


def _wanted(trace: Trace, place: int, read: str) -> Bool[Tensor, "b s"]:
    """Which of the places 0 … place are read: those asked by the batch, or all whose key isn't written again."""
    b = trace.k.shape[0]
    if read == "asked":
        wanted = torch.zeros(b, place + 2, dtype=torch.bool, device=trace.k.device)
        target = torch.where((trace.source == IGNORE) | (trace.source > place), place + 1, trace.source)
        return wanted.scatter(1, target, True)[:, : place + 1]
    k = torch.nn.functional.normalize(trace.k[:, :, : place + 1], dim=-1)
    again = ((k @ k.mT) > 1 - 1e-5).triu(1).any(-1).all(1)
    return ~again & (k.square().sum(-1) > 0).all(1)


def nearest(
    o: Float[Tensor, "b h m v"], v: Float[Tensor, "b h m v"], candidates: Float[Tensor, "n v"] | None
) -> Bool[Tensor, "b h m"]:
    """Whether the candidate nearest to o in angle is the one nearest to v; candidates: the v themselves where None."""
    hits = []
    for some, truth in zip(o.split(8), v.split(8), strict=True):
        options = torch.nn.functional.normalize(truth if candidates is None else candidates, dim=-1).mT
        hits.append((some @ options).argmax(-1) == (truth @ options).argmax(-1))
    return torch.cat(hits)


def spectra(S: Float[Tensor, "b h k v"]) -> list[Row]:
    """effective_rank e^H of σ/Σσ, stable_rank ‖S‖_F²/‖S‖₂², participation (Σσ²)²/Σσ⁴; singular values as σ_j rows.

    Effective rank: Roy and Vetterli 2007. Singular values are divided by their sum.
    """
    sigma = torch.linalg.svdvals(exact(S)).flatten(0, 1)
    share = sigma / sigma.sum(-1, keepdim=True).clamp(min=1e-300)
    power = sigma.square()
    rows = [
        mean_row("effective_rank", effective_rank(sigma)),
        mean_row("stable_rank", power.sum(-1) / power.amax(-1).clamp(min=1e-300)),
        mean_row("participation", power.sum(-1).square() / power.square().sum(-1).clamp(min=1e-300)),
    ]
    return rows + [
        {"metric": "singular_value", "value": float(value), "index": index + 1}
        for index, value in enumerate(share.mean(0))
    ]


def decode(
    trace: Trace, place: int, memory: State, lag: int, ridge: float | int, rng: np.random.Generator
) -> list[Row]:
    """A linear decoder from the whole state to the value written `lag` places before, given no key.

    Ridge regression in its dual form, trained on half of the sequences and tested on the others, a head at a time:
      decode_top1     share nearest to the value that was written
      decode_control  the same for a decoder trained on values shuffled between sequences
      selectivity     their difference (Hewitt and Liang, arXiv 1909.03368)
      decode_r2       share of the values' variance explained
    """
    b = trace.k.shape[0]
    if b < 4:
        raise ValueError(f"a decoder needs at least 4 sequences to be split, not {b}")
    x = exact(state_vector(memory).transpose(0, 1))
    y = exact(trace.v[:, :, place - lag].transpose(0, 1))
    order = torch.from_numpy(rng.permutation(b)).to(x.device)
    shuffle = torch.from_numpy(rng.permutation(b // 2)).to(x.device)
    fit, test = order[: b // 2], order[b // 2 :]
    centre, middle = x[:, fit].mean(1, keepdim=True), y[:, fit].mean(1, keepdim=True)
    x, y = x - centre, y - middle
    kernel = x[:, fit] @ x[:, fit].mT
    penalty = ridge * kernel.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-300)
    kernel = kernel + penalty[:, None, None] * torch.eye(len(fit), dtype=x.dtype, device=x.device)
    targets = torch.cat([y[:, fit], y[:, fit][:, shuffle]], dim=-1)
    found = x[:, test] @ (x[:, fit].mT @ torch.linalg.solve(kernel, targets))
    guess, control = found.chunk(2, dim=-1)
    truth = y[:, test]
    candidates = None if trace.candidates is None else exact(trace.candidates)
    hits = [nearest((o + middle)[None], (truth + middle)[None], candidates) for o in (guess, control)]
    where = {"lag": lag}
    r2 = 1 - (guess - truth).square().sum() / truth.square().sum().clamp(min=1e-300)
    top1, baseline = share_row("decode_top1", hits[0], **where), share_row("decode_control", hits[1], **where)
    difference = top1["value"] - baseline["value"]
    return [
        top1,
        baseline,
        {"metric": "selectivity", "value": difference, **where},
        {"metric": "decode_r2", "value": float(r2), **where},
    ]


def effective_state_size(trace: Trace, cuts: int = 8) -> list[Row]:
    """Rank of the operator from the past to the future, A[i:, :i], at some cuts i: what of the past is still used.

    state_rank: numerical rank in float64, singular values above σ₁ · max(shape) · ε counting; state_effective_rank: e^H
    of the singular values. Mean over sequences; the largest over the cuts is the size.
    Source: Parnichkun et al., arXiv 2504.19561. None for a mechanism that is not linear in v.
    """
    if not trace.mixer.linear_in_v:
        return []
    trace = double(trace)
    attention = trace.mixer.effective_attention(trace.q, trace.k, trace.gates)
    length = attention.shape[-1]
    rows = []
    for cut in sorted(
        {max(1, round(length * part / (cuts + 1))) for part in range(1, cuts + 1)} & set(range(1, length))
    ):
        sigma = torch.linalg.svdvals(attention[:, :, cut:, :cut])
        limit = sigma[..., :1] * max(cut, length - cut) * torch.finfo(sigma.dtype).eps
        rows.append(mean_row("state_rank", (sigma > limit).sum(-1), place=cut))
        rows.append(mean_row("state_effective_rank", effective_rank(sigma), place=cut))
    return rows
