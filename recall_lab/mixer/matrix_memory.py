"""One engine for every mechanism whose memory is a matrix S (d_key × d_value) that decays, erases and writes:

    S' = diag(e^{g_t}) S_{t−1},      S_t = S' + b_t (a_tᵀ S') + k_t v_tᵀ,      o_t = S_tᵀ q_t.

Within a chunk of C places let G_t = Σ_{r≤t} g_r since its start, S the memory at its start, u_t = S'ᵀ a_t what is
read for erasing, and ⟨x, y⟩_ts = Σ_c x_tc y_sc e^{G_tc − G_sc}, whose exponents are ≤ 0 for s ≤ t. Then

    u_t = Σ_{s<t} ⟨a, b⟩_ts u_s + Σ_{s<t} ⟨a, k⟩_ts v_s + (a_t e^{G_t})ᵀ S

is solved by one triangular inverse for all chunks together, u = X + Y S. What is left for the loop over chunks is one
small product, S ← (diag(e^{G_C}) + b̃ᵀ Y) S + (k̃ᵀ V + b̃ᵀ X) with k̃_s = k_s e^{G_C − G_s}; the outputs of all chunks
are again one batched product. Nothing is ever divided by a decay, so nothing overflows. The three parts that autograd
would make slow (⟨x, y⟩, the inverse, the loop) bring their own gradient, once differentiable.

Sources of the form: Yang et al., arXiv 2406.06484 (delta rule) and 2312.06635 (decay a channel).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from recall_lab.mixer.base import Mixer
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.shapes import Gates, Query, State, Value


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


def delta_update(k: Query, v: Value, gates: Gates) -> Update:
    """The delta rule's update at rate gates["beta"] (b h t), on a memory that decays by gates["log_decay"] if any:
    what S'ᵀk answers is taken away, and v put in its place."""
    beta = gates["beta"][..., None]
    return Update(k, beta * v, gates.get("log_decay"), erase_read=-beta * k)


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


