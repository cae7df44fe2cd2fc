"""Products of reads and keys at each pair of positions of a chunk, weighted by the decay between the two.

A read is a vector that the state is read with (the query; the erase read), a key one that it is written with (the
write key; the erase key). Letters of this file and of channel_decay.py: n chunks (of all sequences and heads), c
positions of a chunk, k key channels, r reads per position, w keys per position, g the log decay, and G_t = Σ_{r≤t} g_r
since the start of the chunk.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recall_lab.mixer.numerics import finite_log_decay, log_decay_sums


class DecayedProducts(NamedTuple):
    """Products within each chunk. x is a read, y a key; every exponent is a sum of log decays, hence ≤ 0.

    pairs       [read][key], n c c each: Σ_k x_tk y_sk e^{G_tk − G_sk} for s ≤ t, with t on the second axis and s on
                the last; zero for s > t. Of a second read only s < t is defined.
    from_start  [read], n c k each: x_t e^{G_t}, which reads the state at the start of the chunk.
    to_end      [key], n c k each: y_s e^{G_c − G_s}, what is left of the key at the end of the chunk.
    total       n k or n 1: e^{G_c}, what the chunk leaves of the state at its start. None without decay.

    With reads_before_decay, the second read reads the state before the decay of its own position: G_{t−1} replaces G_t.
    """

    pairs: Sequence[Sequence[Tensor]]
    from_start: Sequence[Tensor]
    to_end: Sequence[Tensor]
    total: Tensor | None


def without_decay(reads: Sequence[Tensor], keys: Sequence[Tensor]) -> DecayedProducts:
    """The products of reads and keys (n c k each) where nothing decays."""
    first, *second = [[x @ y.mT for y in keys] for x in reads]  # n c c
    return DecayedProducts([[pairs.tril_() for pairs in first], *second], reads, keys, None)


def scalar_decay(
    g: Tensor, reads: Sequence[Tensor], keys: Sequence[Tensor], reads_before_decay: bool
) -> DecayedProducts:
    """The products of reads and keys (n c k each) under one log decay g (n c) for all channels."""
    between = log_decay_sums(g).exp_()  # n c c
    g = finite_log_decay(g)
    ones = g.new_ones(g.shape[1], g.shape[1])  # c c
    since_start = (g @ ones.triu()).exp_()[..., None]  # n c 1: e^{G_t}
    until_end = (g @ ones.tril(-1)).exp_()[..., None]  # n c 1: e^{G_c − G_s}
    of_read = [(between, since_start)] * len(reads)
    if reads_before_decay:
        of_read[1] = F.pad(between[:, :-1], (0, 0, 1, 0)), F.pad(since_start[:, :-1], (0, 0, 1, 0), value=1)
    return DecayedProducts(
        pairs=[[(x @ y.mT) * weight for y in keys] for x, (weight, _) in zip(reads, of_read, strict=True)],
        from_start=[x * weight for x, (_, weight) in zip(reads, of_read, strict=True)],
        to_end=[y * until_end for y in keys],
        total=g.sum(1, keepdim=True).exp(),
    )


def naive_decay(
    g: Tensor, reads: Sequence[Tensor], keys: Sequence[Tensor], reads_before_decay: bool
) -> DecayedProducts:
    """The definition of `scalar_decay` (g: n c) and of `channel_decay` (g: n c k), for tests.

    It can be differentiated any number of times, and needs storage for n k c² numbers.
    """
    total = g.sum(1, keepdim=g.dim() == 2).exp()  # n 1 or n k
    g = g[..., None].expand_as(reads[0]) if g.dim() == 2 else g  # n c k
    # Position 0 of the weights is the start of the chunk, position t + 1 is its position t.
    weights = log_decay_sums(F.pad(g.mT, (1, 0))).exp()  # n k 1+c 1+c
    after, before = weights[:, :, 1:], weights[:, :, :-1]  # n k c 1+c
    of_read = [(x, before if reads_before_decay and i else after) for i, x in enumerate(reads)]
    return DecayedProducts(
        [[torch.einsum("ntk,nkts,nsk->nts", x, weight[..., 1:], y) for y in keys] for x, weight in of_read],
        [x * weight[..., 0].mT for x, weight in of_read],
        [y * weights[:, :, -1, 1:].mT for y in keys],
        total,
    )
