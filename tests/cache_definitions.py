"""The definition of every cache policy, as plain loops over positions, slots and channels."""

import cmath
from collections.abc import Callable
from functools import partial

import torch

from recall_lab.mixer.heavy_hitter import HeavyHitter
from recall_lab.mixer.merging import Merging
from recall_lab.mixer.paged import Paged
from recall_lab.mixer.random_k import RandomK
from recall_lab.mixer.sink_window import SinkWindow
from recall_lab.mixer.softmax import Softmax
from recall_lab.mixer.top_k import TopK
from recall_lab.mixer.window import Window

Groups = list[list[int]]
"""The slots that one query attends to, each of one token or (merging) of several."""


def weights(q: torch.Tensor, k: torch.Tensor, slots: Groups, m: float, t: int) -> torch.Tensor:
    """Softmax over the slots, each weighted by its number of tokens; ALiBi at the position of its latest token."""
    keys = torch.stack([k[slot].mean(0) for slot in slots])
    sizes = torch.tensor([float(len(slot)) for slot in slots], dtype=q.dtype)
    distance = torch.tensor([float(t - max(slot)) for slot in slots], dtype=q.dtype)
    return torch.softmax(keys @ q / q.numel() ** 0.5 + sizes.log() - m * distance, dim=0)


# For every position of one sequence and head: the slots it attends to. m is ALiBi's slope.


def softmax(q, k, m) -> list[Groups]:
    return [[[s] for s in range(t + 1)] for t in range(len(q))]


def window(q, k, m, *, budget) -> list[Groups]:
    return [[[s] for s in range(t + 1) if t - s < budget] for t in range(len(q))]


def sink_window(q, k, m, *, budget, sinks) -> list[Groups]:
    return [[[s] for s in range(t + 1) if s < sinks or t - s < budget - sinks] for t in range(len(q))]


def top_k(q, k, m, *, budget, kept=None) -> list[Groups]:
    logits = q @ k.T
    penalty = m * q.shape[1] ** 0.5
    first = [0 if kept is None else max(0, t + 1 - kept) for t in range(len(q))]
    ranked = [
        sorted(range(first[t], t + 1), key=lambda s, t=t: (-float(logits[t, s]) + penalty * (t - s), s))
        for t in range(len(q))
    ]
    return [[[s] for s in sorted(order[:budget])] for order in ranked]