def chunked(q: Query, update: Update, memory: Tensor, chunk: int = 32) -> tuple[Value, Tensor]:
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
        return x.reshape(-1, chunk, *x.shape[3:]).contiguous()

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
        before, S = torch.empty_like(written), memory
        for i, advance in enumerate(_chunks(written, decay, transition)):
            before[:, i] = S
            S = _advance(S, *advance)
        ctx.save_for_backward(before, decay, transition)
        return before, S

    @staticmethod
    @once_differentiable
    def backward(ctx, d_before: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        before, decay, transition = ctx.saved_tensors
        d_written, d_decay, d_transition = torch.empty_like(before), None, None
        turned = None if transition is None else transition.mT
        for i, advance in reversed([*enumerate(_chunks(d_before, decay, turned))]):
            d_written[:, i] = dS
            dS = _advance(dS, *advance)
        if decay is not None:
            d_decay = (d_written * before).sum(-1)
            if decay.shape[-1] == 1:
                d_decay = d_decay.sum(-1, keepdim=True)
        if transition is not None:
            d_transition = d_written @ before.mT
        return dS, d_written, d_decay, d_transition


def _chunks(written: Tensor, *others: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    """Each chunk's part of all of them."""
    nothing = [None] * written.shape[1]
    return zip(written.unbind(1), *(nothing if x is None else x.unbind(1) for x in others), strict=True)


def _advance(S: Tensor, write: Tensor, decay: Tensor | None, transition: Tensor | None) -> Tensor:
    """write + decay ⊙ S + transition S."""
    kept = write + S if decay is None else torch.addcmul(write, decay[..., None], S)
    return kept if transition is None else kept.baddbmm_(transition, S)


def _decayed(
    reads: list[Tensor], writes: list[Tensor], g: Tensor | None, undecayed: bool
) -> tuple[list[list[Tensor]], list[Tensor], list[Tensor], Tensor | None]:
    """Within chunks (n C k): for each y of writes ⟨x, y⟩ for each x of reads, x e^{G_t}, y e^{G_C − G_s}, and e^{G_C}.

    In ⟨x, y⟩ nothing stands for s > t; of a second read the places s < t alone are meant.
    """
    r, w = len(reads), len(writes)
    undecayed = undecayed and r > 1
    if g is None:
        return [[(x @ y.mT).tril_() for x in reads] for y in writes], reads, writes, None
    if g.dim() == 3:
        *out, total = Doubled.apply(g, undecayed, r, *reads, *writes)
    else:
        *out, total = Weighed.apply(g[..., None], undecayed, r, *reads, *writes)
    pairs = [out[i * r : i * r + r] for i in range(w)]
    return pairs, out[r * w : r * w + r], out[r * w + r :], total


class Weighed(torch.autograd.Function):
    """⟨x, y⟩ (n C C) of each y with each x, x e^{G_t} and y e^{G_C − G_s} (n C k), and e^{G_C} (n 1): one decay for all
    channels, g n C 1, weighs the plain products.

    Of the vectors, n C k each, the first r are reads x, the others writes y; undecayed: reads but the first enter with
    G_{t−1}. Everything needed of G is a sum over the very places it stands for: a difference of longer sums would lose
    what is left of a weak decay beside strong ones.
    """

    @staticmethod
    def forward(ctx, g: Tensor, undecayed: bool, r: int, *vectors: Tensor) -> tuple[Tensor, ...]:
        lower = g.new_ones(g.shape[1], g.shape[1]).tril()
        weight, rest = [(lower @ (g * lower.tril(-1))).exp_().tril_()], ((1 - lower) @ g).exp()
        grow = [(lower @ g).exp()]
        if undecayed:
            weight.append(F.pad(weight[0][:, :-1], (0, 0, 1, 0)))
            grow.append(F.pad(grow[0][:, :-1], (0, 0, 1, 0), value=1))
        total = g.sum(1).exp()
        ctx.undecayed, ctx.r = undecayed, r
        ctx.save_for_backward(total, rest, *weight, *grow, *vectors)
        pairs = [(x @ y.mT).mul_(weight[undecayed and i > 0]) for y in vectors[r:] for i, x in enumerate(vectors[:r])]
        starts = [x * grow[undecayed and i > 0] for i, x in enumerate(vectors[:r])]
        return *pairs, *starts, *(y * rest for y in vectors[r:]), total

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        undecayed, r, kinds = ctx.undecayed, ctx.r, 1 + ctx.undecayed
        total, rest, *saved = ctx.saved_tensors
        weight, grow, vectors = saved[:kinds], saved[kinds : 2 * kinds], saved[2 * kinds :]
        xs, ys = vectors[:r], vectors[r:]
        dxs, dys = [None] * r, [None] * len(ys)
        for place, d in enumerate(grads[: r * len(ys)]):
            j, i = divmod(place, r)
            d = d * weight[undecayed and i > 0]
            dxs[i] = d @ ys[j] if dxs[i] is None else dxs[i].baddbmm_(d, ys[j])
            dys[j] = d.mT @ xs[i] if dys[j] is None else dys[j].baddbmm_(d.mT, xs[i])
        return _gradients(total, undecayed, xs, ys, dxs, dys, grads[r * len(ys) :], grow, rest)


PIECE = 512
"""Chunks that Doubled works on at a time: what it makes on the way then stays in a processor's cache."""


class Doubled(torch.autograd.Function):
    """The same with a decay a channel, g n C k, by doubling.

    In a block of 2 m places the later m see the earlier m through the place where they meet, with x e^{G_t − G_mid}
    against y e^{G_mid − G_s}. Both factors are products of decays, at most one each, and are kept up in place from
    block to block, all reads side by side.
    """

    @staticmethod
    def forward(ctx, g: Tensor, undecayed: bool, r: int, *vectors: Tensor) -> tuple[Tensor, ...]:
        decay, total = g.exp(), g.sum(1).exp()
        reads, writes = _beside(vectors[:r], decay, undecayed), [y.clone() for y in vectors[r:]]
        pairs = [g.new_zeros(*g.shape[:2], r, g.shape[1]) for _ in writes]
        for alpha, rows, *columns in zip(*(x.split(PIECE) for x in (decay, reads, *writes, *pairs)), strict=True):
            for size, before, after in _doubling(alpha):
                late = _late(rows, size)
                for y, pair in zip(columns[: len(writes)], columns[len(writes) :], strict=True):
                    early, block = _early(y, size), _across(pair, size)
                    block.copy_((late.flatten(1, 2) @ early.mT).view(block.shape))
                    early.mul_(after)
                late.mul_(before[:, None])
        for y, pair in zip(vectors[r:], pairs, strict=True):
            pair[:, :, 0].diagonal(dim1=-2, dim2=-1).copy_((vectors[0] * y).sum(-1))
        ctx.undecayed, ctx.r = undecayed, r
        ctx.save_for_backward(decay, total, *vectors)
        return *(x for pair in pairs for x in pair.unbind(2)), *reads.unbind(2), *writes, total

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pieces = zip(*(x.split(PIECE) for x in (*ctx.saved_tensors, *grads)), strict=True)
        kept = len(ctx.saved_tensors)
        parts = [_doubled_gradients(ctx.undecayed, ctx.r, piece[:kept], piece[kept:]) for piece in pieces]
        return tuple(None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True))


def _doubled_gradients(
    undecayed: bool, r: int, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """The gradient of Doubled for some of the chunks."""
    decay, total, *vectors = saved
    xs, ys = vectors[:r], vectors[r:]
    d_pairs = [torch.stack(grads[i : i + r], dim=2) for i in range(0, r * len(ys), r)]
    x, ones = torch.stack(xs, dim=2), torch.ones_like(decay)
    grow, rest = _beside([ones] * (1 + undecayed), decay, undecayed), ones
    own = [d[:, :, 0].diagonal(dim1=-2, dim2=-1)[..., None] for d in d_pairs]
    dx, dys = torch.zeros_like(x), [d * xs[0] for d in own]
    for d, y in zip(own, ys, strict=True):
        dx[:, :, 0].addcmul_(d, y)
    for size, before, after in _doubling(decay):
        up, down = _late(grow, size), _early(rest, size)
        late = (_late(x, size) * up).flatten(1, 2)
        early = torch.stack([_early(y, size) for y in ys], dim=1).mul_(down[:, None]).flatten(1, 2)
        block = torch.cat([_across(d, size) for d in d_pairs], dim=-1).flatten(0, 1)
        _late(dx, size).addcmul_(_product(block, early).unflatten(1, (size, r)), up)
        for dy, d in zip(dys, _product(block.mT, late).split(size, dim=1), strict=True):
            _early(dy, size).addcmul_(d, down)
        up.mul_(before[:, None])
        down.mul_(after)
    return _gradients(total, undecayed, xs, ys, dx.unbind(2), dys, grads[r * len(ys) :], grow.unbind(2), rest)


def _gradients(
    total: Tensor,
    undecayed: bool,
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    dxs: Sequence[Tensor],
    dys: Sequence[Tensor],
    grads: Sequence[Tensor],
    grow: Sequence[Tensor],
    rest: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients of g and of the vectors, from those through ⟨x, y⟩ (dxs, dys) and from those of the other outputs.

    That of G needs no pass of its own: G_t enters as x_t e^{G_t} and y_t e^{−G_t}, so it is x_t·dx_t − y_t·dy_t.
    """
    d_starts, d_faded, d_total = grads[: len(xs)], grads[len(xs) : -1], grads[-1]
    C = xs[0].shape[1]
    dG, behind = total.new_zeros(2, len(total), C, total.shape[1])
    for i, (x, dx, d) in enumerate(zip(xs, dxs, d_starts, strict=True)):
        late = int(undecayed and i > 0)
        dx.addcmul_(d, grow[late])
        _add_product(dG[:, : C - late], x[:, late:], dx[:, late:])
    for y, dy, d in zip(ys, dys, d_faded, strict=True):
        _add_product(dG, y, dy, sign=-1)
        d = d * rest
        dy.add_(d)
        _add_product(behind, y, d)
    later = total.new_ones(C, C).triu()
    dg = torch.baddbmm(later @ dG, (1 - later).expand(len(dG), -1, -1), behind).add_((d_total * total)[:, None])
    return dg, None, None, *dxs, *dys


def _add_product(to: Tensor, x: Tensor, y: Tensor, sign: int = 1) -> None:
    """to += x ⊙ y, or x·y where all channels share one."""
    if to.shape[-1] == 1:
        to.add_((x * y).sum(-1, keepdim=True), alpha=sign)
    else:
        to.addcmul_(x, y, value=sign)


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
    """m = 1, 2, 4 …, and the decay over the earlier and the later half of each block of 2 m places (blocks 1 k)."""
    size = 1
    while decay.shape[1] > 1:
        before, after = (half[:, None] for half in decay.reshape(-1, 2, decay.shape[-1]).unbind(1))
        yield size, before, after
        decay, size = (before * after).view(len(decay), -1, decay.shape[-1]), 2 * size


def _beside(reads: Sequence[Tensor], decay: Tensor, undecayed: bool) -> Tensor:
    """The reads side by side, n C r k, each with the decay of its own place; undecayed: the others than the first
    without."""
    n, C, k = reads[0].shape
    out = decay.new_empty(n, C, len(reads), k)
    for i, x in enumerate(reads):
        torch.mul(x, 1 if undecayed and i else decay, out=out[:, :, i])
    return out


def _late(x: Tensor, size: int) -> Tensor:
    """The later half of each block of 2 · size places: n C … → blocks size …."""
    return x.view(-1, 2, size, *x.shape[2:])[:, 1]


def _early(y: Tensor, size: int) -> Tensor:
    """The earlier half of each block."""
    return y.view(-1, 2, size, *y.shape[2:])[:, 0]


def _across(pair: Tensor, size: int) -> Tensor:
    """What the later half of each block sees of the earlier: n C r C → n blocks (size r) size."""
    n, C, r, _ = pair.shape
    halves = pair.view(n, -1, 2, size * r, C // (2 * size), 2, size)[:, :, 1, :, :, 0]
    return halves.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; a sum of outer products below the size (400 multiplications) under which bmm on CPU is a plain loop."""
    if a.shape[1] * a.shape[2] * b.shape[2] >= 400:
        return a @ b
    out = a[:, :, 0, None] * b[:, 0, None]
    for i in range(1, a.shape[2]):
        out.addcmul_(a[:, :, i, None], b[:, i, None])
    return out


@dataclass(eq=False, repr=False, kw_only=True)
class MatrixMemory(Mixer):
    """A mechanism on this engine states its `update`, and its query, its output or the shape of its state where
    they differ."""

    chunk: ClassVar[int] = 32
    """Places solved together, a power of two."""

    @abstractmethod
    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        """What is decayed, erased and written at every place."""

    def query(self, q: Query) -> Tensor:
        """What the state is read with: q / √d_key unless the mechanism says otherwise."""
        return q * q.shape[-1] ** -0.5

    def output(self, o: Tensor, v: Value, gates: Gates) -> Value:
        """What is made of the reading o = Sᵀq: itself unless the mechanism says otherwise."""
        return o

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        state = self.empty_state(q, v) if state is None else state
        return self._run(partial(chunked, chunk=self.chunk), q, k, v, gates, state)

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        return self._run(step, q, k, v, gates, state)

    def _run(self, form: Callable, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        with without_autocast(q):
            gates = {name: full_precision(gate) for name, gate in gates.items()}
            wide = full_precision(v)
            o, S = form(self.query(full_precision(q)), self.update(full_precision(k), wide, gates), state["S"])
            return self.output(o, wide, gates).to(v.dtype), {"S": S}

    def empty_state(self, q: Query, v: Value) -> State:
        return {"S": full_precision(v).new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])}
