"""One engine for every mechanism whose memory is a matrix S (d_key × d_value) that decays, erases and writes:

    S' = diag(e^{g_t}) S_{t−1},      S_t = S' + b_t (a_tᵀ S') + k_t v_tᵀ,      o_t = S_tᵀ q_t.

Within a chunk of C places let G_t = Σ_{r≤t} g_r since its start, S the memory at its start, u_t = S'ᵀ a_t what is
read for erasing, and ⟨x, y⟩_ts = Σ_c x_tc y_sc e^{G_tc − G_sc}, whose exponents are ≤ 0 for s ≤ t. Then

    u_t = Σ_{s<t} ⟨a, b⟩_ts u_s + Σ_{s<t} ⟨a, k⟩_ts v_s + (a_t e^{G_t})ᵀ S

is one triangular solve for all chunks together, u = X + Y S. What is left for the loop over chunks is one small
product, S ← (diag(e^{G_C}) + b̃ᵀ Y) S + (k̃ᵀ V + b̃ᵀ X) with k̃_s = k_s e^{G_C − G_s}; the outputs of all chunks
are again one batched product. Nothing is ever divided by a decay, so nothing overflows.

Sources of the form: Yang et al., arXiv 2406.06484 (delta rule) and 2312.06635 (decay a channel).
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recall_lab.mixer.base import Mixer, without_autocast
from recall_lab.shapes import Gates, Hidden, Query, State, Value


class Update(NamedTuple):
    """What a mechanism does to its memory at every place."""

    write_key: Tensor
    """k: b h t k."""
    write_value: Tensor
    """v: b h t v."""
    log_decay: Tensor | None = None
    """g ≤ 0: b h t (one for the whole matrix) or b h t k (one a key channel); None: no decay."""
    erase_read: Tensor | None = None
    """a, what the memory is read with for erasing: b h t k; None: nothing is erased."""
    erase_key: Tensor | None = None
    """b: b h t k; None: the write key."""
    undecayed: bool = False
    """Whether a reads S_{t−1} instead of the decayed S'."""


def step(q: Query, update: Update, memory: Tensor) -> tuple[Value, Tensor]:
    """One place, by the definition; memory is b h k v."""
    k, v, g, a, b, undecayed = update
    before = memory
    if g is not None:
        memory = memory * (g[..., None] if g.dim() == 3 else g.mT).exp()
    write = k.mT @ v
    if a is not None:
        write = write + (k if b is None else b).mT @ (a @ (before if undecayed else memory))
    memory = memory + write
    return q @ memory, memory


def chunked(q: Query, update: Update, memory: Tensor, chunk: int = 64) -> tuple[Value, Tensor]:
    """All places from the memory before them: outputs (b h t v) and the memory behind the last; any length.

    Linear in t in time and memory. chunk: places solved together, a power of two.
    """
    *shape, length, _ = q.shape
    chunk = min(chunk, 1 << (length - 1).bit_length())

    def fold(x: Tensor | None) -> Tensor | None:
        """Chunks side by side: (b h n) C (…)."""
        if x is None:
            return None
        if length % chunk:
            x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, -length % chunk))
        return x.reshape(-1, chunk, *x.shape[3:])

    q, k, v, g, a, b = map(fold, (q, *update[:5]))
    widths = [v.shape[-1], q.shape[-1]]
    reads, writes = [q] if a is None else [q, a], [k] if b is None else [k, b]
    pairs, starts, faded, total = _decayed(reads, writes, g, update.undecayed)
    if a is None:
        reader, transition = starts[0], None
        output, written = pairs[0][0] @ v, faded[0].mT @ v
    else:
        # u = X + Y S, solved for X and Y side by side, is what the last of the writes adds: together with v, or beside
        # it where erasing has keys of its own.
        target = v if b is None else pairs[0][1].tril(-1) @ v
        solved = torch.linalg.solve_triangular(
            -pairs[-1][1], torch.cat([target, starts[1]], dim=-1), upper=False, unitriangular=True
        )
        output, carry = (pairs[-1][0] @ solved).split(widths, dim=-1)
        written, transition = (faded[-1].mT @ solved).split(widths, dim=-1)
        reader = starts[0] + carry
        if b is not None:
            output, written = output + pairs[0][0] @ v, written + faded[0].mT @ v

    before, memory = _scan(memory, total, transition, written)
    output = torch.baddbmm(output, reader, before)
    return output.view(*shape, -1, widths[0])[:, :, :length], memory


