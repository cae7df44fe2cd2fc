"""Exact top-k attention: the upper bound of attention to k tokens (Gupta et al., arXiv 2106.06899)."""

from dataclasses import dataclass

import torch

from recall_lab.checks import require, whole_number
from recall_lab.mixer.cache import Cached, CachedKey, Kept, largest, latest, recent, score
from recall_lab.mixer.positions import Bias
from recall_lab.mixer.selection import Chosen, Selection
from recall_lab.shapes import Query


@dataclass(eq=False, repr=False, kw_only=True)
class TopK(Selection):
    """Of the tokens kept, each query attends to the `budget` tokens with the largest logits.

    o_t = Σ_{s∈C_t} softmax_s(q_t·k_s / √d_key) v_s,  C_t: the `budget` positions s with the largest q_t·k_s (all if
    there are fewer; the earliest among equals) out of t − C < s ≤ t, C = `kept`, or out of all s ≤ t without it. Token
    t is included only if it is among them.  A is that softmax;  state: k and v of the last C − 1 tokens, or of all.
    With positions, logits are ranked as the softmax receives them: of rotated q and k, or with ALiBi's bias. With all
    tokens kept, no other choice of `budget` tokens covers more of softmax's weight, so top_k is the upper bound for
    policies with this budget. With C = `budget` it is `window`.
    Source: Gupta et al., arXiv 2106.06899. Raises ValueError unless kept ≥ budget.
    """

    kept: int | None = None
    """C: most recent tokens that are kept to choose from, the current one included; None: all tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kept is not None:
            whole_number("kept", self.kept)
            require(self.kept >= self.budget, f"kept={self.kept}: must be at least budget={self.budget}")

    @property
    def state_limit(self) -> int | None:
        return self.kept

    def chosen(self, q: Query, k: CachedKey, bias: Bias | None) -> Chosen:
        logits = score(q, k)
        t = q.shape[2]
        if bias is None:
            logits[..., -t:] += q.new_full((t, t), -torch.inf).triu(1)
        else:
            logits = logits + bias
        if self.kept is None:
            return largest(logits, self.budget)
        logits = recent(logits, self.kept)
        return largest(logits, self.budget) & (logits > -torch.inf)

    def keep(self, x: Cached) -> Kept:
        return x if self.kept is None else latest(x, self.kept)
