"""One engine for every mechanism whose state is a matrix S (d_key × d_value) that decays, is erased and is written to.

The recurrence, for position t with query q_t:

    S' = diag(e^{g_t}) S_{t−1}              decay, g_t ≤ 0: one for all key channels, or one per channel
    S_t = S' + b_t (a_tᵀ S') + k_t v_tᵀ     erase: add the answer to a_t along b_t; write: add v_t along k_t
    o_t = S_tᵀ q_t                          read

`step` is one position of it, and `naive` repeats `step` over all positions. `chunked` computes the same in chunks of c
positions. Within a chunk let G_t = Σ_{r≤t} g_r since its start, S the state at its start, u_t = S'ᵀ a_t the answer to
a_t, and ⟨x, y⟩_ts = Σ_k x_tk y_sk e^{G_tk − G_sk}, whose exponents are ≤ 0 for s ≤ t. Then

    u_t = Σ_{s<t} ⟨a, b⟩_ts u_s + Σ_{s<t} ⟨a, k⟩_ts v_s + (a_t e^{G_t})ᵀ S

is a triangular system, which is solved for all chunks together: u = X + Y S. The state then goes from chunk to chunk
by one small product, S ← (diag(e^{G_c}) + b̃ᵀ Y) S + (k̃ᵀ V + b̃ᵀ X) with k̃_s = k_s e^{G_c − G_s}, b̃_s = b_s e^{G_c − G_s}
and the rows v_s of V. The outputs of all chunks are again one batched product. Nothing is divided by a decay, so
nothing overflows.

Sources: Yang et al., arXiv 2406.06484 (the delta rule in chunks) and arXiv 2312.06635 (a decay per channel).
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recall_lab.mixer.base import Mixer, query_scale
from recall_lab.mixer.channel_decay import channel_decay
from recall_lab.mixer.decayed_products import DecayedProducts, scalar_decay, without_decay
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.shapes import Gates, Query, State, Value


class Update(NamedTuple):
    """What a mechanism does to its state S at every position: S' = diag(e^g) S, then S' + b (aᵀ S') + k vᵀ.

    write_key           k, b h t k: the key that the value is written with.
    write_value         v, b h t v: the value that is written.
    log_decay           g ≤ 0, b h t (one decay for all channels) or b h t k (one per key channel); −inf forgets
                        everything. None: no decay.
    erase_read          a, b h t k: what the state is read with for erasing. None: nothing is erased.
    erase_key           b, b h t k: the key that the answer to a is written with. None: the write key.
    reads_before_decay  whether a reads S, the state before the decay, instead of S'.
    """

    write_key: Tensor
    write_value: Tensor
    log_decay: Tensor | None = None
    erase_read: Tensor | None = None
    erase_key: Tensor | None = None
    reads_before_decay: bool = False


def delta_update(k: Query, v: Value, gates: Gates) -> Update:
    """The delta rule: S' + β k (v − S'ᵀk)ᵀ, at rate gates["beta"] (b h t).

    S' is the state after the decay gates["log_decay"] if that gate exists, else the state itself.
    """
    beta = gates["beta"][..., None]  # b h t 1
    return Update(k, beta * v, gates.get("log_decay"), erase_read=-beta * k)


def step(q: Query, update: Update, state: Tensor) -> tuple[Value, Tensor]:
    """One position (t = 1) by the definition: the output (b h 1 v) and the state after it (b h k v)."""
    k, v, g, a, b, reads_before_decay = update
    before = state
    if g is not None:
        state = state * (g[..., None] if g.dim() == 3 else g.mT).exp()  # b h k v
    write = k.mT @ v  # b h k v
    if a is not None:
        answer = a @ (before if reads_before_decay else state)  # b h 1 v
        write = write + (k if b is None else b).mT @ answer
    state = state + write
    return q @ state, state


def naive(q: Query, update: Update, state: Tensor) -> tuple[Value, Tensor]:
    """All positions, one `step` after another: outputs (b h t v) and the last state (b h k v)."""
    k, v, g, a, b, reads_before_decay = update
    outputs = [q[:, :, :0] @ state]
    for t in range(q.shape[2]):
        here = slice(t, t + 1)
        g_t, a_t, b_t = (None if x is None else x[:, :, here] for x in (g, a, b))
        position = Update(k[:, :, here], v[:, :, here], g_t, a_t, b_t, reads_before_decay)
        o, state = step(q[:, :, here], position, state)
        outputs.append(o)
    return torch.cat(outputs, dim=2), state


class Kernel(NamedTuple):
    """Products of wide features, computed from the narrow vectors that they are features of: φ(x)·φ(y) = of(x·y).

    read  b h t d: x, of which the queries are features.
    key   b h t d: y, of which the write keys are features.
    of    the function of x·y.
    """

    read: Tensor
    key: Tensor
    of: Callable[[Tensor], Tensor]


def chunked(
    q: Query, update: Update, state: Tensor, chunk: int | None = None, kernel: Kernel | None = None
) -> tuple[Value, Tensor]:
    """All positions in chunks: outputs (b h t v) and the last state (b h k v), from the state before the first.

    t may be 0. Time and storage are linear in t. chunk: positions that are solved together, a power of two; None: about
    half of d_key, between 16 and 64, which is the fastest on a CPU. kernel: gives the products within a chunk, for an
    update that only writes.
    """
    b, h, length, d_key = q.shape
    if length == 0:
        return q @ state, state
    chunk = chunk or 1 << min(max(d_key.bit_length() - 2, 4), 6)
    chunk = min(chunk, 1 << (length - 1).bit_length())
    chunks = -(-length // chunk)

    def fold(x: Tensor) -> Tensor:
        """b h t … → n c …, the n chunks of all sequences and heads side by side; the last is filled with zeros."""
        if length % chunk:
            x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, -length % chunk))
        return x.reshape(b * h * chunks, chunk, *x.shape[3:])

    v, g = fold(update.write_value), None if update.log_decay is None else fold(update.log_decay)  # n c v, n c (k)
    if kernel is not None:
        query, write_key = fold(q), fold(update.write_key)  # n c k
        pairs = kernel.of(fold(kernel.read) @ fold(kernel.key).mT).tril()  # n c c
        parts = _Chunks(pairs @ v, query, write_key.mT @ v, None, None)
    elif update.erase_read is None:
        parts = _write_only(v, g, fold(q), fold(update.write_key))
    else:
        keys = [fold(x) for x in (update.write_key, update.erase_key) if x is not None]  # n c k
        parts = _write_and_erase(v, g, [fold(q), fold(update.erase_read)], keys, update.reads_before_decay)
    before, last = _scan(state.flatten(0, 1), parts, chunks)  # (b h) chunks k v, (b h) k v
    output = torch.baddbmm(parts.output, parts.reader, before.flatten(0, 1))  # n c v
    return output.view(b, h, chunks * chunk, -1)[:, :, :length], last.view_as(state)


class _Chunks(NamedTuple):
    """The outputs and the next state of each chunk, as affine functions of the state S at its start.

    Outputs: output + reader S. Next state: written + decay ⊙ S + transition S.

    output      n c v
    reader      n c k
    written     n k v
    decay       n k or n 1; None: no decay
    transition  n k k; None: nothing is erased
    """

    output: Tensor
    reader: Tensor
    written: Tensor
    decay: Tensor | None
    transition: Tensor | None


def _products(g: Tensor | None, reads: list[Tensor], keys: list[Tensor], reads_before_decay: bool) -> DecayedProducts:
    """The products of reads and keys (n c k each) under the log decay g: none, n c or n c k."""
    if g is None:
        return without_decay(reads, keys)
    return (scalar_decay if g.dim() == 2 else channel_decay)(g, reads, keys, reads_before_decay)


def _write_only(v: Tensor, g: Tensor | None, q: Tensor, write_key: Tensor) -> _Chunks:
    """The chunks of an update that erases nothing; v is n c v."""
    products = _products(g, [q], [write_key], False)
    output, written = products.pairs[0][0] @ v, products.to_end[0].mT @ v  # n c v, n k v
    return _Chunks(output, products.from_start[0], written, products.total, None)


def _write_and_erase(
    v: Tensor, g: Tensor | None, reads: list[Tensor], keys: list[Tensor], reads_before_decay: bool
) -> _Chunks:
    """The chunks of an update that erases; v is n c v, reads are q and a, keys are k, or k and b.

    u is what is added along the last key: the answers to a, and v too where both share the write key.
    """
    (query_pairs, erase_pairs), (query, erase_read), to_end, total = _products(g, reads, keys, reads_before_decay)
    known = v if len(keys) == 1 else erase_pairs[0].tril(-1) @ v  # n c v
    right = torch.cat([known, erase_read], dim=-1)  # n c v+k
    # u − A u = known + erase_read S, A being the strictly lower triangle of erase_pairs: u = X + Y S.
    # It is solved transposed, since these matrices are stored by rows, and LAPACK takes them by columns.
    A_T = erase_pairs[-1].mT  # n c c
    solution = torch.linalg.solve_triangular(-A_T, right.mT, upper=True, left=False, unitriangular=True).mT  # n c v+k
    X, Y = solution.split([v.shape[-1], erase_read.shape[-1]], dim=-1)  # n c v, n c k
    output, written = query_pairs[-1] @ X, to_end[-1].mT @ X  # n c v, n k v
    if len(keys) > 1:
        output, written = torch.baddbmm(output, query_pairs[0], v), torch.baddbmm(written, to_end[0].mT, v)
    reader = torch.baddbmm(query, query_pairs[-1], Y)  # n c k
    return _Chunks(output, reader, written, total, to_end[-1].mT @ Y)


def _scan(state: Tensor, parts: _Chunks, chunks: int) -> tuple[Tensor, Tensor]:
    """The state before each chunk (m chunks k v) and after the last (m k v), from that before the first (m k v).

    m counts sequences and heads.
    """
    written = parts.written.unflatten(0, (-1, chunks)).unbind(1)  # m k v
    decay = _by_chunk(None if parts.decay is None else parts.decay[..., None], chunks)  # m k 1 or m 1 1
    transition = _by_chunk(parts.transition, chunks)  # m k k
    before = []
    for write, keep, turn in zip(written, decay, transition, strict=True):
        before.append(state)
        after = write + state if keep is None else torch.addcmul(write, keep, state)
        state = after if turn is None else torch.baddbmm(after, turn, state)
    return torch.stack(before, dim=1), state


def _by_chunk(x: Tensor | None, chunks: int) -> Sequence[Tensor | None]:
    """Of (m chunks) … the part of each chunk: m …."""
    return [None] * chunks if x is None else x.unflatten(0, (-1, chunks)).unbind(1)


Form = Callable[[Query, Update, Tensor], tuple[Value, Tensor]]
"""`step`, `naive` or `chunked`: queries, update and state → outputs and the last state."""


@dataclass(eq=False, repr=False, kw_only=True)
class MatrixMemory(Mixer):
    """The base of a mechanism on this engine.

    A mechanism defines `update`. It overrides `query`, `output` and `empty_state` where the read vector, the output or
    the shape of the state differs from the default.
    """

    @abstractmethod
    def update(self, k: Query, v: Value, gates: Gates) -> Update:
        """What is decayed, erased and written at every position.

        Where a token has n pairs, its position becomes n positions, in order: k and v are b h (t n) d, and gates other
        than more_k and more_v are still those of the tokens.
        """

    def query(self, q: Query) -> Tensor:
        """The vector that the state is read with (b h t k): by default q / √d_key."""
        return q * query_scale(q.shape[-1])

    def output(self, o: Tensor, v: Value, gates: Gates) -> Value:
        """The output (b h t v), from the read-out o = Sᵀq of the state: by default o itself."""
        return o

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        state = self.empty_state(q, v) if state is None else state
        return self._run(chunked, q, k, v, gates, state)

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        return self._run(naive if "more_k" in gates else step, q, k, v, gates, state)

    def _run(self, form: Form, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        with without_autocast(q):
            gates = {name: full_precision(gate) for name, gate in gates.items()}
            read, key, wide = self.query(full_precision(q)), full_precision(k), full_precision(v)
            if "more_k" in gates:
                o, S = self._run_pairs(form, read, key, wide, gates, state["S"])
            else:
                o, S = form(read, self.update(key, wide, gates), state["S"])
            return self.output(o, wide, gates).to(v.dtype), {"S": S}

    def _run_pairs(self, form: Form, read: Query, k: Query, v: Value, gates: Gates, S: Tensor) -> tuple[Value, Tensor]:
        """With n pairs per token: `form` over n positions per token, of which the last reads the state."""
        t, n = read.shape[2], 1 + gates["more_k"].shape[3]
        keys, values = (
            torch.cat([first[:, :, :, None], gates[more]], dim=3).flatten(2, 3)  # b h (t n) d
            for first, more in ((k, "more_k"), (v, "more_v"))
        )
        reads = F.pad(read[:, :, :, None], (0, 0, n - 1, 0)).flatten(2, 3)  # b h (t n) k
        o, S = form(reads, self.update(keys, values, gates), S)
        return o.unflatten(2, (t, n))[:, :, :, -1], S

    def empty_state(self, q: Query, v: Value) -> State:
        return {"S": full_precision(v).new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])}
