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
from collections.abc import Callable, Iterator, Sequence
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
    reads, writes = [q] if a is None else [q, a], [k] if b is None else [k, b]
    pairs, starts, faded, total = _decayed(reads, writes, g, update.undecayed)
    if a is None:
        value, reader, transition = v, starts[0], None
    else:
        # u = value + carry S is what the last of the writes adds: together with v, or beside it where erasing has keys
        # of its own.
        inverse = UnitInverse.apply(pairs[-1][1])
        value = inverse @ (v if b is None else pairs[0][1].tril(-1) @ v)
        carry = inverse @ starts[1]
        reader = torch.baddbmm(starts[0], pairs[-1][0], carry)
        transition = faded[-1].mT @ carry
    output, written = pairs[-1][0] @ value, faded[-1].mT @ value
    if b is not None:
        output, written = torch.baddbmm(output, pairs[0][0], v), torch.baddbmm(written, faded[0].mT, v)

    n = len(v) // memory.shape[:2].numel()
    before, last = Scan.apply(
        memory.flatten(0, 1), *(None if x is None else x.unflatten(0, (-1, n)) for x in (written, total, transition))
    )
    output = torch.baddbmm(output, reader, before.flatten(0, 1))
    return output.view(*shape, -1, v.shape[-1])[:, :, :length], last.view_as(memory)


