"""Log-linear attention (Guo et al., arXiv 2506.04761)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch.nn.functional as F
from torch import nn

from recall_lab.checks import whole_number
from recall_lab.mixer.base import Mixer
from recall_lab.mixer.fenwick import blocked, step
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class LogLinear(Mixer):
    """One matrix per level; every level covers a stretch of the past twice as long as the level below.

    A_ts = λ_t[lev(t, s)] Π_{r=s+1..t} γ_r q_t·k_s, lev(t, s) = bit length of t xor s (a Fenwick tree). At token t the
    matrices of all levels up to that of the lowest set bit of t are merged, and the new token alone becomes level 0;
    o_t = Σ_l λ_t[l] S_lᵀ q_t;  state: level_l for l = 0 and every set bit l − 1 of t, about ½ log₂ t matrices.
    γ = sigmoid(·)^(1/16) starts near .96 and λ = softplus(·) near 1. O(t log t) in parallel.
    Source: Guo et al., arXiv 2506.04761.
    """

    levels: int = 16
    """Number of weights λ per head. Higher levels share the last one; 16 suffice for sequences of 2^15 tokens."""

    chunk: ClassVar[int] = 64
    """Positions per chunk, within which A is formed; a power of two."""
    neutral_gates: ClassVar[Mapping[str, float]] = {"log_decay": 0.0, "level": 1.0}
    gate_options: ClassVar[tuple[str, ...]] = ("levels",)

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("levels", self.levels)
        self.decay_proj = nn.Linear(self.d_model, self.heads)
        self.level_proj = nn.Linear(self.d_model, self.heads * self.levels)
        nn.init.constant_(self.level_proj.bias, 0.5413)  # softplus(0.5413) = 1

    @property
    def state_limit(self) -> int | None:
        return None

    def gates(self, x: Hidden) -> Gates:
        """log_decay log γ: b h t; level λ: b h t levels."""
        level = F.softplus(self.level_proj(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return {"log_decay": F.logsigmoid(self.decay_proj(x)).transpose(1, 2) / 16, "level": level}

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        return self._run(partial(blocked, chunk=self.chunk), q, k, v, gates, {} if state is None else state)

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        return self._run(step, q, k, v, gates, state)

    def _run(
        self, form: Callable[..., tuple[Value, State]], q: Query, k: Query, v: Value, gates: Gates, state: State
    ) -> tuple[Value, State]:
        with without_autocast(q):
            o, after = form(*map(full_precision, (q, k, v, gates["log_decay"], gates["level"])), state)
        return o.to(v.dtype), after

    def empty_state(self, q: Query, v: Value) -> State:
        return {}
