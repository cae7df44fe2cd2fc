"""Sliding-window attention (Beltagy et al., arXiv 2004.05150)."""

from dataclasses import dataclass

from recall_lab.mixer.cache import Cached, CachedKey, Kept, Static, latest, recent
from recall_lab.mixer.positions import Bias
from recall_lab.shapes import Attention, Query


@dataclass(eq=False, repr=False, kw_only=True)
class Window(Static):
    """Each query attends to the last w tokens: its own and the w − 1 before it.

    o_t = Σ_{t−w<s≤t} softmax_s(q_t·k_s / √d_key) v_s,  w = `budget`;  A is that softmax, zero where t − s ≥ w;
    state: k and v of the last w − 1 tokens, or of all if there are fewer.
    Source: Beltagy et al., arXiv 2004.05150.
    """

    def logits(self, q: Query, k: CachedKey, bias: Bias | None = None) -> Attention:
        return recent(super().logits(q, k, bias), self.budget)

    def keep(self, x: Cached) -> Kept:
        return latest(x, self.budget)
