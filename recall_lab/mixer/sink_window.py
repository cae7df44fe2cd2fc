"""A sliding window and attention sinks (StreamingLLM, Xiao et al., arXiv 2309.17453)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from recall_lab.checks import require, whole_number
from recall_lab.mixer.cache import Cached, CachedKey, Kept, Static
from recall_lab.mixer.positions import Bias
from recall_lab.shapes import Attention, Query


@dataclass(eq=False, repr=False, kw_only=True)
class SinkWindow(Static):
    """Each query attends to the first tokens of the sequence (the sinks) and to the last w.

    o_t = Σ_{s∈C_t} softmax_s(q_t·k_s / √d_key) v_s,  C_t = {s ≤ t: s < sinks or s > t − w},  w = `budget` − `sinks`;
    A is that softmax;  state: k and v of the first `sinks` and the last w − 1 tokens, or of all if there are fewer.
    With sinks = 0 it is `window`. The sinks are tokens of the sequence and not learned. With
    positions, every token keeps its own; the paper renumbers the tokens in the cache.
    Source: Xiao et al., arXiv 2309.17453. Raises ValueError unless 0 ≤ sinks < budget.
    """

    sinks: int = 4
    """Number of first tokens that are always kept."""

    gaps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("sinks", self.sinks, 0)
        require(self.sinks < self.budget, f"sinks={self.sinks}: must be less than budget={self.budget}")

    def logits(self, q: Query, k: CachedKey, bias: Bias | None = None) -> Attention:
        # k lacks the tokens between the sinks and the window. Distances to q within the window are still right, and
        # indices below `sinks` still denote the sinks.
        logits = super().logits(q, k, bias)
        t, s = logits.shape[-2:]
        outside = logits.new_full((t, s), -torch.inf).tril(s - t - self.budget + self.sinks)
        outside[:, : self.sinks] = 0
        return logits + outside

    def keep(self, x: Cached) -> Kept:
        first = max(x.shape[2] - (self.budget - self.sinks) + 1, self.sinks)
        return torch.cat([x[:, :, : self.sinks], x[:, :, first:]], dim=2)
