"""Products within a chunk under a decay per channel. The letters n c k r w g G are those of decayed_products.py.

The weight of a pair differs from channel to channel, so a single matrix product does not give all pairs. They are
computed by doubling. In a block of 2·size positions, x_t e^{G_t − G_mid} of the later half is multiplied with
y_s e^{G_mid − G_s} of the earlier half, mid being the last position of the earlier half. Both exponents are ≤ 0, so
nothing overflows. Both factors are updated in place from one block size to the next (1, 2, 4 …), so this file defines
its own gradient: autograd of the same steps needs copies and takes 1.4 to 1.9 times as long.
`decayed_products.naive_decay` is the definition.

In comments on shapes s is the size, m the number of blocks of all chunks, and b the number of blocks of one chunk.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recall_lab.mixer.decayed_products import DecayedProducts

PIECE = 256
"""Chunks computed at a time, so that intermediate results fit in the processor's cache."""


def channel_decay(
    g: Tensor, reads: Sequence[Tensor], keys: Sequence[Tensor], reads_before_decay: bool
) -> DecayedProducts:
    """The products of reads and keys (n c k each) under a log decay g (n c k); c is a power of two.

    Differentiable once.
    """
    pairs, from_start, to_end, total = ChannelDecay.apply(g, _joined(reads), _joined(keys), reads_before_decay)
    rows = _parted(pairs.flatten(2, 3))  # n c c, for each read all keys
    return DecayedProducts(
        pairs=[rows[i : i + len(keys)] for i in range(0, len(rows), len(keys))],
        from_start=_parted(from_start),
        to_end=_parted(to_end),
        total=total,
    )


class ChannelDecay(torch.autograd.Function):
    """`channel_decay` as an autograd function, with the reads in one tensor, the keys in one, and so the results.

    g, reads, keys, reads_before_decay → pairs n c r w c, from_start n c r k, to_end n c w k, total n k.
    It also works under vmap, forward and backward, as autograd uses it for is_grads_batched=True.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        g: Tensor, reads: Tensor, keys: Tensor, reads_before_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n, c, r, _ = reads.shape
        zero = _mapped_zero(g, reads, keys)
        decay = g.exp()  # n c k
        from_start = torch.addcmul(zero, reads, _read_decay(decay, reads_before_decay)).contiguous()  # n c r k
        to_end = (zero + keys).contiguous()  # n c w k
        pairs = zero.expand(n, c, r, keys.shape[2], c).contiguous()  # n c r w c
        for piece in _pieces(decay, from_start, to_end, pairs):
            _fill(*piece)
        # The first read has weight 1 at its own position.
        own = (reads[:, :, :1] * keys).sum(-1)  # n c w
        pairs[:, :, 0].diagonal(dim1=1, dim2=3).copy_(own.mT)  # n w c
        return pairs, from_start, to_end, g.sum(1).exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.reads_before_decay = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_products: Tensor) -> tuple[Tensor | None, ...]:
        tensors = (x.contiguous() for x in (*ctx.saved_tensors, *d_products))
        parts = [_gradient(_Inputs(*piece), ctx.reads_before_decay) for piece in _pieces(*tensors)]
        return *(torch.cat(part) for part in zip(*parts, strict=True)), None


class _Inputs(NamedTuple):
    """The inputs of ChannelDecay and the gradients of its outputs, for some of the chunks."""

    g: Tensor  # n c k
    reads: Tensor  # n c r k
    keys: Tensor  # n c w k
    d_pairs: Tensor  # n c r w c
    d_from_start: Tensor  # n c r k
    d_to_end: Tensor  # n c w k
    d_total: Tensor  # n k


def _fill(decay: Tensor, from_start: Tensor, to_end: Tensor, pairs: Tensor) -> None:
    """Fills pairs (n c r w c) below the diagonal, and multiplies the decays within the chunk into the others.

    On entry, from_start (n c r k) includes the decay of its own position if the read does, and to_end (n c w k) none.
    """
    r, w = from_start.shape[2], to_end.shape[2]
    for size, early_decay, late_decay in _doubling(decay):
        late, early = _late(from_start, size), _early(to_end, size)  # m s r k, m s w k
        products = late.flatten(1, 2) @ early.flatten(1, 2).mT  # m (s r) (s w)
        blocks = _late_against_early(pairs, size)  # n b s r w s
        blocks.copy_(products.view(*blocks.shape[:3], r, size, w).mT)
        late.mul_(early_decay[:, None, None])
        early.mul_(late_decay[:, None, None])


def _gradient(x: _Inputs, reads_before_decay: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of g (n c k), reads (n c r k) and keys (n c w k).

    G_t enters only as x_t e^{G_t} and y_t e^{−G_t}. Its gradient is therefore x_t ⊙ dx_t − y_t ⊙ dy_t.
    """
    n, c, k = x.g.shape
    zero = _mapped_zero(*x)
    decay = x.g.exp()  # n c k
    read_decay = _read_decay(decay, reads_before_decay).clone()  # n c 1 k or n c 2 k
    key_decay = torch.ones_like(decay)[:, :, None]  # n c 1 k
    d_reads, d_keys = _gradient_of_pairs(x, zero, decay, read_decay, key_decay)  # n c r k, n c w k
    # By now read_decay is e^{G_t} and key_decay e^{G_c − G_s}.
    d_reads.add_(x.d_from_start * read_decay)
    d_G, d_rest = zero.expand(2, n, c, k).contiguous()  # n c k: of G_t, and of G_c − G_s through to_end
    for i, (read, d_read) in enumerate(zip(x.reads.unbind(2), d_reads.unbind(2), strict=True)):  # n c k
        shift = int(reads_before_decay and i > 0)  # such a read depends on G_{t−1}
        d_G.narrow(1, 0, c - shift).add_((read * d_read).narrow(1, shift, c - shift))
    for key, d_key, d_end in zip(x.keys.unbind(2), d_keys.unbind(2), x.d_to_end.unbind(2), strict=True):  # n c k
        d_G.sub_(key * d_key)
        d_end = d_end * key_decay[:, :, 0]
        d_key.add_(d_end)
        d_rest.add_(key * d_end)
    later = x.g.new_ones(c, c).triu()  # G_t is a sum over r ≤ t, G_c − G_s one over r > s
    d_g = torch.baddbmm(later @ d_G, (1 - later).expand(n, -1, -1), d_rest)  # n c k
    return d_g.add_((x.d_total * x.g.sum(1).exp())[:, None]), d_reads, d_keys


