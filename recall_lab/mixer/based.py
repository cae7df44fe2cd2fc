"""Based (Arora et al., arXiv 2402.18668)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from recall_lab.checks import whole_number
from recall_lab.mixer.base import Mixer, Width, query_scale
from recall_lab.mixer.feature_map import series, taylor
from recall_lab.mixer.matrix_memory import Kernel, Update, chunked, step
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.mixer.taylor_window import window_correction
from recall_lab.shapes import Gates, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class Based(Mixer):
    """Linear attention with the second-order Taylor features of e^{q·k}, and exact softmax weights in a small window.

    A_ts = w_ts / (Σ_{r≤t} w_tr + 1e−6) with z = q_t·k_s / √d and w_ts = e^z for t − s < window, 1 + z + z²/2 for
    older s;  S_t = S_{t−1} + φ(k_t) [v_t, 1]ᵀ with the Taylor features φ;  state: S and the last window − 1 keys
    and values.
    In the paper the window is a layer of its own. Here both share one normalizer, as in LoLCATs (arXiv 2410.10254),
    so that a window as long as the sequence gives softmax attention.
    Source: Arora et al., arXiv 2402.18668.
    """

    d_key: Width = 16
    """Width of a key, per head: small, because the number of features grows with its square."""
    window: int = 16
    """Number of most recent tokens with exact weights e^z, including the current one; 0: none."""

    chunk: ClassVar[int] = 32
    """Positions per chunk, a power of two."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("window", self.window, least=0)

    @property
    def state_limit(self) -> int | None:
        return self.window

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        state = self.empty_state(q, v) if state is None else state
        if q.shape[2] == 0:
            return v, state
        with without_autocast(q):
            kernel = Kernel(full_precision(q) * query_scale(q.shape[-1]), full_precision(k), series)
        return self._run(partial(chunked, chunk=self.chunk, kernel=kernel), q, k, v, state)

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        return self._run(step, q, k, v, state)

    def _run(
        self, form: Callable[..., tuple[Tensor, Tensor]], q: Query, k: Query, v: Value, state: State
    ) -> tuple[Value, State]:
        with without_autocast(q):
            q, k, v_1 = full_precision(q), full_precision(k), full_precision(v)
            v_1 = torch.cat([v_1, torch.ones_like(v_1[..., :1])], dim=-1)  # b h t v+1; the ones sum the weights
            o, S = form(taylor(q), Update(taylor(k), v_1), state["S"])
            after, factor = {"S": S}, torch.ones(())
            if self.window:
                k, v_1 = torch.cat([state["k"], k], dim=2), torch.cat([F.pad(state["v"], (0, 1), value=1), v_1], dim=2)
                correction, factor = window_correction(q, k, v_1, self.window)
                o = o * factor + correction
                recent = max(0, k.shape[2] - self.window + 1)
                after |= {"k": k[:, :, recent:], "v": v_1[:, :, recent:, :-1]}
            return (o[..., :-1] / (o[..., -1:] + 1e-6 * factor)).to(v.dtype), after

    def empty_state(self, q: Query, v: Value) -> State:
        features = taylor(q[:, :, :0]).shape[-1]
        S = full_precision(v).new_zeros(*q.shape[:2], features, v.shape[-1] + 1)
        return {"S": S} | ({"k": full_precision(q[:, :, :0]), "v": full_precision(v[:, :, :0])} if self.window else {})
