"""Reads of a matrix state whose value channels decay, each at its own rate: the keys of gated slot attention.

The recurrence, for position t with query q_t and the log decay g_t ≤ 0 of every value channel:

    S_t = S_{t−1} diag(e^{g_t}) + k_t v_tᵀ,  o_t = S_tᵀ q_t

A decay per key channel (channel_decay.py) is part of the products of queries and keys. Here the products are plain, and
the values decay: o_t = Σ_{s≤t} (q_t·k_s) e^{G_t − G_s} ⊙ v_s, G_t = Σ_{r≤t} g_r. Within a chunk this is computed by
doubling. In a block of 2·size positions, the values of the earlier half are multiplied by e^{G_mid − G_s},
mid being the last position of that half, then summed by q_t·k_s for the positions t of the later half, and these sums
multiplied by e^{G_t − G_mid}. Every exponent is a sum of log decays, so nothing overflows, and a weak decay next to a
strong one keeps its precision.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from recall_lab.mixer.numerics import finite_log_decay
from recall_lab.shapes import Query, Value

CHUNK = 16
"""Positions that are computed together, a power of two."""


def step(q: Query, k: Query, v: Value, g: Value, state: Tensor) -> tuple[Value, Tensor]:
    """One position (t = 1) by the definition: the output (b h 1 v) and the state after it (b h k v)."""
    state = state * g.exp() + k.mT @ v
    return q @ state, state


def chunked(q: Query, k: Query, v: Value, g: Value, state: Tensor, chunk: int = CHUNK) -> tuple[Value, Tensor]:
    """All positions in chunks: outputs (b h t v) and the last state (b h k v), from the state before the first.

    t may be 0. chunk: a power of two.
    """
    b, h, length, _ = q.shape
    if length == 0:
        return q @ state, state
    chunk = min(chunk, 1 << (length - 1).bit_length())

    def fold(x: Tensor) -> Tensor:
        """b h t d → m n c d: the n chunks of each of the m = b h sequences; the last is filled with zeros."""
        return F.pad(x, (0, 0, 0, -length % chunk)).reshape(b * h, -(-length // chunk), chunk, x.shape[3])

    query, key, value = fold(q), fold(k), fold(v)
    own, since, until = _within(query @ key.mT, value, finite_log_decay(fold(g)))
    written = (key.mT @ (value * until.exp())).unbind(1)  # m k v
    kept = since[:, :, -1:].exp().unbind(1)  # m 1 v
    state, before = state.flatten(0, 1), []  # m k v
    for write, keep in zip(written, kept, strict=True):
        before.append(state)
        state = torch.addcmul(write, keep, state)
    o = torch.addcmul(own, since.exp(), query @ torch.stack(before, dim=1))  # m n c v
    return o.flatten(1, 2)[:, :length].unflatten(0, (b, h)), state.unflatten(0, (b, h))


def _within(pairs: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each chunk: its outputs without the state before it; G_t since its start; G_c − G_t until its end.

    pairs (m n c c) holds q_t·k_s; v, g and the results are m n c v.
    """
    o = pairs.diagonal(dim1=2, dim2=3)[..., None] * v
    since, until = g, torch.zeros_like(g)  # within the block of each position; at first every position is a block
    size, c = 1, g.shape[2]
    while size < c:
        early_v, _ = _halves(v, size)  # m n b s v
        (early_o, late_o), (early_since, late_since), (early_until, late_until) = (
            _halves(x, size) for x in (o, since, until)
        )
        between = pairs.unflatten(3, (-1, 2, size)).unflatten(2, (-1, 2, size))  # m n b 2 s b 2 s
        between = between[:, :, :, 1, :, :, 0].diagonal(dim1=2, dim2=4).movedim(-1, 2)  # m n b s s
        late_o = torch.addcmul(late_o, late_since.exp(), between @ (early_v * early_until.exp()))
        early_total, late_total = early_since[:, :, :, -1:], late_since[:, :, :, -1:]  # m n b 1 v
        o, since, until = (
            torch.cat(pair, dim=3).flatten(2, 3)
            for pair in (
                (early_o, late_o),
                (early_since, late_since + early_total),
                (early_until + late_total, late_until),
            )
        )
        size *= 2
    return o, since, until


def _halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The earlier and the later half of each block of 2·size positions: m n c v → m n b s v each."""
    early, late = x.unflatten(2, (-1, 2, size)).unbind(3)
    return early, late
