"""One engine for every mechanism whose state is a matrix S (d_key × d_value) that decays, is erased and is written to.

The recurrence, for position t with query q_t:

    S' = diag(e^{g_t}) S_{t−1}              decay, g_t ≤ 0: one for all key channels, or one per channel
    S_t = S' + b_t (a_tᵀ S') + k_t v_tᵀ     erase: add the answer to a_t along b_t; write: add v_t along k_t
    o_t = S_tᵀ q_t                          read

`step` is one position of it and `naive` steps it through time. `chunked` computes the same in chunks of c positions.
Within a chunk let G_t = Σ_{r≤t} g_r since its start, S the state at its start, u_t = S'ᵀ a_t the answer that is to be
erased, and ⟨x, y⟩_ts = Σ_k x_tk y_sk e^{G_tk − G_sk}, whose exponents are ≤ 0 for s ≤ t. Then

    u_t = Σ_{s<t} ⟨a, b⟩_ts u_s + Σ_{s<t} ⟨a, k⟩_ts v_s + (a_t e^{G_t})ᵀ S

is a triangular system, which is solved for all chunks together: u = X + Y S. The state then goes from chunk to chunk
by one small product, S ← (diag(e^{G_c}) + b̃ᵀ Y) S + (k̃ᵀ V + b̃ᵀ X) with k̃_s = k_s e^{G_c − G_s}, and the outputs
of all chunks are again one batched product. Nothing is ever divided by a decay, so nothing overflows.

Sources: Yang et al., arXiv 2406.06484 (the delta rule in chunks) and arXiv 2312.06635 (a decay per channel).
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

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

    S' is the state after the decay gates["log_decay"] if there is that gate, else the state itself.
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
    """All positions by stepping the definition through time: outputs (b h t v) and the last state (b h k v)."""
    outputs = [q[:, :, :0] @ state]
    for t in range(q.shape[2]):
        here = (x[:, :, t : t + 1] if isinstance(x, Tensor) else x for x in update)
        o, state = step(q[:, :, t : t + 1], Update(*here), state)
        outputs.append(o)
    return torch.cat(outputs, dim=2), state


def chunked(q: Query, update: Update, state: Tensor, chunk: int = 32) -> tuple[Value, Tensor]:
    """All positions in chunks: outputs (b h t v) and the last state (b h k v), from the state before the first.

    Any t, also 0; time and memory are linear in it. chunk: positions that are solved together, a power of two.
    """
    b, h, length, _ = q.shape
    if length == 0:
        return q @ state, state
    chunk = min(chunk, 1 << (length - 1).bit_length())
    chunks = -(-length // chunk)

    def fold(x: Tensor) -> Tensor:
        """b h t … → n c …, the n chunks of all sequences and heads side by side; the last is filled with zeros."""
        if length % chunk:
            x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, -length % chunk))
        return x.reshape(b * h * chunks, chunk, *x.shape[3:])

    v = fold(update.write_value)  # n c v
    if update.erase_read is None:
        parts = _write_only(v, _products(fold, [q], [update.write_key], update))
    else:
        keys = [update.write_key] if update.erase_key is None else [update.write_key, update.erase_key]
        parts = _write_and_erase(v, _products(fold, [q, update.erase_read], keys, update))
    before, last = _scan(state.flatten(0, 1), parts, chunks)  # (b h) chunks k v, (b h) k v
    output = torch.baddbmm(parts.output, parts.reader, before.flatten(0, 1))  # n c v
    return output.view(b, h, chunks * chunk, -1)[:, :, :length], last.view_as(state)


class _Chunks(NamedTuple):
    """What each chunk makes of the state S at its start: the outputs and the next state, both linear in S.

    Outputs: output + reader S. Next state: written + decay ⊙ S + transition S.

    output      n c v
    reader      n c k
    written     n k v
    decay       n k or n 1; None: 1
    transition  n k k; None: 0
    """

    output: Tensor
    reader: Tensor
    written: Tensor
    decay: Tensor | None
    transition: Tensor | None


def _products(
    fold: Callable[[Tensor], Tensor], reads: list[Tensor], keys: list[Tensor], update: Update
) -> DecayedProducts:
    """The products of reads and keys (b h t k each) within the chunks, under the decay of the update."""
    x, y = _side_by_side(fold, reads), _side_by_side(fold, keys)  # n c r k, n c w k
    if update.log_decay is None:
        return without_decay(x, y)
    form = scalar_decay if update.log_decay.dim() == 3 else channel_decay
    return form(fold(update.log_decay), x, y, update.reads_before_decay and len(reads) > 1)


def _side_by_side(fold: Callable[[Tensor], Tensor], vectors: list[Tensor]) -> Tensor:
    """Of each of r vectors (b h t k) the chunks: n c r k."""
    return fold(vectors[0])[:, :, None] if len(vectors) == 1 else torch.stack([fold(x) for x in vectors], dim=2)


def _apart(x: Tensor, dim: int) -> Sequence[Tensor]:
    """x along an axis; a view where that has length 1, which spares autograd a copy."""
    return [x.squeeze(dim)] if x.shape[dim] == 1 else x.unbind(dim)


def _write_only(v: Tensor, products: DecayedProducts) -> _Chunks:
    """The chunks of an update that erases nothing; v is n c v."""
    (pairs,), (key,) = _apart(products.pairs[:, :, 0], 2), _apart(products.to_end, 2)  # n c c, n c k
    (reader,) = _apart(products.from_start, 2)  # n c k
    return _Chunks(pairs @ v, reader, key.mT @ v, products.total, None)


def _write_and_erase(v: Tensor, products: DecayedProducts) -> _Chunks:
    """The chunks of an update that erases; v is n c v.

    u is what is added along the last of the keys: the answers to erase, and v too where both share the write key.
    """
    query_pairs, erase_pairs = (_apart(pairs, 2) for pairs in products.pairs.unbind(2))  # n c c, per key
    query, erase_read = products.from_start.unbind(2)  # n c k
    keys = _apart(products.to_end, 2)  # n c k, per key
    known = v if len(keys) == 1 else erase_pairs[0].tril(-1) @ v  # n c v
    one = torch.eye(v.shape[1], dtype=v.dtype, device=v.device).expand_as(erase_pairs[-1])  # n c c
    inverse = torch.linalg.solve_triangular(-erase_pairs[-1], one, upper=False, unitriangular=True)  # (1 − A)⁻¹
    X, Y = inverse @ known, inverse @ erase_read  # u = X + Y S: n c v, n c k
    output, written = query_pairs[-1] @ X, keys[-1].mT @ X  # n c v, n k v
    if len(keys) > 1:
        output, written = torch.baddbmm(output, query_pairs[0], v), torch.baddbmm(written, keys[0].mT, v)
    reader = torch.baddbmm(query, query_pairs[-1], Y)  # n c k
    return _Chunks(output, reader, written, products.total, keys[-1].mT @ Y)


def _scan(state: Tensor, parts: _Chunks, chunks: int) -> tuple[Tensor, Tensor]:
    """The state before each chunk (m chunks k v) and after the last (m k v), from that before the first (m k v)."""
    decay = None if parts.decay is None else parts.decay.unflatten(0, (-1, chunks))[..., None]  # m chunks k 1
    transition = None if parts.transition is None else parts.transition.unflatten(0, (-1, chunks))  # m chunks k k
    before = []
    for i, written in enumerate(parts.written.unflatten(0, (-1, chunks)).unbind(1)):  # m k v
        before.append(state)
        after = written + state if decay is None else torch.addcmul(written, decay[:, i], state)
        state = after if transition is None else torch.baddbmm(after, transition[:, i], state)
    return torch.stack(before, dim=1), state


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
        return q * query_scale(q.shape[-1])

    def output(self, o: Tensor, v: Value, gates: Gates) -> Value:
        """What is made of the reading o = Sᵀq: itself unless the mechanism says otherwise."""
        return o

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        state = self.empty_state(q, v) if state is None else state
        if q.shape[2] == 0:
            return v, state
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
