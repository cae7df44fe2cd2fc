"""The engine of log-linear attention: a matrix per level of a Fenwick tree over the past.

Relative to position t, a position s ≤ t is on level lev(t, s) = bit length of t xor s: level 0 is t itself, and level l
covers up to 2^(l−1) positions. Each level has a weight λ_t[l], and all levels decay alike:

    A_ts = λ_t[lev(t, s)] Π_{r=s+1..t} γ_r q_t·k_s.

A state is a dictionary from "level_l" to a matrix (b h k v), for l = 0 and for every l whose bit l − 1 is set in the
last position. The number of tokens seen follows from these names. `step` is the recurrence. `blocked` equals it and
works on chunks of positions. Within a chunk it forms A. Between chunks, for every i, the right half of each block of
2^(i+1) chunks reads the sum over the left half. This takes O(t log t) time.

Source: Guo et al., arXiv 2506.04761.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from recall_lab.mixer.numerics import log_decay_sums
from recall_lab.shapes import Query, State, Value

Decays = Float[Tensor, "b h t"]
"""Log decays, g = log γ."""
Levels = Float[Tensor, "b h t l"]
"""The weights λ of the levels."""


def step(q: Query, k: Query, v: Value, g: Decays, levels: Levels, state: State) -> tuple[Value, State]:
    """One position (t = 1): the output and the state after it.

    All levels up to that of the lowest set bit of t are merged into that one, and the new token becomes level 0.
    """
    t = tokens_seen(state)
    lowest = (t & -t).bit_length()
    after = {"level_0": k.mT @ v}
    for name, S in state.items():
        decayed = S * g[..., None].exp()
        to = f"level_{max(level_of(name), lowest)}"
        after[to] = after[to] + decayed if to in after else decayed
    o = torch.zeros_like(v)
    for name, S in after.items():
        o = o + levels[..., min(level_of(name), levels.shape[-1] - 1), None] * (q @ S)
    return o, after


def blocked(
    q: Query, k: Query, v: Value, g: Decays, levels: Levels, state: State, chunk: int = 64
) -> tuple[Value, State]:
    """All positions of a segment: the outputs and the state after the last. chunk: a power of two."""
    length, seen = q.shape[2], tokens_seen(state)
    if length == 0:
        return v, state
    chunk = min(chunk, 1 << (length - 1).bit_length())
    block = chunk << (-(-length // chunk) - 1).bit_length()
    offset = seen % block
    if offset + length > block:  # the segment is split at the boundary of an aligned block
        outputs = []
        for part in (slice(block - offset), slice(block - offset, None)):
            q_part, k_part, v_part, g_part, levels_part = (x[:, :, part] for x in (q, k, v, g, levels))
            o, state = blocked(q_part, k_part, v_part, g_part, levels_part, state, chunk)
            outputs.append(o)
        return torch.cat(outputs, dim=2), state
    o = _within_segment(q, k, v, g, levels, chunk, offset)
    since_start = g.cumsum(-1).exp()  # b h t
    for name, S in state.items():
        weight = since_start * _level_weights(levels, first_position(name, seen - 1), seen)  # b h t
        o = o + (q * weight[..., None]) @ S
    return o, _last_state(k, v, g, state)


def level_of(name: str) -> int:
    """The level l of a state's part "level_l"."""
    return int(name.removeprefix("level_"))


def tokens_seen(state: State) -> int:
    """Number of tokens a state has seen: its levels are the set bits of the last token's position."""
    return 1 + sum(1 << (level_of(name) - 1) for name in state if name != "level_0") if state else 0


def first_position(name: str, t: int) -> int:
    """The first position that this level covers in the state after position t."""
    return t >> level_of(name) << level_of(name)


def _level_weights(levels: Levels, s: int, first: int) -> Decays:
    """λ_t[lev(t, s)] for the positions t = first, first + 1, … of `levels`; all higher levels share the last weight."""
    top = levels.shape[-1] - 1
    level = [min((t ^ s).bit_length(), top) for t in range(first, first + levels.shape[2])]
    index = torch.tensor(level, device=levels.device).expand(levels.shape[:-1])
    return levels.gather(-1, index[..., None])[..., 0]


