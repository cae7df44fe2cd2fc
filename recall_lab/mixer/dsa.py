"""DeepSeek sparse attention (DeepSeek-AI, arXiv 2512.02556)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from recall_lab.checks import whole_number
from recall_lab.mixer.cache import Budget, causal, extend, hide_future, largest, only, read, score
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class DSA(Budget):
    """Each query attends to the tokens that a small indexer, with queries and keys of its own, scores highest.

    I_ts = Σ_j w_tj ReLU(u_tj·e_s / √index_width) over the heads j of the indexer,  o_t = Σ_{s∈C_t} softmax_s(q_t·k_s /
    √d_key) v_s,  C_t: the `budget` positions s ≤ t with the largest I_ts (of equal ones the earliest), the same for all
    heads.  A is that softmax;  state: k, v and e of all tokens so far. u, w and e are projections of x, w divided by
    √index_heads; e is shared by the indexer's heads.
    In the paper the indexer has a loss of its own, the Kullback–Leibler divergence between softmax_s(I_ts) and the mean
    weights of the heads, with no gradient to x. Here there is no second loss: I_ts gets the gradient of the logits of t
    and s, summed over heads (straight-through), so it rises for chosen tokens that should get more weight. The indexer
    has no norm and no positions, and is computed in full precision. All logits are computed and then masked, so this
    implementation saves neither time nor memory. In the oracle u, e and w are constants: all scores are equal, and
    the earliest tokens are attended to.
    Source: DeepSeek-AI, arXiv 2512.02556.
    """

    index_heads: int = 4
    """Heads of the indexer."""
    index_width: int = 16
    """Width of the indexer's queries and keys."""

    neutral_gates: ClassVar[Mapping[str, float]] = {"index_query": 1.0, "index_key": 1.0, "index_weight": 1.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("index_heads", self.index_heads)
        whole_number("index_width", self.index_width)
        self.index_proj = nn.Linear(self.d_model, sum(self.index_widths), bias=False)

    @property
    def index_widths(self) -> tuple[int, int, int]:
        """Widths of u, e and w of one token."""
        return self.index_heads * self.index_width, self.index_width, self.index_heads

    def gates(self, x: Hidden) -> Gates:
        """The indexer's queries u (b j t d), keys e (b 1 t d) and weights w (b j t)."""
        with without_autocast(x):  # half precision would change which tokens are chosen
            projected = F.linear(full_precision(x), full_precision(self.index_proj.weight))
        u, e, w = projected.split(self.index_widths, dim=-1)
        u = u.unflatten(-1, (self.index_heads, -1)).transpose(1, 2)  # b j t d
        w = w.transpose(1, 2) * self.index_heads**-0.5  # b j t
        return {"index_query": u, "index_key": e[:, None], "index_weight": w}

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        cached = extend(state, k, v) | {"index": torch.cat([state["index"], gates["index_key"]], dim=2)}
        logits = causal(q, cached["k"], self.bias(q, cached))  # b h t s
        u = gates["index_query"]
        rank = F.relu(score(u, cached["index"].expand(-1, u.shape[1], -1, -1)))  # b j t s
        rank = (gates["index_weight"][..., None] * rank).sum(1, keepdim=True)  # b 1 t s
        chosen = largest(hide_future(rank.detach()), self.budget)
        logits = only(logits + (rank - rank.detach()), chosen.expand_as(logits))
        return read(logits, cached["v"]), cached

    def empty_state(self, q: Query, v: Value) -> State:
        return super().empty_state(q, v) | {"index": full_precision(q).new_zeros(q.shape[0], 1, 0, self.index_width)}