def _scan(memory: Tensor, decay: Tensor | None, transition: Tensor | None, written: Tensor) -> tuple[Tensor, Tensor]:
    """The memory before each chunk, (b h n) k v, and behind the last: S ← decay S + transition S + written."""
    S = memory.flatten(0, 1)
    written = written.unflatten(0, (len(S), -1))
    if decay is None and transition is None:
        ends = torch.cat([S[:, None], written], dim=1).cumsum(dim=1)
        return ends[:, :-1].flatten(0, 1), ends[:, -1].view_as(memory)
    chunks, before = written.shape[1], []
    decays = [None] * chunks if decay is None else decay.unflatten(0, (len(S), -1)).unbind(1)
    transitions = [None] * chunks if transition is None else transition.unflatten(0, (len(S), -1)).unbind(1)
    for fade, turn, write in zip(decays, transitions, written.unbind(1), strict=True):
        before.append(S)
        kept = write + S if fade is None else torch.addcmul(write, S, fade)
        S = kept if turn is None else torch.baddbmm(kept, turn, S)
    return torch.stack(before, dim=1).flatten(0, 1), S.view_as(memory)


def _decayed(
    reads: list[Tensor], writes: list[Tensor], g: Tensor | None, undecayed: bool
) -> tuple[list[list[Tensor]], list[Tensor], list[Tensor], Tensor | None]:
    """Within chunks (n C k): for each y of writes ⟨x, y⟩ for each x of reads, x e^{G_t}, y e^{G_C − G_s}, and e^{G_C}.

    In ⟨x, y⟩ nothing stands for s > t; of a second read the places s < t alone are meant.
    """
    if g is None:
        return [[(x @ y.mT).tril_() for x in reads] for y in writes], reads, writes, None
    if g.dim() == 3:
        pairs, starts, faded, total = Decayed.apply(g, undecayed, len(reads), *reads, *writes)
        return [pair.unbind(2) for pair in pairs], starts.unbind(2), faded.unbind(0), total[..., None]
    # One decay for all channels: the same of ones, once for each kind of read, weighs the plain products.
    one = g.new_ones(()).expand(*g.shape, 1)
    kinds = 1 + (undecayed and len(reads) > 1)
    weight, grow, rest, total = Decayed.apply(g[..., None], undecayed, kinds, *[one] * (kinds + 1))
    kind = [min(i, kinds - 1) for i in range(len(reads))]
    pairs = [[x @ y.mT * weight[0, :, :, i] for x, i in zip(reads, kind, strict=True)] for y in writes]
    starts = [x * grow[:, :, i] for x, i in zip(reads, kind, strict=True)]
    return pairs, starts, [y * rest[0] for y in writes], total[..., None]


