"""Exact top-k attention: the upper bound of attention to k tokens (Gupta et al., arXiv 2106.06899)."""

from dataclasses import dataclass

from recall_lab.mixer.cache import Budget, CachedKey, largest, only
from recall_lab.mixer.positions import Bias
from recall_lab.shapes import Attention, Query


@dataclass(eq=False, repr=False, kw_only=True)
class TopK(Budget):
    """Every token is kept, and each query attends to the `budget` tokens with the largest logits.

    o_t = Σ_{s∈C_t} softmax_s(q_t·k_s / √d_key) v_s,  C_t the `budget` positions s ≤ t of largest q_t·k_s (all
    positions while t < budget; of equal ones the earliest). Token t is included only if it is among them.  A is that
    softmax;  state: all k and v so far. With positions, logits are ranked as the softmax receives them: of rotated q
    and k, or with ALiBi's bias. No other choice of `budget` tokens covers more of softmax's weight, so top_k is
    the upper bound for policies with this budget.
    Source: Gupta et al., arXiv 2106.06899.
    """

    def logits(self, q: Query, k: CachedKey, bias: Bias | None = None) -> Attention:
        logits = super().logits(q, k, bias)
        return only(logits, largest(logits.detach(), self.budget))
