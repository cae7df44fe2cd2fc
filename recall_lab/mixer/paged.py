"""Query-aware selection of pages (Quest, Tang et al., arXiv 2406.10774)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from recall_lab.mixer.cache import Budget, CachedKey, among, largest
from recall_lab.shapes import Attention, Query


@dataclass(eq=False, repr=False, kw_only=True)
class Paged(Budget):
    """Every token kept, in pages; each query looks at the few pages that could hold its largest logits.

    Page p holds the places p·page … (p+1)·page − 1, as far as they are ≤ t; m and M are the smallest and largest value
    of each channel of its keys. Σ_c max(q_c m_c, q_c M_c) bounds q·k for all k of the page from above; the
    `budget` / `page` pages with the largest bounds are looked at (of equal ones the earliest), the current page having
    no privilege:  o_t = Σ_{s∈C_t} softmax_s(q_t·k_s / √d_key) v_s, C_t the places of those pages;  A is that softmax;
    state: all k and v so far (m and M are taken from k again at every step and not carried).
    page = 1 is `top_k`.
    Source: Tang et al., arXiv 2406.10774. Raises ValueError where page does not divide budget.
    """

    page: int = 16
    """Tokens of a page."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.page, int) or self.page < 1 or self.budget % self.page:
            raise ValueError(f"page={self.page!r}: a whole number that divides budget={self.budget}")

    def logits(self, q: Query, k: CachedKey) -> Attention:
        logits = super().logits(q, k)
        looked_at = largest(self.bound(q.detach(), k.detach()), self.budget // self.page)
        looked_at = looked_at.repeat_interleave(self.page, dim=-1)[..., : k.shape[2]]
        return among(logits, looked_at)

    def bound(self, q: Query, k: CachedKey) -> Float[Tensor, "b h t pages"]:
        """Σ_c max(q_c m_c, q_c M_c) of each query and page (b h t pages), −∞ for pages that have not begun."""
        t, s = q.shape[2], k.shape[2]
        place = torch.arange(s - t, s, device=q.device)
        own = place // self.page
        pages = F.pad(k, (0, 0, 0, -s % self.page)).unflatten(2, (-1, self.page))
        up, down = q.clamp(min=0), q.clamp(max=0)
        whole = up @ pages.amax(3).mT + down @ pages.amin(3).mT
        # The page of the query itself holds only the places up to it.
        begun = (s - t) // self.page
        so_far = (pages[:, :, begun:].cummax(3).values, pages[:, :, begun:].cummin(3).values)
        highest, lowest = (x.flatten(2, 3)[:, :, place - begun * self.page] for x in so_far)
        current = (up * highest + down * lowest).sum(-1, keepdim=True)
        page = torch.arange(pages.shape[2], device=q.device)
        return torch.where(page < own[:, None], whole, current.masked_fill(page != own[:, None], -torch.inf))
