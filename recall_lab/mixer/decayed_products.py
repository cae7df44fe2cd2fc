"""What happens to queries and keys within a chunk: products of each pair of positions, weighted by the decay between.

Letters of this file and of channel_decay.py: n chunks (of all sequences and heads), c positions of a chunk, k key
channels, r reads per position (the query; the erase read), w keys per position that something is added to the state
with (the write key; the erase key), g the log decay, and G_t = Σ_{r≤t} g_r since the start of the chunk.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recall_lab.mixer.numerics import log_decay_sums


class DecayedProducts(NamedTuple):
    """Products within each chunk. x is a read, y a key; every exponent is a sum of log decays, hence ≤ 0.

    pairs       n c r w c   Σ_k x_tk y_sk e^{G_tk − G_sk} for s ≤ t, with t on the second axis and s on the last.
                            Of a second read only s < t is defined.
    from_start  n c r k     x_t e^{G_t}: it reads the state at the start of the chunk.
    to_end      n c w k     y_s e^{G_c − G_s}: what it writes has decayed so by the end of the chunk.
    total       n k or n 1  e^{G_c}: what the chunk leaves of the state at its start; None without decay.

    With reads_before_decay, the second read sees the state before the decay of its own position: G_{t−1} for G_t.
    """

    pairs: Tensor
    from_start: Tensor
    to_end: Tensor
    total: Tensor | None


def without_decay(reads: Tensor, keys: Tensor) -> DecayedProducts:
    """The products of reads (n c r k) and keys (n c w k) where nothing decays."""
    c = reads.shape[1]
    past = reads.new_ones(c, c).tril()[:, None, None]  # c 1 1 c
    return DecayedProducts(_products(reads, keys) * past, reads, keys, None)


def scalar_decay(g: Tensor, reads: Tensor, keys: Tensor, reads_before_decay: bool) -> DecayedProducts:
    """The products of reads (n c r k) and keys (n c w k) under one log decay g (n c) for all channels."""
    # Position 0 of the weights is the start of the chunk, position t + 1 the chunk's position t.
    weights = log_decay_sums(F.pad(g, (1, 0))).exp()  # n 1+c 1+c
    of_reads = weights[:, 1:, None]  # n c 1 1+c
    if reads_before_decay:
        of_reads = torch.stack([weights[:, 1:], weights[:, :-1]], dim=2)  # n c 2 1+c
    return DecayedProducts(
        pairs=_products(reads, keys) * of_reads[..., None, 1:],  # n c r w c
        from_start=reads * of_reads[..., :1],  # n c r k
        to_end=keys * weights[:, -1, 1:, None, None],  # n c w k
        total=weights[:, -1, :1],  # n 1
    )


def naive_decay(g: Tensor, reads: Tensor, keys: Tensor, reads_before_decay: bool) -> DecayedProducts:
    """The definition of `scalar_decay` (g: n c) and of `channel_decay` (g: n c k), which tests hold both to.

    It is differentiable to any order; its memory grows with c² k.
    """
    total = g.sum(1, keepdim=g.dim() == 2).exp()  # n 1 or n k
    g = g[..., None].expand_as(reads[:, :, 0]) if g.dim() == 2 else g  # n c k
    weights = log_decay_sums(F.pad(g.mT, (1, 0))).exp()  # n k 1+c 1+c
    after, before = weights[:, :, 1:], weights[:, :, :-1]  # n k c 1+c
    second = before if reads_before_decay else after
    of_reads = torch.stack([after, second], dim=3)[:, :, :, : reads.shape[2]]  # n k c r 1+c
    return DecayedProducts(
        pairs=torch.einsum(
            "ntrk,nktrs,nswk->ntrws", reads, of_reads[..., 1:].expand(-1, reads.shape[-1], -1, -1, -1), keys
        ),
        from_start=torch.einsum("ntrk,nktr->ntrk", reads, of_reads[..., 0]),
        to_end=torch.einsum("nswk,nks->nswk", keys, weights[:, :, -1, 1:]),
        total=total,
    )


def _products(reads: Tensor, keys: Tensor) -> Tensor:
    """x_t · y_s of every pair of positions of a chunk: n c r k, n c w k → n c r w c."""
    (_, c, r, _), w = reads.shape, keys.shape[2]
    products = reads.flatten(1, 2) @ keys.flatten(1, 2).mT  # n (c r) (c w)
    return products.view(-1, c, r, c, w).mT
