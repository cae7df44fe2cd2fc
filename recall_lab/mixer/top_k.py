"""Exact top-k attention: the best that looking at k tokens can do (Gupta et al., arXiv 2106.06899)."""

from dataclasses import dataclass

from recall_lab.mixer.cache import Budget, CachedKey, among, largest
from recall_lab.shapes import Attention, Query


@dataclass(eq=False, repr=False, kw_only=True)
class TopK(Budget):
    """Every token kept, but each query looks at no more than the `budget` with the largest logits.

    o_t = Σ_{s∈C_t} softmax_s(q_t·k_s / √d_key) v_s,  C_t the `budget` places s ≤ t of largest q_t·k_s (all of them
    while there are no more; of equal ones the earliest), the current one having no privilege;  A is that softmax;
    state: all k and v so far. The dynamic oracle: no other choice of as many tokens keeps more of softmax's weight.
    Source: Gupta et al., arXiv 2106.06899.
    """

    def logits(self, q: Query, k: CachedKey) -> Attention:
        logits = super().logits(q, k)
        return among(logits, largest(logits.detach(), self.budget))
