"""Log-linear attention (Guo et al., arXiv 2506.04761)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recall_lab.mixer.base import Mixer
from recall_lab.mixer.numerics import full_precision, log_decay_sums, without_autocast
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class LogLinear(Mixer):
    """A state for each scale of the past, twice as long from one to the next.

    A_ts = λ_t[lev(t, s)] Π_{r=s+1..t} γ_r q_t·k_s, lev(t, s) = bit length of t xor s (Fenwick's tree);  at every token
    the memories of the levels up to the lowest set bit of t become one, and a new one of the token alone begins;
    o_t = Σ_l λ_t[l] S_lᵀ q_t;  state: level_l for l = 0 and every set bit l − 1 of t, about ½ log₂ t matrices.
    γ = sigmoid(·)^(1/16) and λ = softplus(·), 1 at the start. O(t log t) in parallel.
    Source: Guo et al., arXiv 2506.04761.
    """

    levels: int = 16
    """λs a head; older levels share the last, so that 16 tell 2^15 tokens apart."""

    chunk: ClassVar[int] = 64
    """Places whose lower levels are one product, a power of two."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.levels, int) or self.levels < 1:
            raise ValueError(f"levels={self.levels!r}: a whole number of at least 1")
        self.decay_proj = nn.Linear(self.d_model, self.heads)
        self.level_proj = nn.Linear(self.d_model, self.heads * self.levels)
        nn.init.constant_(self.level_proj.bias, 0.5413)  # softplus of it is 1

    def gates(self, x: Hidden) -> Gates:
        """log_decay log γ: b h t; level λ: b h t levels."""
        level = F.softplus(self.level_proj(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return {"log_decay": F.logsigmoid(self.decay_proj(x)).transpose(1, 2) / 16, "level": level}

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        state = {} if state is None else state
        with without_autocast(q):
            q, k, wide, g, scale = map(full_precision, (q, k, v, gates["log_decay"], gates["level"]))
            length, seen = q.shape[2], _seen(state)
            # A segment is put where it stands in an aligned block of chunks; one that straddles two is cut there.
            chunk = min(self.chunk, 1 << (length - 1).bit_length())
            block = chunk << (-(-length // chunk) - 1).bit_length()
            offset = seen % block
            if offset + length > block:
                cut = block - offset
                left, right = ([x[:, :, part] for x in (q, k, v, g, scale)] for part in (slice(cut), slice(cut, None)))
                parts = []
                for *qkv, g, scale in (left, right):
                    o, state = self.parallel(*qkv, {"log_decay": g, "level": scale}, state)
                    parts.append(o)
                return torch.cat(parts, dim=2), state
            o = _inside(q, k, wide, g, scale, chunk, offset)
            grown = g.cumsum(-1).exp()
            for level, S in state.items():
                reader = q * (grown * _level_scale(scale, _start(level, seen - 1), seen))[..., None]
                o = o + reader @ S
            return o.to(v.dtype), _fold(k, wide, g, state, seen)

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        with without_autocast(q):
            q, k, wide, g, scale = map(full_precision, (q, k, v, gates["log_decay"], gates["level"]))
            t = _seen(state)
            lowest = (t & -t).bit_length()  # the lowest set bit's level
            after = {"level_0": k.mT @ wide}
            for name, S in state.items():
                S = S * g[..., None].exp()
                level = max(_level(name), lowest)
                after[f"level_{level}"] = after[f"level_{level}"] + S if f"level_{level}" in after else S
            o = sum(
                (scale[..., min(_level(name), scale.shape[-1] - 1), None] * (q @ S) for name, S in after.items()),
                start=torch.zeros_like(wide),
            )
            return o.to(v.dtype), after

    def empty_state(self, q: Query, v: Value) -> State:
        return {}


def _level(name: str) -> int:
    return int(name.removeprefix("level_"))


def _seen(state: State) -> int:
    """The tokens behind a state: its levels are the set bits of the last one's place."""
    return 1 + sum(1 << (_level(name) - 1) for name in state if name != "level_0") if state else 0


def _start(name: str, t: int) -> int:
    """The first place of that level's state after token t."""
    return t >> _level(name) << _level(name)


def _level_scale(scale: Tensor, s: int, first: int) -> Tensor:
    """λ_t[lev(t, s)] for the places t = first, first + 1, … that scale (b h t levels) stands for."""
    levels = [min((t ^ s).bit_length(), scale.shape[-1] - 1) for t in range(first, first + scale.shape[2])]
    index = torch.tensor(levels, device=scale.device).expand(scale.shape[:-1])
    return scale.gather(-1, index[..., None])[..., 0]


def _inside(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: Tensor, chunk: int, offset: int) -> Tensor:
    """A v over the segment alone, whose first token stands at `offset` of an aligned block."""
    length = q.shape[2]
    fill = -(offset + length) % chunk

    def fold(x: Tensor) -> Tensor:
        pad = (offset, fill) if x.dim() == 3 else (0, 0, offset, fill)
        return F.pad(x, pad).unflatten(2, (-1, chunk))

    q, k, v, g, scale = map(fold, (q, k, v, g, scale))
    depth = chunk.bit_length()
    place = torch.arange(chunk, device=q.device)
    apart = place[:, None] ^ place
    level = sum((apart >> bit > 0).long() for bit in range(depth - 1)) if depth > 1 else apart
    top = scale.shape[-1] - 1
    chosen = (level.clamp(max=top)[..., None] == torch.arange(top + 1, device=q.device)).to(q.dtype)
    o = (q @ k.mT * log_decay_sums(g).exp() * torch.einsum("bhntl,tsl->bhnts", scale, chosen)) @ v

    # Above the chunk: blocks of twice as many chunks at every level; a right half reads all of its left half.
    grown, rest, total = g.cumsum(-1).exp(), _after(g).exp(), g.sum(-1)
    reader = q * grown[..., None]
    sums, spread = (k * rest[..., None]).mT @ v, total
    before = torch.zeros_like(total)  # log decay from the start of a chunk's block of the level below
    chunks = torch.arange(q.shape[2], device=q.device)
    for bit in range((q.shape[2] - 1).bit_length()):
        right = torch.tensor([c for c in range(len(chunks)) if c >> bit & 1], device=q.device)
        weight = scale[:, :, right, :, min(depth + bit, top)] * before[:, :, right, None].exp()
        o = o.index_add(2, right, (reader[:, :, right] * weight[..., None]) @ sums[:, :, right >> bit ^ 1])
        if sums.shape[2] % 2:
            sums, spread = F.pad(sums, (0, 0, 0, 0, 0, 1)), F.pad(spread, (0, 1))
        shift = torch.where(chunks >> bit & 1 == 1, spread[:, :, chunks >> bit & ~1], 0)
        before = before + shift
        sums = sums[:, :, ::2] * spread[:, :, 1::2, None, None].exp() + sums[:, :, 1::2]
        spread = spread[:, :, ::2] + spread[:, :, 1::2]
    return o.flatten(2, 3)[:, :, offset : offset + length]


def _after(g: Tensor) -> Tensor:
    """Σ_{r>s} g_r along the last axis, summed from the end."""
    return F.pad(g, (0, 1))[..., 1:].flip(-1).cumsum(-1).flip(-1)


def _fold(k: Tensor, v: Tensor, g: Tensor, state: State, seen: int) -> State:
    """The levels' memories behind the last place of a segment that began at place `seen`."""
    last = seen + k.shape[2] - 1
    weighted, kept = k * _after(g)[..., None].exp(), g.sum(-1)[..., None, None].exp()
    after = {}
    for level in range(last.bit_length() + 1):
        if level and not last >> (level - 1) & 1:
            continue
        start = last if level == 0 else last >> level << level
        stop = start + (1 << max(level - 1, 0))
        part = slice(max(start - seen, 0), max(stop - seen, 0))
        S = weighted[:, :, part].mT @ v[:, :, part]
        for name, old in state.items():
            if start <= _start(name, seen - 1) < stop:
                S = S + kept * old
        after[f"level_{level}"] = S
    return after
