"""A sliding window and attention sinks (StreamingLLM, Xiao et al., arXiv 2309.17453)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from recall_lab.mixer.cache import Budget, CachedKey
from recall_lab.shapes import Attention, Query


@dataclass(eq=False, repr=False, kw_only=True)
class SinkWindow(Budget):
    """The first few tokens of the sequence kept for good, and the last w.

    o_t = Σ_{s∈C_t} softmax_s(q_t·k_s / √d_key) v_s,  C_t = {s ≤ t: s < sinks or s > t − w},  w = `budget` − `sinks`,
    a token that is both counting once;  A is that softmax;  state: k and v of the first `sinks` and the last w − 1
    tokens, fewer while fewer exist.  sinks = 0 is `window`.  The sinks are tokens of the sequence, not learned ones,
    and as no positions are encoded they need none of the paper's renumbering.
    Source: Xiao et al., arXiv 2309.17453. Raises ValueError unless 0 ≤ sinks < budget.
    """

    sinks: int = 4
    """First tokens of the sequence that are always kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.sinks, int) or not 0 <= self.sinks < self.budget:
            raise ValueError(f"sinks={self.sinks!r}: a whole number from 0 to budget − 1 = {self.budget - 1}")

    def logits(self, q: Query, k: CachedKey) -> Attention:
        # Once the sinks and the window lie apart, the tokens between them are gone from k as well: places in k count
        # like places in the sequence, as far as they matter.
        logits = super().logits(q, k)
        t, s = logits.shape[-2:]
        gone = logits.new_full((t, s), -torch.inf).tril(s - t - self.budget + self.sinks)
        gone[:, : self.sinks] = 0
        return logits + gone

    def keep(self, x: Tensor) -> Tensor:
        first = max(x.shape[2] - (self.budget - self.sinks) + 1, self.sinks)
        return torch.cat([x[:, :, : self.sinks], x[:, :, first:]], dim=2)
