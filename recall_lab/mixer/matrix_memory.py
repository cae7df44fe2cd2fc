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

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recall_lab.mixer.base import Mixer
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
    """a, read from the decayed memory S': b h t k; None: nothing is erased.

    A mechanism that reads before the decay passes a e^{−g}."""
    erase_key: Tensor | None = None
    """b: b h t k; None: the write key."""


def step(q: Query, update: Update, memory: Tensor) -> tuple[Value, Tensor]:
    """One place, by the definition; memory is b h k v."""
    k, v, g, a, b = update
    if g is not None:
        memory = memory * (g[..., None] if g.dim() == 3 else g.mT).exp()
    write = k.mT @ v
    if a is not None:
        write = write + (k if b is None else b).mT @ (a @ memory)
    memory = memory + write
    return q @ memory, memory


def chunked(q: Query, update: Update, memory: Tensor, chunk: int = 64) -> tuple[Value, Tensor]:
    """All places from the memory before them: outputs (b h t v) and the memory behind the last; any length.

    Linear in t in time and memory. chunk: places solved together, a power of two.
    """
    length = q.shape[2]
    chunk = min(chunk, 1 << (length - 1).bit_length())

    def fold(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        padding = (0, 0) * (x.dim() - 3) + (0, -length % chunk)
        return (F.pad(x, padding) if padding[-1] else x).unflatten(2, (-1, chunk))

    q, k, v, g, a, b = map(fold, (q, *update))
    shared = a is None or b is None
    writes = [k] if shared else [k, b]
    pair, grow, rest, total = _decays([q] if a is None else [q, a], writes, g)
    faded = [y * rest for y in writes] if rest is not None else writes
    q_start = q if grow is None else q * grow

    if a is None:
        value, carry = v, None
    else:
        a_start = a if grow is None else a * grow
        onto, target = (pair[1][0], v) if shared else (pair[1][1], pair[1][0].tril(-1) @ v)
        solved = torch.linalg.solve_triangular(
            -onto.tril(-1), torch.cat([target, a_start], dim=-1), upper=False, unitriangular=True
        )
        value, carry = solved.split([v.shape[-1], a.shape[-1]], dim=-1)

    # `value` and `carry` belong to the last of `writes`; where erasing has keys of its own, v is written beside it.
    written = faded[-1].mT @ value
    output = pair[0][-1] @ value
    if not shared:
        written = written + faded[0].mT @ v
        output = output + pair[0][0] @ v
    transition = None if carry is None else faded[-1].mT @ carry
    reader = q_start if carry is None else q_start + pair[0][-1] @ carry

    starts, memory = _scan(memory, total, transition, written)
    output = output + reader @ starts
    return output.flatten(2, 3)[:, :, :length], memory


def _scan(memory: Tensor, decay: Tensor | None, transition: Tensor | None, written: Tensor) -> tuple[Tensor, Tensor]:
    """The memory before each chunk (b h n k v) and behind the last: S ← decay S + transition S + written."""
    if decay is None and transition is None:
        ends = torch.cat([memory[:, :, None], written], dim=2).cumsum(dim=2)
        return ends[:, :, :-1], ends[:, :, -1]
    starts = []
    decays = [None] * written.shape[2] if decay is None else decay.unbind(2)
    transitions = [None] * written.shape[2] if transition is None else transition.unbind(2)
    for fade, turn, write in zip(decays, transitions, written.unbind(2), strict=True):
        starts.append(memory)
        kept = memory if fade is None else memory * fade
        if turn is not None:
            write = torch.baddbmm(write.flatten(0, 1), turn.flatten(0, 1), memory.flatten(0, 1)).view_as(write)
        memory = kept + write
    return torch.stack(starts, dim=2), memory


def _decays(
    reads: list[Tensor], writes: list[Tensor], g: Tensor | None
) -> tuple[list[list[Tensor]], Tensor | None, Tensor | None, Tensor | None]:
    """⟨x, y⟩ for each x in reads and y in writes (zero for s > t), and e^{G_t}, e^{G_C − G_s}, e^{G_C}.

    All sums of g run over the places they stand for and never are differences of longer ones, which would lose
    what is left of a weak decay beside strong ones.
    """
    chunk = writes[0].shape[-2]
    ones = writes[0].new_ones(chunk, chunk)
    if g is None:
        return [[(x @ y.mT).tril() for y in writes] for x in reads], None, None, None
    per_channel = g.dim() == 5
    if not per_channel:
        g = g[..., None]
    grow = (ones.tril() @ g).exp()
    rest = (ones.triu(1) @ g).exp()
    total = g.sum(-2, keepdim=True).exp()
    if per_channel:
        return [[_pair(x, y, g) for y in writes] for x in reads], grow, rest, total.mT
    span = ones.tril() @ (g * ones.tril(-1))
    weight = span.masked_fill(ones.triu(1).bool(), -torch.inf).exp()
    return [[(x @ y.mT) * weight for y in writes] for x in reads], grow, rest, total


def _pair(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """⟨x, y⟩ with a decay a channel (… C k → … C C), by halving: a later half sees an earlier one through the place
    where they meet, x e^{G_t − G_mid} against y e^{G_mid − G_s}, two factors of at most one."""
    size = x.shape[-2]
    if size == 1:
        return x @ y.mT
    half = size // 2
    ones = g.new_ones(half, half)
    early, late = (slice(None, half), slice(half, None))
    across = (x[..., late, :] * (ones.tril() @ g[..., late, :]).exp()) @ (
        y[..., early, :] * (ones.triu(1) @ g[..., early, :]).exp()
    ).mT
    halves = [t.unflatten(-2, (2, half)) for t in (x, y, g)]
    inner = _pair(*halves)
    top = torch.cat([inner[..., 0, :, :], torch.zeros_like(across)], dim=-1)
    return torch.cat([top, torch.cat([across, inner[..., 1, :, :]], dim=-1)], dim=-2)


def full(x: Tensor) -> Tensor:
    """At least float32: a memory that adds up thousands of writes must not do so in half precision."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


@dataclass(eq=False, repr=False, kw_only=True)
class MatrixMemory(Mixer):
    """A mechanism on this engine states its `update`, and its query or the shape of its memory where they differ."""

    chunk: ClassVar[int] = 64

    @abstractmethod
    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        """What is decayed, erased and written at every place."""

    def query(self, q: Query) -> Query:
        """What the memory is read with: q / √d_key unless the mechanism says otherwise."""
        return q * q.shape[-1] ** -0.5

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, memory: State | None = None) -> tuple[Value, State]:
        memory = self.empty(q, v) if memory is None else memory
        with torch.autocast(q.device.type, enabled=False):
            o, S = chunked(self.query(full(q)), self.update(full(k), full(v), gates), memory["S"], self.chunk)
        return o.to(v.dtype), {"S": S}

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, memory: State) -> tuple[Value, State]:
        with torch.autocast(q.device.type, enabled=False):
            o, S = step(self.query(full(q)), self.update(full(k), full(v), gates), memory["S"])
        return o.to(v.dtype), {"S": S}

    def empty(self, q: Query, v: Value) -> State:
        return {"S": full(v).new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])}
