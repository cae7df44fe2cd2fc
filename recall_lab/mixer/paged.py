"""Query-aware selection of pages (Quest, Tang et al., arXiv 2406.10774)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from recall_lab.checks import require, whole_number
from recall_lab.mixer.base import query_scale
from recall_lab.mixer.cache import CachedKey, largest
from recall_lab.mixer.positions import Bias
from recall_lab.mixer.selection import Chosen, Selection
from recall_lab.shapes import Query


@dataclass(eq=False, repr=False, kw_only=True)
class Paged(Selection):
    """Every token is kept, in pages, and each query attends to the pages that may hold its largest logits.

    Page p holds the positions p·page … (p+1)·page − 1 up to t. With m_c and M_c the smallest and largest value of
    channel c among its keys, Σ_c max(q_c m_c, q_c M_c) is an upper bound of q·k for all keys k of the page. The
    `budget` / `page` pages with the largest bounds are attended to (of equal ones the earliest), the page of token t
    only if it is among them:  o_t = Σ_{s∈C_t} softmax_s(q_t·k_s / √d_key) v_s, C_t the positions of those pages;
    A is that softmax;  state: all k and v so far (m and M are computed from k at every step and not carried).
    With page = 1 it is `top_k`. With rotary positions the bounds are of rotated q and k; with ALiBi the largest
    bias of the page is added to the bound / √d_key.
    Source: Tang et al., arXiv 2406.10774. Raises ValueError where page does not divide budget.
    """

    page: int = 16
    """Tokens per page."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("page", self.page)
        require(self.budget % self.page == 0, f"page={self.page}: must divide budget={self.budget}")

    def chosen(self, q: Query, k: CachedKey, bias: Bias | None) -> Chosen:
        bound = self.bound(q, k)  # b h t pages
        if bias is not None:
            least_distant = (
                F.pad(bias, (0, -k.shape[2] % self.page), value=-torch.inf).unflatten(3, (-1, self.page)).amax(4)
            )
            bound = bound * query_scale(q.shape[-1]) + least_distant
        pages = largest(bound, self.budget // self.page)  # b h t pages
        return pages.repeat_interleave(self.page, dim=-1)[..., : k.shape[2]]

    def bound(self, q: Query, k: CachedKey) -> Float[Tensor, "b h t pages"]:
        """Σ_c max(q_c m_c, q_c M_c) for each query and page, −∞ for pages that begin after the query."""
        t, s = q.shape[2], k.shape[2]
        position = torch.arange(s - t, s, device=q.device)  # of the queries
        own = position // self.page
        pages = F.pad(k, (0, 0, 0, -s % self.page)).unflatten(2, (-1, self.page))  # b h pages page k
        up, down = q.clamp(min=0), q.clamp(max=0)
        bound = up @ pages.amax(3).mT + down @ pages.amin(3).mT  # b h t pages
        # A query's own page ends with the query, so its bound is computed from the keys up to the query.
        first = (s - t) // self.page
        running = (pages[:, :, first:].cummax(3).values, pages[:, :, first:].cummin(3).values)
        highest, lowest = (x.flatten(2, 3)[:, :, position - first * self.page] for x in running)  # b h t k
        current = (up * highest + down * lowest).sum(-1, keepdim=True)  # b h t 1
        page = torch.arange(pages.shape[2], device=q.device)
        return torch.where(page < own[:, None], bound, current.masked_fill(page != own[:, None], -torch.inf))
