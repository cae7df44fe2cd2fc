"""The engine of dynamic policies: attention to tokens that are chosen for each query.

The choice has no gradient and enters torch's fused attention as a constant mask. The gradient flows through the
attended logits alone, and no attention weights are stored for the backward pass.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from recall_lab.mixer.cache import Budget, CachedKey, causal, extend, read
from recall_lab.mixer.numerics import full_precision, without_autocast
from recall_lab.mixer.positions import Bias
from recall_lab.shapes import Attention, Gates, Query, State, Value

Chosen = Bool[Tensor, "b h t s"]
"""True where query t attends to token s."""


@dataclass(eq=False, repr=False, kw_only=True)
class Selection(Budget):
    """Each query attends to the tokens that the policy's `chosen` selects for it among those kept."""

    block: ClassVar[int] = 256
    piece: ClassVar[int] = 32
    """Number of queries for which tokens are chosen at a time: intermediate results then fit in the CPU's cache."""

    @abstractmethod
    def chosen(self, q: Query, k: CachedKey, bias: Bias | None) -> Chosen:
        """True at the tokens attended to; k ends with the keys of q's own positions.

        Tokens after the query may be True as well: `mask` excludes them.
        """

    def attend(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        cached = extend(state, k, v)
        q, k, values = (full_precision(x) for x in (q, cached["k"], cached["v"]))
        with without_autocast(q):
            mask = self.mask(q.detach(), k.detach(), self.bias(q, cached))
            o = F.scaled_dot_product_attention(q, k, values, attn_mask=mask)
        return o.to(v.dtype), {name: self.keep(x) for name, x in cached.items()}

    def attend_one(self, q: Query, k: Query, v: Value, gates: Gates, state: State) -> tuple[Value, State]:
        # Fused attention has no forward-mode derivative, with which probes differentiate one step.
        cached = extend(state, k, v)
        q, keys, values = (full_precision(x) for x in (q, cached["k"], cached["v"]))
        with without_autocast(q):
            mask = self.mask(q.detach(), keys.detach(), self.bias(q, cached))
            o = read(causal(q, keys, mask), values)
        return o.to(v.dtype), {name: self.keep(x) for name, x in cached.items()}

    def mask(self, q: Query, k: CachedKey, bias: Bias | None) -> Attention:
        """The bias, or zero, at the tokens attended to, −∞ elsewhere."""
        t, s = q.shape[2], k.shape[2]
        chosen = []
        for start in range(0, t, self.piece):
            end = min(start + self.piece, t)
            later = t - end  # keys after those of the queries
            near = None if bias is None else bias[:, :, start:end, : s - later]
            chosen.append(F.pad(self.chosen(q[:, :, start:end], k[:, :, : s - later], near), (0, later)))
        seen = q.new_full((t, s), -torch.inf).triu(s - t + 1) if bias is None else bias
        # Equals torch.where(chosen, seen, −∞) in less time: 1 − 1/chosen is 0 for True and −∞ for False.
        return torch.cat(chosen, dim=2).to(q).reciprocal_().neg_().add_(1).add_(seen)
