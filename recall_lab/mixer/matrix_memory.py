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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    length = q.shape[2]
    chunk = min(chunk, 1 << (length - 1).bit_length())

    def fold(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        padding = (0, 0) * (x.dim() - 3) + (0, -length % chunk)
        return (F.pad(x, padding) if padding[-1] else x).unflatten(2, (-1, chunk))

    q, k, v, g, a, b = map(fold, (q, *update[:5]))
    if update.undecayed and a is not None and g is not None:
        a = a * (-(g if g.dim() == 5 else g[..., None])).exp()
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
    weight = spans(g[..., 0]).exp()
    return [[(x @ y.mT) * weight for y in writes] for x in reads], grow, rest, total


def spans(g: Tensor) -> Tensor:
    """Σ_{r=s+1..t} g_r for every s ≤ t, −inf for s > t (… t → … t s), each summed over its own places."""
    ones = g.new_ones(g.shape[-1], g.shape[-1])
    return (ones.tril() @ (g[..., None] * ones.tril(-1))).masked_fill(ones.triu(1).bool(), -torch.inf)


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