def _gradient_of_pairs(
    x: _Inputs, zero: Tensor, decay: Tensor, read_decay: Tensor, key_decay: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of reads (n c r k) and keys (n c w k) through the pairs.

    On entry, read_decay (n c 1 k or n c 2 k) holds the decay of its own position where the read includes it, key_decay
    (n c 1 k) holds ones. The decays within the chunk are multiplied into both, in place.
    """
    r, k, w = *x.reads.shape[2:], x.keys.shape[2]
    d_own = x.d_pairs[:, :, 0].diagonal(dim1=1, dim2=3).mT[..., None]  # n c w 1
    d_keys = torch.addcmul(zero, d_own, x.reads[:, :, :1])  # n c w k
    d_reads = zero.expand_as(x.reads).contiguous()  # n c r k
    d_reads[:, :, 0] = (d_own * x.keys).sum(2)
    for size, early_decay, late_decay in _doubling(decay):
        late_factor, early_factor = _late(read_decay, size), _early(key_decay, size)  # m s 1 k
        late = (_late(x.reads, size) * late_factor).flatten(1, 2)  # m (s r) k
        early = (_early(x.keys, size) * early_factor).flatten(1, 2)  # m (s w) k
        d_blocks = _late_against_early(x.d_pairs, size).mT.reshape(-1, size * r, size * w)  # m (s r) (s w)
        d_late = _product(d_blocks, early).reshape(-1, size, r, k)  # m s r k
        d_early = _product(d_blocks.mT, late).reshape(-1, size, w, k)  # m s w k
        _late(d_reads, size).add_(d_late.mul_(late_factor))
        _early(d_keys, size).add_(d_early.mul_(early_factor))
        late_factor.mul_(early_decay[:, None, None])
        early_factor.mul_(late_decay[:, None, None])
    return d_reads, d_keys


def _doubling(decay: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For s = 1, 2, 4 …: s, and the decay over the earlier and the later half of each block of 2 s positions (m k)."""
    size = 1
    while decay.shape[1] > 1:
        early, late = decay.reshape(-1, 2, decay.shape[-1]).unbind(1)  # m k
        yield size, early, late
        decay, size = (early * late).view(len(decay), -1, decay.shape[-1]), 2 * size  # n b k


def _read_decay(decay: Tensor, reads_before_decay: bool) -> Tensor:
    """The decay of its own position in each read: n c 1 k, the same for all reads, or n c 2 k; decay is n c k."""
    return torch.stack([decay, torch.ones_like(decay)], dim=2) if reads_before_decay else decay[:, :, None]


def _early(x: Tensor, size: int) -> Tensor:
    """A view of the earlier half of each block of 2 s positions, s = size: n c … → m s …."""
    return x.view(-1, 2, size, *x.shape[2:])[:, 0]


def _late(x: Tensor, size: int) -> Tensor:
    """A view of the later half of each block."""
    return x.view(-1, 2, size, *x.shape[2:])[:, 1]


def _late_against_early(pairs: Tensor, size: int) -> Tensor:
    """A view of the pairs of the later with the earlier half of each block: n c r w c → n b s r w s."""
    n, c, r, w, _ = pairs.shape
    b = c // (2 * size)
    halves = pairs.view(n, b, 2, size, r, w, b, 2, size)[:, :, 1, :, :, :, :, 0]  # n b s r w b s
    return halves.diagonal(dim1=1, dim2=5).movedim(-1, 1)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, as a sum of outer products below 400 multiplications per matrix, where bmm on a CPU is a plain loop."""
    if x.shape[1] * x.shape[2] * y.shape[2] >= 400:
        return x @ y
    out = x[:, :, 0, None] * y[:, 0, None]
    for i in range(1, x.shape[2]):
        out = torch.addcmul(out, x[:, :, i, None], y[:, i, None])
    return out


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors (n … each) in pieces of PIECE chunks, the last being shorter."""
    return zip(*(x.split(PIECE) for x in tensors), strict=True)


def _joined(vectors: Sequence[Tensor]) -> Tensor:
    """Vectors (n c k each) side by side: n c r k. A single one is not copied."""
    return vectors[0][:, :, None] if len(vectors) == 1 else torch.stack([*vectors], dim=2)


def _parted(x: Tensor) -> Sequence[Tensor]:
    """The parts of x along axis 2. A single one is a view, which saves autograd a copy."""
    return [x.squeeze(2)] if x.shape[2] == 1 else x.unbind(2)


def _mapped_zero(*tensors: Tensor) -> Tensor:
    """A scalar zero, which is mapped under vmap if any of the tensors is.

    Buffers are made from it, since under vmap only a mapped tensor can be overwritten with mapped values.
    """
    return torch.stack([x.new_zeros(()) for x in tensors]).sum()
