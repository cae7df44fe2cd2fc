"""Native sparse attention (Yuan et al., arXiv 2502.11089)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from recall_lab.checks import require, whole_number
from recall_lab.mixer.blocks import chosen_blocks, mean_of_blocks, to_tokens
from recall_lab.mixer.cache import Cache, causal, extend, only, recent, softmax_or_zero
from recall_lab.shapes import Gates, Hidden, Query, State, Value


@dataclass(eq=False, repr=False, kw_only=True)
class NSA(Cache):
    """Each query attends to summaries of all past blocks, to the tokens of a few blocks it chooses, and to a window.

    o_t = g¹_t Σ_c p_tc v̄_c + g²_t Σ_{s∈C_t} softmax_s(z_ts) v_s + g³_t Σ_{s>t−window} softmax_s(z_ts) v_s,
    z_ts = q_t·k_s / √d_key. k̄_c and v̄_c are means over block c of `block_size` tokens, p_tc = softmax_c(q_t·k̄_c /
    √d_key) over the blocks that are complete at t; p_tc = 0 for all others. C_t: the positions s ≤ t in the first
    block, in that of t, in the one before it, and in those with the largest p_tc (of equal ones the earliest), `budget`
    / block_size blocks in all. g = sigmoid(·), one per branch and head.  A is the sum of the three weights, those of a
    block divided evenly among its tokens;  state: all k and v so far. The choice has no gradient: p is trained through
    the first branch only.
    As in flash-linear-attention, summaries are means, and the same blocks are summarised and chosen. In the paper a
    learned map summarises overlapping blocks, each branch has its own k and v, and heads that share k and v choose
    the same blocks; here every head has its own k and v and its own choice. All weights are computed and then masked,
    so this implementation saves neither time nor memory. With ALiBi a block has the mean bias of its tokens.
    Source: Yuan et al., arXiv 2502.11089.
    Raises ValueError unless block_size divides budget into 3 blocks or more.
    """

    budget: int = 64
    """Tokens in the blocks that a query chooses."""
    block_size: int = 8
    """Tokens per block."""
    window: int = 16
    """Most recent tokens that a query attends to, its own included."""

    group: ClassVar[int] = 1
    """Adjacent heads that choose blocks together, by the mean of their p."""
    neutral_gates: ClassVar[Mapping[str, float]] = {"compressed": 0.0, "chosen": 1.0, "recent": 0.0}
    """The chosen blocks alone: with a budget of at least the length, this is softmax attention."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("budget", "block_size", "window"):
            whole_number(name, getattr(self, name))
        fits = self.budget % self.block_size == 0 and self.budget >= 3 * self.block_size
        require(fits, f"block_size={self.block_size}: must divide budget={self.budget} into 3 blocks or more")
        self.branch_proj = nn.Linear(self.d_model, 3 * self.heads, bias=False)

    def gates(self, x: Hidden) -> Gates:
        """g of the three branches: compressed, chosen and recent, b h t each."""
        g = torch.sigmoid(self.branch_proj(x)).unflatten(-1, (self.heads, 3)).transpose(1, 2)  # b h t 3
        return dict(zip(self.neutral_gates, g.unbind(-1), strict=True))

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        cached = extend(state, k, v)
        logits = causal(q, cached["k"], self.bias(q, cached))  # b h t s
        size, tokens = self.block_size, logits.shape[-1]
        p = softmax_or_zero(mean_of_blocks(logits, size))  # b h t blocks
        chosen = chosen_blocks(p, size, tokens, self.budget // size, self.group)
        A = gates["compressed"][..., None] * to_tokens(p / size, size, tokens)
        A = A + gates["chosen"][..., None] * torch.softmax(only(logits, to_tokens(chosen, size, tokens)), dim=-1)
        A = A + gates["recent"][..., None] * torch.softmax(recent(logits, self.window), dim=-1)
        return A.to(v.dtype) @ cached["v"], cached
