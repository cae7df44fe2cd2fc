"""TTT-Linear: learning at test time with a linear model (Sun et al., arXiv 2407.04620)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from recall_lab.checks import require, whole_number
from recall_lab.mixer import inner_descent
from recall_lab.mixer.base import Mixer
from recall_lab.mixer.inner_descent import Norm, layer_norm
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class TTTLinear(Mixer):
    """The state is a linear model from keys to values, trained by gradient descent on mini-batches of the sequence.

    f(x) = x + LN(x W + c). Let W and c be those at the start of a mini-batch, and u_s the gradient of ½‖f(k_s) − v_s‖²
    with respect to k_s W + c. Then W_t = W − a_t Σ_{s≤t} l_s k_sᵀ u_s / d,  c_t = c − a_t Σ_{s≤t} l_s u_s / d, with
    sums over the tokens of the mini-batch. The next mini-batch starts with the last W_t and c_t.
    o_t = q_t + LN(q_t W_t + c_t);  no A: o is not linear in v;
    state: W (d × d) and c, and the keys and gradients of the 0 to mini_batch − 1 tokens of an unfinished mini-batch.
    Learned: the first W (initially normal with standard deviation .02), the first c (initially 0), LN, the rate
    l = sigmoid(·), near ½ at the start, and max(a_i, 0) for the i-th position of a mini-batch, 1/i
    at the start. The paper's rotary positions, norm of the output and gate are left out.
    flash-linear-attention 0.6.0 differs: there o = z + LN(z) with z = q_t W_t / √d + c_t,
    and one rate, of the position t, in place of a_t l_s / d.
    Raises ValueError unless d_value equals d_key.
    Source: Sun et al., arXiv 2407.04620.
    """

    mini_batch: int = 16
    """Tokens whose gradients are taken at the same W and c."""

    compiles: ClassVar[bool] = False
    linear_in_v: ClassVar[bool] = False
    no_weight_decay: ClassVar[tuple[str, ...]] = ("first_weight", "first_c", "scale", "shift")

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("mini_batch", self.mini_batch)
        require(self.d_value == self.d_key, f"d_value={self.d_value}: must equal d_key={self.d_key} in ttt_linear")
        self.first_weight = nn.Parameter(0.02 * torch.randn(self.heads, self.d_key, self.d_key))
        self.first_c, self.shift = (nn.Parameter(torch.zeros(self.heads, 1, self.d_key)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(self.heads, 1, self.d_key))
        self.shares = nn.Parameter(1 / torch.arange(1, self.mini_batch + 1))
        self.rate_proj = nn.Linear(self.d_model, self.heads)
        nn.init.normal_(self.rate_proj.weight, std=0.02)
        nn.init.zeros_(self.rate_proj.bias)

    def gates(self, x: Hidden) -> Gates:
        """rate l: b h t."""
        return {"rate": torch.sigmoid(self.rate_proj(x)).transpose(1, 2)}

    @property
    def state_limit(self) -> int:
        return self.mini_batch - 1

    def parallel(self, q: Query, k: Query, v: Value, gates: Gates, state: State | None = None) -> tuple[Value, State]:
        state = self.empty_state(q, v) if state is None else state
        return self._run(inner_descent.mini_batches, q, k, v, gates, state)

    def recurrence(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        return self._run(inner_descent.step, q, k, v, gates, state)

    def _run(self, form: Callable[..., tuple[Value, State]], q: Query, k: Query, v: Value, gates: Gates, state: State
    ) -> tuple[Value, State]:  # fmt: skip
        with without_autocast(q):
            wide, rate = full_precision(q), full_precision(gates["rate"]) / self.d_key
            position = (state["keys"].shape[2] + torch.arange(q.shape[2], device=q.device)) % self.mini_batch
            share = self.shares.clamp(min=0)[position].expand_as(rate)
            norm = Norm(self.scale, self.shift)
            z, state = form(wide, full_precision(k), full_precision(v), rate, share, norm, state, self.mini_batch)
            return (wide + layer_norm(z, norm)).to(v.dtype), state

    def empty_state(self, q: Query, v: Value) -> State:
        first = (x.to(full_precision(v).dtype).expand(len(v), -1, -1, -1) for x in (self.first_weight, self.first_c))
        return inner_descent.empty(*first)