class Decayed(torch.autograd.Function):
    """⟨x, y⟩ (w n C r C), x e^{G_t} (n C r k), y e^{G_C − G_s} (w n C k) and e^{G_C} (n k) for r reads x and w writes y.

    By doubling: in a block of 2 m places the later m see the earlier m through the place where they meet, x e^{G_t − G_mid}
    against y e^{G_mid − G_s}. Both factors are products of decays, at most one each, and grow in place with the block.
    The gradient of G needs no other pass: G_t enters only as x_t e^{G_t} and y_t e^{−G_t}, so it is x_t·dx_t − y_t·dy_t.
    """

    @staticmethod
    def forward(ctx, g: Tensor, undecayed: bool, r: int, *vectors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.undecayed, ctx.r = undecayed, r
        ctx.save_for_backward(g, *vectors)
        decay, reads, writes = g.exp(), torch.stack(vectors[:r], dim=2), torch.stack(vectors[r:])
        pairs = reads.new_zeros(len(writes), *g.shape[:2], r, g.shape[1])
        pairs[:, :, :, 0].diagonal(dim1=-2, dim2=-1).copy_((reads[:, :, 0] * writes).sum(-1))
        _decayed_ones(reads, undecayed).mul_(decay[:, :, None])
        for size, before, after in _doubling(decay):
            late = _late(reads, size)
            for y, pair in zip(writes, pairs, strict=True):
                early, block = _early(y, size), _across(pair, size)
                block.copy_((late.flatten(1, 2) @ early.mT).view_as(block))
                early.mul_(after)
            late.mul_(before[:, None])
        return pairs, reads, writes, g.sum(1).exp()

    @staticmethod
    @once_differentiable
    def backward(ctx, dpairs: Tensor, dreads: Tensor, dwrites: Tensor, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        g, *vectors = ctx.saved_tensors
        undecayed, r = ctx.undecayed, ctx.r
        decay, x, y = g.exp(), torch.stack(vectors[:r], dim=2), torch.stack(vectors[r:])
        reads, writes = x.clone(), y.clone()
        grow, rest = x.new_ones(*g.shape[:2], r if undecayed else 1, g.shape[2]), torch.ones_like(g)
        own = dpairs[:, :, :, 0].diagonal(dim1=-2, dim2=-1)[..., None]
        dx, dy = torch.zeros_like(x), own * x[:, :, 0]
        dx[:, :, 0] = (own * y).sum(0)
        for z in (reads, grow):
            _decayed_ones(z, undecayed).mul_(decay[:, :, None])
        for size, before, after in _doubling(decay):
            late, up, down = _late(reads, size), _late(grow, size), _early(rest, size)
            for early, d_early, pair in zip(
                *(map(_early, z, [size] * len(z)) for z in (writes, dy)), dpairs, strict=True
            ):
                block = _across(pair, size).reshape(len(late), -1, size)
                _late(dx, size).addcmul_((block @ early).view_as(late), up)
                d_early.addcmul_(block.mT @ late.flatten(1, 2), down)
                early.mul_(after)
            late.mul_(before[:, None])
            up.mul_(before[:, None])
            down.mul_(after)
        dx.addcmul_(dreads, grow)
        dy.addcmul_(dwrites, rest)
        x.mul_(dx)
        dG = _decayed_ones(x, undecayed).sum(2) - (y * dy).sum(0)
        dG[:, -1] += (writes * dwrites).sum((0, 2)) + dtotal * g.sum(1).exp()
        if undecayed and r > 1:  # the second read enters with G_{t−1}
            dG[:, :-1] += x[:, 1:, 1]
        dg = torch.ones_like(g[0, :, :1] @ g[0, :, :1].mT).triu() @ dG
        return dg, None, None, *dx.unbind(2), *dy.unbind(0)


def _doubling(decay: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """m = 1, 2, 4 … with the decay over the earlier and over the later half of each block of 2 m places ((n blocks) 1 k)."""
    size = 1
    while decay.shape[1] > 1:
        before, after = (half[:, None] for half in decay.reshape(-1, 2, decay.shape[-1]).unbind(1))
        yield size, before, after
        decay, size = (before * after).view(len(decay), -1, decay.shape[-1]), 2 * size


def _late(x: Tensor, size: int) -> Tensor:
    """Of reads n C r k the later half of each block: (n blocks) m r k."""
    return x.view(-1, 2, size, *x.shape[2:])[:, 1]


def _early(y: Tensor, size: int) -> Tensor:
    """Of a write n C k the earlier half of each block: (n blocks) m k."""
    return y.view(-1, 2, size, y.shape[-1])[:, 0]


def _across(pair: Tensor, size: int) -> Tensor:
    """Of n C r C what the later half of each block sees of the earlier: n blocks m r m."""
    n, C, r, _ = pair.shape
    halves = pair.view(n, -1, 2, size, r, C // (2 * size), 2, size)[:, :, 1, :, :, :, 0]
    return halves.diagonal(dim1=1, dim2=4).movedim(-1, 1)


def _decayed_ones(reads: Tensor, undecayed: bool) -> Tensor:
    """The reads that see the decay of their own place: all, or but the first."""
    return reads[:, :, :1] if undecayed else reads


def spans(g: Tensor) -> Tensor:
    """Σ_{r=s+1..t} g_r for every s ≤ t, −inf for s > t (… t → … t s), each summed over its own places."""
    ones = g.new_ones(g.shape[-1], g.shape[-1])
    return (ones.tril() @ (g[..., None] * ones.tril(-1))).masked_fill(ones.triu(1).bool(), -torch.inf)


def full(x: Tensor) -> Tensor:
    """At least float32: a memory that adds up thousands of writes must not do so in half precision."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Decay(nn.Module):
    """Mamba's decay: g = −e^{A_log} Δ with Δ = softplus(W x + dt_bias), an A a head, a Δ for each of `width` channels.

    At the start A ~ U(0, 16) and Δ log-uniform in [1e−3, 0.1], so that some memories last a few tokens, some thousands.
    Source: Mamba-2, Dao and Gu, arXiv 2405.21060.
    """

    def __init__(self, d_model: int, heads: int, width: int = 1) -> None:
        super().__init__()
        self.width = width
        self.a_proj = nn.Linear(d_model, heads * width, bias=False)
        self.A_log = nn.Parameter((16 * (1 - torch.rand(heads))).log())
        dt = torch.empty(heads * width).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(dt + (-torch.expm1(-dt)).log())

    def forward(self, x: Hidden) -> tuple[Tensor, Tensor]:
        """g and Δ, b h t each, or b h t k where there is more than one channel."""
        dt = F.softplus(full(self.a_proj(x)) + self.dt_bias).unflatten(-1, (-1, self.width)).transpose(1, 2)
        g = -self.A_log.exp()[:, None, None] * dt
        return (g, dt) if self.width > 1 else (g[..., 0], dt[..., 0])


@dataclass(eq=False, repr=False, kw_only=True)
class MatrixMemory(Mixer):
    """A mechanism on this engine states its `update`, and its query, its output or the shape of its memory where
    they differ."""

    chunk: ClassVar[int] = 64
    """Places solved together: the fastest choice differs between mechanisms."""

    @abstractmethod
    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        """What is decayed, erased and written at every place."""

    def query(self, q: Query) -> Tensor:
        """What the memory is read with: q / √d_key unless the mechanism says otherwise."""
        return q * q.shape[-1] ** -0.5

    def output(self, o: Tensor, v: Value, gates: Gates) -> Value:
        """What is made of the reading o = Sᵀq: itself unless the mechanism says otherwise."""
        return o

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, memory: State | None = None) -> tuple[Value, State]:
        memory = self.empty(q, v) if memory is None else memory
        return self._run(partial(chunked, chunk=self.chunk), q, k, v, gates, memory)

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, memory: State) -> tuple[Value, State]:
        return self._run(step, q, k, v, gates, memory)

    def _run(self, form: Callable, q: Query, k: Query, v: Value, gates: Gates, memory: State) -> tuple[Value, State]:
        with without_autocast(q):
            gates = {name: full(gate) for name, gate in gates.items()}
            wide = full(v)
            o, S = form(self.query(full(q)), self.update(full(k), wide, gates), memory["S"])
            return self.output(o, wide, gates).to(v.dtype), {"S": S}

    def empty(self, q: Query, v: Value) -> State:
        return {"S": full(v).new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])}