class Scan(torch.autograd.Function):
    """S before each chunk (m n k v) and behind the last (m k v): S ← written + decay ⊙ S + transition S.

    memory m k v, written m n k v, decay m n k or m n 1, transition m n k k; None: no decay, no transition.
    """

    @staticmethod
    def forward(
        ctx, memory: Tensor, written: Tensor, decay: Tensor | None, transition: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        before, last = torch.empty_like(written), torch.empty_like(memory)
        before[:, 0] = memory
        for S, after, write, fade, turn in zip(
            *_along(before, [*before.unbind(1)[1:], last], written, decay, transition), strict=True
        ):
            _advance(after, S, write, fade, turn)
        ctx.save_for_backward(before, decay, transition)
        return before, last

    @staticmethod
    @once_differentiable
    def backward(ctx, d_before: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        before, decay, transition = ctx.saved_tensors
        d_memory, d_written = torch.empty_like(d_last), torch.empty_like(d_before)
        d_written[:, -1] = d_last
        for dS, d_earlier, d, fade, turn in reversed(
            [*zip(*_along(d_written, [d_memory, *d_written.unbind(1)[:-1]], d_before, decay, transition), strict=True)]
        ):
            _advance(d_earlier, dS, d, fade, None if turn is None else turn.mT)
        d_decay = d_transition = None
        if decay is not None:
            d_decay = (d_written * before).sum(-1)
            d_decay = d_decay.sum(-1, keepdim=True) if decay.shape[-1] == 1 else d_decay
        if transition is not None:
            d_transition = d_written @ before.mT
        return d_memory, d_written, d_decay, d_transition


def _along(*parts: Tensor | list[Tensor] | None) -> list:
    """The chunks of each, side by side; None for each chunk where there is none."""
    n = parts[0].shape[1]
    return [[None] * n if x is None else x if isinstance(x, list) else x.unbind(1) for x in parts]


def _advance(out: Tensor, S: Tensor, write: Tensor, fade: Tensor | None, turn: Tensor | None) -> None:
    """out = write + fade ⊙ S + turn S, in place."""
    if fade is None:
        torch.add(write, S, out=out)
    else:
        torch.addcmul(write, fade[..., None], S, out=out)
    if turn is not None:
        out.baddbmm_(turn, S)


def _decayed(
    reads: list[Tensor], writes: list[Tensor], g: Tensor | None, undecayed: bool
) -> tuple[list[list[Tensor]], list[Tensor], list[Tensor], Tensor | None]:
    """Within chunks (n C k): for each y of writes ⟨x, y⟩ for each x of reads, x e^{G_t}, y e^{G_C − G_s}, and e^{G_C}.

    In ⟨x, y⟩ nothing stands for s > t; of a second read the places s < t alone are meant.
    """
    r, w = len(reads), len(writes)
    if g is None:
        return [[(x @ y.mT).tril_() for x in reads] for y in writes], reads, writes, None
    if g.dim() == 3:
        *out, total = Decayed.apply(g, undecayed, r, *reads, *writes)
        pairs, starts, faded = out[: r * w], out[r * w : r * w + r], out[r * w + r :]
        return [pairs[i * r : i * r + r] for i in range(w)], starts, faded, total
    # One decay for all channels: the same of ones, once for each kind of read, weighs the plain products.
    kinds = r if undecayed else 1
    one = g.new_ones(()).expand(*g.shape, 1)
    *out, rest, total = Decayed.apply(g[..., None], undecayed, kinds, *[one] * (kinds + 1))
    weight, grow = out[:kinds] * (r // kinds), out[kinds:] * (r // kinds)
    pairs = [[x @ y.mT * part for x, part in zip(reads, weight, strict=True)] for y in writes]
    return pairs, [x * up for x, up in zip(reads, grow, strict=True)], [y * rest for y in writes], total


class Decayed(torch.autograd.Function):
    """⟨x, y⟩ (n C C) for each y and each x, x e^{G_t} and y e^{G_C − G_s} (n C k), and e^{G_C} (n k).

    g is n C k; of the vectors, n C k each, the first r are reads x, the others writes y; undecayed: reads but the first
    enter with G_{t−1}.
    By doubling: in a block of 2 m places the later m see the earlier m through the place where they meet, with
    x e^{G_t − G_mid} against y e^{G_mid − G_s}. Both factors are products of decays, at most one each, and are kept up in
    place from block to block, all reads side by side and all writes.
    The gradient of G needs no pass of its own: G_t enters as x_t e^{G_t} and y_t e^{−G_t} alone, so that it is
    x_t·dx_t − y_t·dy_t.
    """

    @staticmethod
    def forward(ctx, g: Tensor, undecayed: bool, r: int, *vectors: Tensor) -> tuple[Tensor, ...]:
        ctx.undecayed, ctx.r = undecayed, r
        ctx.save_for_backward(g, *vectors)
        decay, w = g.exp(), len(vectors) - r
        reads, writes = _beside(vectors[:r], decay, undecayed), torch.stack(vectors[r:], dim=2)
        pairs = g.new_zeros(w, r, len(g), g.shape[1], g.shape[1])
        for y, pair in zip(vectors[r:], pairs[:, 0], strict=True):
            pair.diagonal(dim1=-2, dim2=-1).copy_((vectors[0] * y).sum(-1))
        for size, before, after in _doubling(decay):
            late, early, block = _late(reads, size), _early(writes, size), _across(pairs, size)
            block.copy_((late.flatten(1, 2) @ early.flatten(1, 2).mT).view(block.shape))
            late.mul_(before)
            early.mul_(after)
        return *pairs.flatten(0, 1).unbind(), *reads.unbind(2), *writes.unbind(2), g.sum(1).exp()

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g, *vectors = ctx.saved_tensors
        r, undecayed, decay = ctx.r, ctx.undecayed, g.exp()
        xs, ys = vectors[:r], vectors[r:]
        w, kinds = len(ys), r if undecayed else 1
        d_pairs = torch.stack(grads[: r * w]).unflatten(0, (w, r))
        d_reads, d_writes, d_total = grads[r * w : r * w + r], grads[r * w + r : -1], grads[-1]
        reads, writes = _beside(xs, decay, undecayed), torch.stack(ys, dim=2)
        ones = torch.ones_like(g)
        grow, rest = _beside([ones] * kinds, decay, undecayed), ones[:, :, None]
        dx, dy = torch.zeros_like(reads), torch.empty_like(writes)
        for j, own in enumerate(d_pairs[:, 0].diagonal(dim1=-2, dim2=-1)[..., None].unbind()):
            dx[:, :, 0].addcmul_(own, ys[j])
            torch.mul(own, xs[0], out=dy[:, :, j])
        for size, before, after in _doubling(decay):
            late, early, up, down = _late(reads, size), _early(writes, size), _late(grow, size), _early(rest, size)
            block = _across(d_pairs, size).reshape(len(late), size * r, size * w)
            _late(dx, size).addcmul_((block @ early.flatten(1, 2)).view_as(late), up)
            _early(dy, size).addcmul_((block.mT @ late.flatten(1, 2)).view_as(early), down)
            for x in (late, up):
                x.mul_(before)
            for y in (early, down):
                y.mul_(after)
        dG, dxs, dys = torch.zeros_like(g), dx.unbind(2), dy.unbind(2)
        for i, (x, d) in enumerate(zip(xs, d_reads, strict=True)):
            dxs[i].addcmul_(d, grow[:, :, min(i, kinds - 1)])
            late = int(undecayed and i > 0)  # such a read enters with G_{t−1}
            dG[:, : g.shape[1] - late].addcmul_(x[:, late:], dxs[i][:, late:])
        end = d_total * g.sum(1).exp()
        for j, (y, d) in enumerate(zip(ys, d_writes, strict=True)):
            dys[j].addcmul_(d, rest[:, :, 0])
            dG.addcmul_(y, dys[j], value=-1)
            end += (writes[:, :, j] * d).sum(1)
        dG[:, -1] += end
        later = g.new_ones(g.shape[1], g.shape[1]).triu()
        return later @ dG, None, None, *dxs, *dys


class UnitInverse(torch.autograd.Function):
    """(I − A)⁻¹ of the strictly lower triangle of A, n C C."""

    @staticmethod
    def forward(ctx, A: Tensor) -> Tensor:
        one = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A)
        T = torch.linalg.solve_triangular(-A, one, upper=False, unitriangular=True)
        ctx.save_for_backward(T)
        return T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (T,) = ctx.saved_tensors
        return (T.mT @ grad @ T.mT).tril_(-1)


def _doubling(decay: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """m = 1, 2, 4 …, and the decay over the earlier and over the later half of each block of 2 m places (blocks 1 1 k)."""
    size = 1
    while decay.shape[1] > 1:
        before, after = (half[:, None, None] for half in decay.reshape(-1, 2, decay.shape[-1]).unbind(1))
        yield size, before, after
        decay, size = (before * after).view(len(decay), -1, decay.shape[-1]), 2 * size


def _beside(reads: Sequence[Tensor], decay: Tensor, undecayed: bool) -> Tensor:
    """The reads side by side, n C r k, each with the decay of its own place; undecayed: but for the first without."""
    n, C, k = reads[0].shape
    out = decay.new_empty(n, C, len(reads), k)
    for i, x in enumerate(reads):
        torch.mul(x, 1 if undecayed and i else decay, out=out[:, :, i])
    return out


def _late(x: Tensor, size: int) -> Tensor:
    """The later half of each block of 2 · size places: n C r k → blocks size r k."""
    return x.view(-1, 2, size, *x.shape[2:])[:, 1]


def _early(y: Tensor, size: int) -> Tensor:
    """The earlier half of each block."""
    return y.view(-1, 2, size, *y.shape[2:])[:, 0]


def _across(pairs: Tensor, size: int) -> Tensor:
    """What the later half of each block sees of the earlier: w r n C C → n blocks size r size w."""
    C = pairs.shape[-1]
    halves = pairs.view(*pairs.shape[:3], -1, 2, size, C // (2 * size), 2, size)[:, :, :, :, 1, :, :, 0]
    return halves.diagonal(dim1=3, dim2=5).permute(2, 5, 3, 1, 4, 0)


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