def _within_segment(q: Query, k: Query, v: Value, g: Decays, levels: Levels, chunk: int, offset: int) -> Value:
    """A v over the segment alone; its first token is at position `offset` of an aligned block."""
    length = q.shape[2]
    fill = -(offset + length) % chunk

    def fold(x: Tensor) -> Tensor:
        """b h t … → b h n C …: n chunks of C positions, with zeros before and after the segment."""
        pad = (offset, fill) if x.dim() == 3 else (0, 0, offset, fill)
        return F.pad(x, pad).unflatten(2, (-1, chunk))

    q, k, v, g, levels = fold(q), fold(k), fold(v), fold(g), fold(levels)
    o = _inside_chunks(q, k, v, g, levels) + _between_chunks(q, k, v, g, levels)  # b h n C v
    return o.flatten(2, 3)[:, :, offset : offset + length]


def _inside_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, levels: Tensor) -> Tensor:
    """What each position reads from its own chunk, by forming A; all tensors are b h n C …."""
    chunk, top = q.shape[3], levels.shape[-1] - 1
    position = torch.arange(chunk, device=q.device)
    apart = position[:, None] ^ position  # t s
    bits = torch.arange(chunk.bit_length() - 1, device=q.device)
    level = (apart[..., None] >> bits > 0).sum(-1).clamp(max=top)  # t s
    chosen = (level[..., None] == torch.arange(top + 1, device=q.device)).to(q.dtype)  # t s l
    weight = torch.einsum("bhntl,tsl->bhnts", levels, chosen)
    return (q @ k.mT * log_decay_sums(g).exp() * weight) @ v


def _between_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, levels: Tensor) -> Tensor:
    """What each position reads from earlier chunks: the right half of a block of 2^(i+1) chunks reads the left half."""
    n, top = q.shape[2], levels.shape[-1] - 1
    reader = q * g.cumsum(-1).exp()[..., None]  # b h n C k, decayed since the start of its chunk
    sums = (k * _sums_after(g).exp()[..., None]).mT @ v  # b h n k v, decayed to the end of its block
    block_decay = g.sum(-1)  # b h n, the log decay over a block
    before = torch.zeros_like(block_decay)  # b h n, the log decay from the start of the right half to its chunk
    index = torch.arange(n, device=q.device)
    o = torch.zeros_like(q @ sums)
    for i in range((n - 1).bit_length()):
        right = torch.tensor([c for c in range(n) if c >> i & 1], device=q.device)
        weight = levels[:, :, right, :, min(q.shape[3].bit_length() + i, top)] * before[:, :, right, None].exp()
        o = o.index_add(2, right, (reader[:, :, right] * weight[..., None]) @ sums[:, :, right >> i ^ 1])
        if sums.shape[2] % 2:
            sums, block_decay = F.pad(sums, (0, 0, 0, 0, 0, 1)), F.pad(block_decay, (0, 1))
        before = before + torch.where(index >> i & 1 == 1, block_decay[:, :, index >> i & ~1], 0)
        sums = sums[:, :, ::2] * block_decay[:, :, 1::2, None, None].exp() + sums[:, :, 1::2]
        block_decay = block_decay[:, :, ::2] + block_decay[:, :, 1::2]
    return o


def _sums_after(g: Tensor) -> Tensor:
    """Σ_{r>s} g_r for every s along the last axis, summed from the end."""
    return F.pad(g, (0, 1))[..., 1:].flip(-1).cumsum(-1).flip(-1)


def _last_state(k: Query, v: Value, g: Decays, state: State) -> State:
    """The state after a segment that follows `state`."""
    seen = tokens_seen(state)
    last = seen + k.shape[2] - 1
    weighted = k * _sums_after(g).exp()[..., None]  # b h t k, decayed to the end of the segment
    kept = g.sum(-1)[..., None, None].exp()  # b h 1 1
    after = {}
    for level in range(last.bit_length() + 1):
        if level and not last >> (level - 1) & 1:
            continue
        start = first_position(f"level_{level}", last)
        stop = start + (1 << max(level - 1, 0))
        part = slice(max(start - seen, 0), max(stop - seen, 0))
        S = weighted[:, :, part].mT @ v[:, :, part]
        for name, old in state.items():
            if start <= first_position(name, seen - 1) < stop:
                S = S + kept * old
        after[f"level_{level}"] = S
    return after
