"""Exact top-k attention: the upper bound of attention to k tokens (Gupta et al., arXiv 2106.06899)."""

from dataclasses import dataclass

import torch

from recall_lab.mixer.cache import CachedKey, largest, score
from recall_lab.mixer.positions import Bias
from recall_lab.mixer.selection import Chosen, Selection
from recall_lab.shapes import Query


@dataclass(eq=False, repr=False, kw_only=True)
class TopK(Selection):
    """Every token is kept, and each query attends to the `budget` tokens with the largest logits.

    o_t = Σ_{s∈C_t} softmax_s(q_t·k_s / √d_key) v_s,  C_t the `budget` positions s ≤ t of largest q_t·k_s (all
    positions while t < budget; of equal ones the earliest). Token t is included only if it is among them.  A is that
    softmax;  state: all k and v so far. With positions, logits are ranked as the softmax receives them: of rotated q
    and k, or with ALiBi's bias. No other choice of `budget` tokens covers more of softmax's weight, so top_k is
    the upper bound for policies with this budget.
    Source: Gupta et al., arXiv 2106.06899.
    """

    def chosen(self, q: Query, k: CachedKey, bias: Bias | None) -> Chosen:
        logits = score(q, k)
        t = q.shape[2]
        logits[..., -t:] += q.new_full((t, t), -torch.inf).triu(1) if bias is None else 0
        return largest(logits if bias is None else logits + bias, self.budget)