def mixed(x: int) -> int:
    """The hash of a word, in arithmetic on 32 bits."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def random_k(q, k, m, *, budget, draw_seed=0) -> list[Groups]:
    attended = []
    for t in range(len(q)):
        order = sorted(range(t), key=lambda s, t=t: -mixed(mixed(mixed(draw_seed) ^ t) ^ s))
        attended.append([[s] for s in [*sorted(order[: budget - 1]), t]])
    return attended


def paged(q, k, m, *, budget, page) -> list[Groups]:
    attended = []
    for t in range(len(q)):
        pages = [range(start, min(start + page, t + 1)) for start in range(0, t + 1, page)]
        bounds = [
            sum(max(float(q[t, c] * k[s, c]) for s in positions) for c in range(q.shape[1]))
            - m * q.shape[1] ** 0.5 * (t - max(positions))
            for positions in pages
        ]
        order = sorted(range(len(pages)), key=lambda p, bounds=bounds: (-bounds[p], p))
        attended.append([[s] for p in sorted(order[: budget // page]) for s in pages[p]])
    return attended


def heavy_hitter(q, k, m, *, budget) -> list[Groups]:
    kept, mass, attended = [], {}, []
    for t in range(len(q)):
        if len(kept) == budget:
            old = [s for s in kept if s <= t - (budget + 1) // 2]
            kept.remove(min(old, key=lambda s: (mass[s], s)))
        kept.append(t)
        mass[t] = 0.0
        for s, weight in zip(kept, weights(q[t], k, [[s] for s in kept], m, t), strict=True):
            mass[s] += float(weight)
        attended.append([[s] for s in kept])
    return attended


def merging(q, k, m, *, budget) -> list[Groups]:
    slots, recent, attended = [], [], []
    for t in range(len(q)):
        recent.append(t)
        if len(recent) > (budget + 1) // 2:
            leaves = recent.pop(0)
            if len(slots) < budget // 2:
                slots.append([leaves])
            else:
                cosine = [torch.cosine_similarity(k[slot].mean(0), k[leaves], dim=0) for slot in slots]
                slots[cosine.index(max(cosine))].append(leaves)
        attended.append([list(slot) for slot in slots] + [[s] for s in recent])
    return attended


POLICIES: dict[str, tuple[type, Callable[..., list[Groups]], list[dict[str, int]]]] = {
    "random_k": (
        RandomK,
        random_k,
        [{"budget": b, "draw_seed": s} for b, s in [(1, 0), (2, 0), (5, 2**32 - 1), (40, 1)]],
    ),
    "softmax": (Softmax, softmax, [{}]),
    "window": (Window, window, [{"budget": b} for b in (1, 2, 5, 16, 40)]),
    "sink_window": (SinkWindow, sink_window, [{"budget": b, "sinks": s} for b, s in [(1, 0), (4, 3), (9, 2), (40, 4)]]),
    "top_k": (
        TopK,
        top_k,
        [
            *({"budget": b} for b in (1, 2, 7, 40)),
            *({"budget": b, "kept": c} for b, c in [(1, 2), (3, 6), (4, 4), (2, 40)]),
        ],
    ),
    "paged": (Paged, paged, [{"budget": b, "page": p} for b, p in [(1, 1), (4, 4), (9, 3), (10, 5), (40, 8)]]),
    "heavy_hitter": (HeavyHitter, heavy_hitter, [{"budget": b} for b in (3, 4, 5, 8, 40)]),
    "merging": (Merging, merging, [{"budget": b} for b in (2, 3, 6, 9, 40)]),
}


DYNAMIC = {"softmax", "top_k", "paged"}
"""Policies that choose tokens by the query."""

GROWING = {*DYNAMIC, "random_k"}
"""Policies that keep every token, unless an option `kept` limits them to the most recent."""


CASES = [(name, options) for name, (_, _, cases) in POLICIES.items() for options in cases]


IDS = [f"{name} {' '.join(map(str, options.values()))}" for name, options in CASES]


def draw(length: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v of two sequences and two heads, keys four wide and values three."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 2, length, width, generator=generator, dtype=dtype).mul(1.5) for width in (4, 4, 3)]


def rotated(x: torch.Tensor, share: float = 0.5, base: float = 10000.0) -> torch.Tensor:
    """Rotary positions as products of complex numbers: channel i + √−1 channel i + r/2, of the first r channels."""
    pairs = round(share * x.shape[-1]) // 2
    rows = []
    for t, at in enumerate(x.unbind(-2)):
        z = torch.complex(at[..., :pairs], at[..., pairs : 2 * pairs])
        unit = [cmath.exp(1j * t * base ** (-2 * i / (2 * pairs))) for i in range(pairs)]
        z = z * torch.tensor(unit, dtype=z.dtype)
        rows.append(torch.cat([z.real, z.imag, at[..., 2 * pairs :]], dim=-1))
    return torch.stack(rows, dim=-2)


def by_definition(
    policy: str, options: dict, q, k, v, positions: str = "none"
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Outputs, weights of the tokens, and the state (of a static policy what one more position would attend to)."""
    n, heads = q.shape[2], q.shape[1]
    slope = [2 ** (-8 * (h + 1) / heads) if positions == "alibi" else 0.0 for h in range(heads)]
    if positions == "rotary":
        q, k = rotated(q), rotated(k)
    A = [[None] * q.shape[1] for _ in q]
    state = {name: [[None] * q.shape[1] for _ in q] for name in ("k", "v", "count", "mass", "age")}
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            policy_slots = partial(POLICIES[policy][1], m=slope[h], **options)
            attended = policy_slots(q[b, h].detach(), k[b, h].detach())
            rows = []
            for t, slots in enumerate(attended):
                share = weights(q[b, h, t], k[b, h], slots, slope[h], t)
                row = torch.zeros(n, dtype=q.dtype)
                for weight, slot in zip(share, slots, strict=True):
                    row[slot] = weight / len(slot)
                rows.append(row)
            A[b][h] = torch.stack(rows)
            kept = [[s] for s in range(n - min(n, options.get("kept", n + 1) - 1), n)]
            if policy not in GROWING:
                longer = [torch.cat([x[b, h].detach(), torch.ones_like(x[b, h, :1])]) for x in (q, k)]
                kept = policy_slots(*longer)[-1][:-1]
            for name, x in (("k", k), ("v", v)):
                means = [x[b, h, slot].mean(0) for slot in kept]
                state[name][b][h] = torch.stack(means) if means else x[b, h, :0]
            state["count"][b][h] = torch.tensor([float(len(slot)) for slot in kept], dtype=q.dtype)
            state["age"][b][h] = torch.tensor([[float(n - max(slot))] for slot in kept], dtype=q.dtype).reshape(-1, 1)
            state["mass"][b][h] = A[b][h].sum(0)[[s for slot in kept for s in slot]]
    A = torch.stack([torch.stack(row) for row in A])
    parts = {name: torch.stack([torch.stack(row) for row in rows]) for name, rows in state.items()}
    return A @ v, A, parts | {"seen": torch.full((len(q), heads, 1), float(n), dtype=q.dtype)}
