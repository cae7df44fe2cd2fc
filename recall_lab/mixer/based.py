"""Based (Arora et al., arXiv 2402.18668)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from recall_lab.mixer.base import Mixer
from recall_lab.mixer.feature_map import taylor
from recall_lab.mixer.matrix_memory import Update, chunked, step
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.shapes import Gates, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Based(Mixer):
    """Softmax's kernel to the second order over the whole past, and exact over a small window.

    A_ts = w_ts / (Σ_{r≤t} w_tr + 1e−6) with z = q_t·k_s / √d and w_ts = e^z for t − s < window, 1 + z + z²/2 before;
    S_t = S_{t−1} + φ(k_t) [v_t, 1]ᵀ, φ the Taylor features;  state: S and the last window − 1 keys and values.
    The paper gives the window a layer of its own; sharing one normaliser follows LoLCATs (arXiv 2410.10254), and a
    window as long as the sequence is softmax attention.
    Source: Arora et al., arXiv 2402.18668.
    """

    d_key: int | None = 16
    """Small, since the features grow with its square."""
    window: int = 16
    """Tokens weighed exactly, the present one among them; 0: none."""

    chunk: ClassVar[int] = 64
    """Places solved together: the features are so wide that few memories are better than few products."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.window, int) or self.window < 0:
            raise ValueError(f"window={self.window!r}: a whole number of at least 0")

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        state = self.empty_state(q, v) if state is None else state
        return self._run(partial(chunked, chunk=self.chunk), q, k, v, state)

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        return self._run(step, q, k, v, state)

    def _run(self, form: Callable, q: Query, k: Query, v: Value, state: State) -> tuple[Value, State]:
        with without_autocast(q):
            q, k, wide = full_precision(q), full_precision(k), full_precision(v)
            summed = torch.cat([wide, torch.ones_like(wide[..., :1])], dim=-1)
            o, S = form(taylor(q), Update(taylor(k), summed), state["S"])
            after, scale = {"S": S}, 1.0
            if self.window:
                k, wide = torch.cat([state["k"], k], dim=2), torch.cat([state["v"], wide], dim=2)
                correction, scale = _window(q, k, wide, self.window)
                o = o * scale + correction
                after |= {name: x[:, :, max(0, x.shape[2] - self.window + 1) :] for name, x in (("k", k), ("v", wide))}
            return (o[..., :-1] / (o[..., -1:] + 1e-6 * scale)).to(v.dtype), after

    def empty_state(self, q: Query, v: Value) -> State:
        d = q.shape[-1]
        S = full_precision(v).new_zeros(*q.shape[:2], 1 + d + d * (d + 1) // 2, v.shape[-1] + 1)
        return {"S": S} | ({"k": full_precision(q[:, :, :0]), "v": full_precision(v[:, :, :0])} if self.window else {})


def _window(q: Query, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """What e^z adds to 1 + z + z²/2 over the window, applied to [v, 1], and the factor e^{−max z} it is scaled by.

    k and v begin up to window − 1 places before q. Blocks of queries see the keys of their own windows only.
    """
    length, past = q.shape[2], k.shape[2] - q.shape[2]
    block = min(window, length)
    blocks = -(-length // block)
    fill = blocks * block - length
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    q = F.pad(q, (0, 0, 0, fill)).unflatten(2, (blocks, block)) * q.shape[-1] ** -0.5
    k, v = (F.pad(x, (0, 0, window - 1 - past, fill)).unfold(2, window - 1 + block, block) for x in (k, v))
    place = torch.arange(block, device=q.device)[:, None]
    key = torch.arange(window - 1 + block, device=q.device)
    start = torch.arange(blocks, device=q.device)[:, None, None] * block
    seen = (key >= place) & (key < place + window) & (start + key >= window - 1 - past)
    z = (q @ k).masked_fill(~seen, 0)
    top = z.detach().amax(-1, keepdim=True).clamp(min=0)
    scale = (-top).exp()
    weight = ((z - top).exp() - scale * (1 + z + z.square() / 2)) * seen
    correction = weight @ v.mT
    return correction.flatten(2, 3)[:, :, :length], scale.flatten(2, 3)[:, :, :length]
